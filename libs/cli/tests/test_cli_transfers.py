"""``pilotlight transfers``: once, again and again, as JSON, and with nothing to show."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from pilotlight.cli import transfers
from pilotlight.cli.client import AdminClient, SystemNotRunning

MIB = 1024 * 1024
MOVING: dict[str, Any] = {
    "node_id": "node-b",
    "model": "org/qwen",
    "digest": "ab" * 32,
    "source": "s3://bucket/qwen",
    "priority": "cold_start",
    "done_bytes": 30 * MIB,
    "total_bytes": 120 * MIB,
    "bytes_per_s": 22.5 * MIB,
    "left_s": 4.0,
    "age_s": 2.0,
    "origins": [
        {"kind": "peer", "name": "node-a", "size_bytes": 28 * MIB},
        {"kind": "source", "name": "s3://bucket/qwen", "size_bytes": 2 * MIB},
    ],
}
NEW: dict[str, Any] = {
    **MOVING,
    "model": "",
    "priority": "prefetch",
    "done_bytes": 0,
    "bytes_per_s": None,
    "left_s": None,
    "origins": [{"kind": "peer", "name": f"[n{index}]", "size_bytes": 0} for index in range(5)],
}
LINK = {"node_id": "node-b", "kind": "peer", "name": "peer://node-a", "bytes_per_s": 22.5 * MIB}


class Scripted(AdminClient):
    """Answers what it is told to, then is gone."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:1", "key")
        self._answers: Iterator[dict[str, Any]] = iter(answers)

    def get(self, path: str, **parameters: str | int) -> Any:
        assert path == "/transfers"
        try:
            return next(self._answers)
        except StopIteration:
            raise SystemNotRunning("it was stopped") from None


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "POLL_INTERVAL_S", 0.0)


def test_a_transfer_is_shown_with_its_bar_its_speed_and_whom_it_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        transfers.show(
            Scripted({"transfers": [MOVING, NEW], "links": [LINK]}), watch=False, as_json=False
        )
        == 0
    )
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["node", "model"]
    assert first.count("━") == transfers.BAR_WIDTH // 4
    for text in (
        "node-b",
        "org/qwen",
        "30.0 / 120.0",
        "22.5",
        "4.0 s",
        "node-a 28.0, s3://bucket/qwen 2.0",
    ):
        assert text in first
    assert "abababababab (prefetch)" in second, "of a release that does not say which model it is"
    assert "━" not in second
    assert "[n0] 0.0, [n1] 0.0, [n2] 0.0, 2 more" in second


def test_nothing_moves(capsys: pytest.CaptureFixture[str]) -> None:
    assert transfers.show(Scripted({"transfers": [], "links": []}), watch=False, as_json=False) == 0
    assert capsys.readouterr().out.strip() == "no transfers"
    assert (
        transfers.show(Scripted({"transfers": [], "links": [LINK]}), watch=False, as_json=False)
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("no transfers; measured when last used:")
    assert shown.splitlines()[2].split() == ["node-b", "peer://node-a", "22.5"]


def test_json_is_what_the_api_says(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"transfers": [MOVING], "links": [LINK]}
    assert transfers.show(Scripted(answer), watch=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == answer


@pytest.mark.parametrize("as_json", [False, True])
def test_watching_goes_on_line_by_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    answers = [{"transfers": [MOVING], "links": []}, {"transfers": [], "links": []}]
    with pytest.raises(SystemNotRunning):
        transfers.show(Scripted(*answers), watch=True, as_json=as_json)
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        assert [json.loads(line) for line in lines] == answers
    else:
        assert "org/qwen" in lines[1]
        assert lines[2].strip() == "no transfers"


def test_watching_on_a_terminal_draws_in_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        transfers,
        "console",
        Console(force_terminal=True, width=160, highlight=False, color_system=None),
    )
    halfway = {**MOVING, "done_bytes": 60 * MIB}
    with pytest.raises(SystemNotRunning):
        transfers.show(
            Scripted(*({"transfers": [one], "links": []} for one in (MOVING, halfway))),
            watch=True,
            as_json=False,
        )
    shown = capsys.readouterr().out
    assert "\x1b[1A" in shown, "the cursor goes back up"
    assert "60.0 / 120.0" in shown
