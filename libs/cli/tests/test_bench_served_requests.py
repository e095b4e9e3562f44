"""What ``make bench-served-gpu`` keeps of each request."""

import json
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def answer(sent_s: float, first_s: float, last_s: float, tokens: int, **more: Any):
    from served_gpu_client import Answer

    told: dict[str, Any] = {"planned_s": None, "output_tokens": tokens, "events": tokens, **more}
    return Answer(sent_s=sent_s, first_s=first_s, last_s=last_s, **told)


def test_each_request_of_a_row_can_be_looked_at_afterwards():
    from served_gpu_load import each

    late = answer(0.5, 0.8, 0.86, 4, prompt_tokens=900, gaps_s=[0.01, 0.04, 0.01])
    found = each([late, answer(0.0, 0.1, 0.1, 1, prompt_tokens=7, gaps_s=[])])
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    assert [row["sent_ms"] for row in rows] == [0.0, 500.0], "in the order in which they were sent"
    assert rows[0]["good"]
    assert rows[1] == {
        "sent_ms": 500.0,
        "prompt_tokens": 900,
        "ttft_ms": 300.0,
        "output_tokens": 4,
        "tpot_ms": 20.0,
        "good": False,
        "longest_ms": 40.0,
        "stretched": [[810.0, 40.0]],
    }


@pytest.mark.parametrize(("planned_s", "least_ms"), [(None, 10.0), (0.0, 20.0)])
def test_stretched_gaps_are_told_by_what_is_usual_where_clients_ask_in_turn(planned_s, least_ms):
    from served_gpu_load import each

    gaps_s = [0.005, 0.012, 0.005, 0.005, 0.03]
    found = each([answer(0.0, 0.1, 0.157, 6, planned_s=planned_s, gaps_s=gaps_s)])
    (row,) = found["rows"]
    told = dict(zip(found["columns"], row, strict=True))["stretched"]
    assert found["stretched_ms"] == least_ms
    assert [gap_ms for _, gap_ms in told] == [ms for ms in (12.0, 30.0) if ms > least_ms]


def test_the_requests_of_all_rounds_are_joined_a_line_each():
    from served_gpu_join import requests_of
    from served_gpu_load import each

    rounds = [each([answer(0.0, 0.1, 0.1, 1, gaps_s=[])]) for _ in range(2)]
    part = {"part": "ours-4B", "commit": "abc", "requests": {"64 concurrent": rounds}}
    text = requests_of([part, {"part": "vllm-4B", "commit": "abc"}])
    assert len(text.splitlines()) == 4
    assert [one["round"] for one in json.loads(text)] == [0, 1]
    assert json.loads(text)[1]["rows"] == rounds[1]["rows"]
