"""What ``pilotlight decision`` and ``pilotlight why`` say of rows."""

from typing import Any

from pilotlight.cli.decisions import explained, waits_for

STARTED: dict[str, Any] = {
    "decision_id": "dec-1",
    "kind": "cold_start",
    "instance_id": "i1",
    "reasons": ["1 request waits"],
    "outcome": {
        "meets_slo": True,
        "scheme": {
            "pipeline_size": 2,
            "predicted_ttft_s": 4.0,
            "placements": [
                {"worker_id": "w1", "node_id": "n1", "source": "s3://b"},
                {"worker_id": "w2", "node_id": "n2", "source": "n7"},
            ],
        },
        "considered": [
            {"pipeline_size": 2, "predicted_ttft_s": 4.0},
            {"pipeline_size": 1, "predicted_ttft_s": 7.5},
        ],
    },
}
REFUSED: dict[str, Any] = {
    "decision_id": "dec-2",
    "kind": "cold_start",
    "instance_id": None,
    "reasons": ["1 request waits", "w1: no room"],
    "outcome": {"refused": "no_room", "message": "none of 2 workers has room"},
}
OPEN = {"status": "open", "instance_id": "i1", "phases": [{"name": "fetch"}]}
DONE = {"status": "done", "instance_id": "i1", "phases": []}


def test_why_two_stages() -> None:
    """With one the first token would be too late."""
    lines = explained(STARTED)
    assert lines[0] == "2 stages: w1 on n1 from s3://b, w2 on n2 from n7"
    assert "1 would give the first token in 7.500 s, and 2 meet the SLO with 4.000 s" in lines[1]


def test_an_slo_that_cannot_be_met_is_named() -> None:
    outcome = {**STARTED["outcome"], "meets_slo": False}
    assert "no scheme meets the SLO" in explained({**STARTED, "outcome": outcome})[1]


def test_a_row_of_the_release_before_is_read() -> None:
    """It has neither predictions of phases nor sizes of alternatives."""
    scheme = {"pipeline_size": 1, "predicted_ttft_s": 1.0, "placements": []}
    outcome = {"meets_slo": True, "scheme": scheme, "considered": [{"worker_ids": ["w"]}]}
    assert "one stage meets the SLO" in explained({"outcome": outcome})[1]


def test_what_a_model_waits_for() -> None:
    """Served, under way, refused, never asked for."""
    assert waits_for("m", [("w1", "ready")], [OPEN], [STARTED]) == (
        "m waits for nothing: it is served by w1",
    )
    under_way = waits_for("m", [("w1", "loading")], [OPEN], [STARTED])
    assert under_way[0] == "m waits for its start on w1: so far fetch was reported"
    assert under_way[1].startswith("2 stages")
    refused = waits_for("m", [], [DONE], [REFUSED])
    assert refused[0] == "m waits for room: no_room: none of 2 workers has room"
    assert refused[2] == "w1: no room"
    assert "no scheduler has decided" in waits_for("m", [], [], [])[0]
    assert "no request asks for it" in waits_for("m", [], [DONE], [STARTED])[0]
    gone = {**DONE, "status": "abandoned"}
    assert waits_for("m", [], [gone], [STARTED], "bad_checkpoint: x")[1] == "bad_checkpoint: x"
