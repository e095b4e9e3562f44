"""ParaServe's figures 5 and 7 and its tables, as ``bench/scheduler_figures.py`` has them."""

from itertools import pairwise
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
WARM = {"7b": (1.5, 0.042), "13b": (2.4, 0.058)}
"""Table 1 of the paper."""


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_figure_5() -> None:
    """More stages: an earlier first token, by less each time; slower tokens unless each worker has
    the memory of a whole instance.
    """
    from scheduler_figures import figure_5

    found = figure_5()
    gained = [one - next_ for one, next_ in pairwise(found["ttft_s"]["as before"])]
    assert gained == sorted(gained, reverse=True)
    assert gained[-1] > 0
    assert max(found["ttft_s"]["overlapped"]) < min(found["ttft_s"]["as before"])
    one, *more = found["tpot_s"]
    assert more == pytest.approx([size * one for size in (2, 3, 4)], rel=0.05)
    assert found["tpot_of_four_s"][0] == pytest.approx(more[-1], rel=0.01)
    assert found["tpot_of_four_s"][-1] < 1.15 * one


def test_figure_7() -> None:
    """Eight groups carry everything while single workers still fetch."""
    from scheduler_figures import figure_7

    found = figure_7()
    assert sum(found["groups"]) == found["workers"] == 30
    curves = found["capacity"]
    assert all(curve[-1][1] == 30 for curve in curves.values())
    full_s = found["full_s"]
    assert full_s["groups, overlapped"] < full_s["alone, overlapped"] < full_s["alone, as before"]
    assert full_s["alone, overlapped"] > 1.87 * full_s["groups, overlapped"]


def test_tables() -> None:
    """Table 1 within what its batch leaves open; table 2 by the paper's rule."""
    from scheduler_figures import tables

    found = tables()
    for name, (ttft_s, tpot_s) in WARM.items():
        ours = found["table_1"][f"llama2-{name}"]
        assert ttft_s <= ours["ttft_s"] < 1.4 * ttft_s
        assert ours["tpot_s"] == pytest.approx(tpot_s, rel=0.1)
        for use, more in (("chat", 1), ("code", 1), ("summary", 2)):
            slo = found["table_2"][f"{use}-{name}"]
            assert slo["ttft_s"] == pytest.approx(5 * more * ttft_s)
            assert slo["tpot_s"] == pytest.approx(0.2 if use == "chat" else 2 * tpot_s)
