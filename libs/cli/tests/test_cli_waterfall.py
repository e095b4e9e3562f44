"""Cold starts as waterfalls in the terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from pilotlight.cli.waterfall import bars_of, draw, is_whole, seconds_within


def shown(renderable: object, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.export_text()


# doctor


def phase(
    name: str, start_s: float, end_s: float, process: str = "worker", wall_offset_s: float = 100.0
) -> dict[str, Any]:
    return {
        "name": name,
        "process": process,
        "start_s": start_s,
        "end_s": end_s,
        "wall_offset_s": wall_offset_s,
    }


def test_a_record_is_whole_with_the_prefill_that_gave_its_first_token() -> None:
    beside_parts, last = phase("prefill", 11.0, 11.2), phase("prefill", 11.5, 11.7)
    record = {"status": "done", "phases": [{**beside_parts, "tokens": 0}]}
    assert not is_whole(record)
    record["phases"] = [{**beside_parts, "tokens": 0}, {**last, "tokens": 12}]
    assert is_whole(record)
    assert not is_whole({**record, "status": "open"})


def test_phases_are_laid_on_one_axis() -> None:
    bars = bars_of(
        [
            phase("load", 12.0, 12.5),
            phase("fetch", 511.0, 511.5, "loader", wall_offset_s=-400.0),
            phase("load", 11.5, 11.75),
            phase("queue", 10.0, 10.5, "gateway"),
        ]
    )
    assert [(bar.name, bar.process, bar.intervals) for bar in bars] == [
        ("queue", "gateway", ((0.0, 0.5),)),
        ("fetch", "loader", ((1.0, 1.5),)),
        ("load", "worker", ((1.5, 1.75), (2.0, 2.5))),
    ]
    assert bars[2].total_s == 0.75
    assert bars_of([]) == ()


def test_each_stage_of_a_group_has_its_lane() -> None:
    """In the order of layers, behind what is of no stage."""
    bars = bars_of(
        [
            phase("load", 12.0, 12.5) | {"lane": "10-16"},
            phase("fetch", 10.5, 11.5, "loader") | {"lane": "10-16"},
            phase("fetch", 11.0, 11.5, "loader") | {"lane": "4-10"},
            phase("prefill", 13.0, 13.5) | {"lane": ""},
            phase("fetch", 11.4, 11.5, "loader") | {"lane": "0-4"},
        ]
    )
    assert [(bar.name, bar.lane) for bar in bars] == [
        ("prefill", ""),
        ("fetch", "0-4"),
        ("fetch", "4-10"),
        ("fetch", "10-16"),
        ("load", "10-16"),
    ]


def test_phases_that_overlap_are_measured() -> None:
    bars = bars_of(
        [
            phase("fetch", 10.0, 11.0, "loader"),
            phase("fetch", 11.5, 12.0, "loader"),
            phase("prefill", 9.5, 10.25),
            phase("prefill", 10.75, 11.75),
            phase("prefill", 11.7, 11.8, "another worker"),
        ]
    )
    assert seconds_within(bars, "prefill", "fetch") == pytest.approx(0.25 + 0.25 + 0.3)
    assert seconds_within(bars, "fetch", "prefill") == pytest.approx(0.8)
    assert seconds_within(bars, "load", "fetch") == 0.0


@pytest.mark.parametrize("width", [10, 60, 100, 200])
def test_a_waterfall_fits_the_console(width: int) -> None:
    record = {
        "phases": [phase("fetch", 0.0, 0.25), phase("load", 0.25, 1.0)],
        "ttft_s": 1.25,
        "coverage": 0.987,
    }
    text = shown(draw(record, width), max(width, 60))
    assert "1,250 ms" in text
    assert "98.7%" in text
    assert all(len(line.rstrip()) <= max(width, 60) for line in text.splitlines())
    rows = {line.split()[0]: line for line in text.splitlines() if "█" in line}
    assert rows.keys() == {"fetch", "load"}
    assert rows["fetch"].index("█") < rows["load"].index("█")
    assert 2 <= rows["load"].count("█") / rows["fetch"].count("█") <= 4


def test_a_cold_start_that_is_not_done_can_be_drawn() -> None:
    assert "no first token yet" in shown(draw({"phases": [], "ttft_s": None, "coverage": None}, 80))
    assert "█" in shown(draw({"phases": [phase("fetch", 5.0, 5.0)]}, 80))
