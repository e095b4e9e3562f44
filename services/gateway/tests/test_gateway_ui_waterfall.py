"""Waterfalls: where bars lie, what is together, what the axis says."""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.gateway.ui.waterfall import (
    MIN_WIDTH_PERCENT,
    TICKS,
    Interval,
    Lane,
    chart_of,
    lane_of_node,
    lanes_of,
    of_cold_start,
    of_spans,
    ticks_of,
)

moments = st.floats(0, 1e6, allow_nan=False)
intervals = st.lists(
    st.builds(
        lambda process, name, start, length: Interval(
            process=process, name=name, start_s=start, end_s=start + length
        ),
        st.sampled_from(["gateway", "worker", "other"]),
        st.sampled_from(["fetch", "load"]),
        moments,
        st.floats(0, 1000, allow_nan=False),
    ),
    min_size=1,
    max_size=20,
)


def phase(name: str, start: float, end: float, *, process: str = "worker", offset: float = 100.0):
    return {
        "name": name,
        "start_s": start,
        "end_s": end,
        "wall_offset_s": offset,
        "process": process,
        "detail": "",
    }


def placement(node_id: str, start: int, stop: int):
    return {"node_id": node_id, "stage": {"start": start, "stop": stop}}


def span(name: str, span_id: str, parent: str, start: int, end: int, service: str = "gateway"):
    return {
        "span_id": span_id,
        "parent_id": parent,
        "name": name,
        "service": service,
        "start_at": f"2026-01-01T00:00:{start:02d}+00:00",
        "end_at": f"2026-01-01T00:00:{end:02d}+00:00",
        "status": "ok",
        "attributes": {"attempt": 1},
    }


def test_phases_of_hosts_whose_clocks_differ_lie_on_one_axis() -> None:
    chart = of_cold_start(
        {
            "phases": [
                phase("fetch", 10.0, 14.0, process="loader"),
                phase("load", 1012.0, 1014.0, offset=-900.0),
                phase("load", 1018.0, 1020.0, offset=-900.0),
            ],
            "first_token_s": 15.0,
            "wall_offset_s": 100.0,
        }
    )
    fetch, load = chart.rows
    assert (fetch.process, load.process) == ("loader", "worker")
    assert chart.length_s == 10.0
    assert [(bar.left_percent, bar.width_percent) for bar in fetch.bars] == [(0, 40)]
    assert [(bar.left_percent, bar.width_percent) for bar in load.bars] == [(20, 20), (80, 20)]
    assert load.total_s == 4.0
    assert chart.first_token_percent == 50


def test_each_stage_of_a_group_has_its_lane() -> None:
    """In the order of layers, behind what is of no stage."""
    phases = [
        phase("load", 12.0, 12.5) | {"lane": "10-16"},
        phase("fetch", 10.5, 11.5, process="loader") | {"lane": "10-16"},
        phase("fetch", 11.0, 11.5, process="loader") | {"lane": "4-10"},
        phase("queue", 10.0, 11.0, process="gateway"),
    ]
    record = {"phases": phases, "first_token_s": None, "wall_offset_s": None}
    placements = [placement("n2", 10, 16), placement("n1", 4, 10)]
    first = Lane(title="Stage 1 of 2, layers 4-10", node_id="n1")
    last = Lane(title="Stage 2 of 2, layers 10-16", node_id="n2")
    assert [
        (row.lane, row.process, row.name)
        for row in of_cold_start(record, placements=placements).rows
    ] == [
        (None, "gateway", "queue"),
        (first, "loader", "fetch"),
        (last, "loader", "fetch"),
        (last, "worker", "load"),
    ]
    # Of a decision that is not kept any more, the layers alone.
    assert [row.lane for row in of_cold_start(record).rows[1:]] == [
        Lane(title="Layers 4-10"),
        Lane(title="Layers 10-16"),
        Lane(title="Layers 10-16"),
    ]


def test_a_fetch_is_in_the_lane_of_its_nodes_stage() -> None:
    group = [placement("n1", 0, 4), placement("n2", 4, 8), placement("n2", 8, 12)]
    assert lane_of_node(group, "n1") == "0-4"
    assert lane_of_node(group, "n2") == "", "one loader for two stages"
    assert lane_of_node(group, "n3") is None
    assert lane_of_node(group[:1], "n1") == ""
    assert lane_of_node(group[:1], "n2") is None
    assert lanes_of(group[:1]) == {}


def test_what_goes_on_is_drawn_up_to_now() -> None:
    record = {"phases": [], "first_token_s": None, "wall_offset_s": None}
    assert of_cold_start(record).rows == ()
    going_on = Interval(
        process="loader", name="fetch", start_s=5, end_s=9, detail="40 % so far", open=True
    )
    (row,) = of_cold_start(record, [going_on]).rows
    assert row.bars[0].open
    assert "40 % so far" in row.note


def test_spans_stand_below_their_parents_in_order() -> None:
    chart = of_spans(
        [
            span("root", "a", "", 0, 10),
            span("second", "c", "a", 5, 6),
            span("first", "b", "a", 1, 4),
            span("inner", "d", "b", 2, 3, "worker"),
            span("of another trace", "e", "gone", 8, 9),
        ]
    )
    assert [(row.name, row.depth) for row in chart.rows] == [
        ("root", 0),
        ("second", 1),
        ("first", 1),
        ("inner", 2),
        ("of another trace", 0),
    ]
    assert chart.length_s == 10
    assert "attempt 1" in chart.rows[0].bars[0].title


def test_a_deep_trace_is_drawn() -> None:
    deep = [span("s", str(number), str(number - 1), 0, 1) for number in range(5000)]
    assert len(of_spans(deep).rows) == 5000


@given(intervals)
def test_every_interval_is_drawn_within_the_axis(found: list[Interval]) -> None:
    chart = chart_of(found)
    bars = [bar for row in chart.rows for bar in row.bars]
    assert len(bars) == len(found)
    for bar in bars:
        assert 0 <= bar.left_percent <= 100 - MIN_WIDTH_PERCENT
        assert bar.width_percent >= MIN_WIDTH_PERCENT
        assert bar.left_percent + bar.width_percent <= 100 + MIN_WIDTH_PERCENT + 0.01
    assert len(chart.rows) == len({(one.process, one.name) for one in found})
    for row in chart.rows:
        of_row = [one for one in found if (one.process, one.name) == (row.process, row.name)]
        assert row.total_s <= sum(one.end_s - one.start_s for one in of_row) + 1e-6


@given(st.floats(1e-6, 1e6, allow_nan=False))
def test_ticks_are_round_few_and_within(length_s: float) -> None:
    ticks = ticks_of(length_s)
    assert 2 <= len(ticks) <= TICKS + 1
    assert ticks[0].at_s == 0
    assert all(0 <= tick.at_percent <= 100 + 1e-6 for tick in ticks)
    step = f"{ticks[1].at_s:.6e}".rstrip("0").split("e")[0].rstrip("0").rstrip(".")
    assert step in ("1", "2", "2.5", "5")
