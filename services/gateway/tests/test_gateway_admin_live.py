"""The live view: everything at first, then what changed; bounded, and never stale."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.errors import DatabaseUnavailable, QueueFull
from pilotlight.common.testing import MakeContext
from pilotlight.gateway.admin import live
from pilotlight.gateway.admin.live import LiveView, RowsEvent, Table, Topic
from pilotlight.gateway.admin.live_rows import StartState, model_row, node_row
from pilotlight.gateway.serving.fleet import FailedStart, Seen, StartProgress
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.policy.cluster import Liveness
from pilotlight.policy.ids import Digest
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import held, instance, model, node, worker

pytestmark = pytest.mark.anyio


class Row(msgspec.Struct):
    key: str
    value: int


class Known:
    """A fleet, a catalog and cold starts that are set by hand."""

    def __init__(self) -> None:
        self.seen_nodes: list[Any] = []
        self.seen_workers: list[Any] = []
        self.models: dict[str, Any] = {}
        self.of_model: dict[str, tuple[Seen, ...]] = {}
        self.failure: FailedStart | None = None
        self.away = False

    def nodes(self):
        return tuple(self.seen_nodes)

    def workers(self):
        return tuple(self.seen_workers)

    def instances(self, name=None):
        return self.of_model.get(name, ())

    def failed_start(self, name, digest):
        return self.failure

    def progress(self, name, digest):
        return StartProgress(phase="fetch", fetched=0.25)

    def names(self):
        return tuple(sorted(self.models))

    def get(self, name):
        return self.models.get(name)

    async def cold_starts(self):
        if self.away:
            raise DatabaseUnavailable
        return []


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
async def view(known: Known, make_context: MakeContext, tmp_path: Path) -> AsyncIterator[LiveView]:
    background = make_context("gateway", GatewaySettings(run_dir=tmp_path)).background
    made = LiveView(known, known, known, background)
    yield made
    await made.stop()


async def next_event(stream: Any) -> dict[str, Any]:
    """The next event that is no comment."""
    async with asyncio.timeout(10):
        async for data in stream:
            if data.startswith(b"data: "):
                return msgspec.json.decode(data[6:])
    raise AssertionError("the stream ended")


async def test_a_client_hears_all_and_then_what_changed(known: Known, view: LiveView) -> None:
    known.seen_nodes, known.seen_workers = [node()], [worker(0)]
    stream = view.events([Topic.NODES])
    assert (await anext(stream)).startswith(b":")
    await view.refresh()
    first = await next_event(stream)
    assert (first["topic"], first["reset"], first["more"]) == ("nodes", True, False)
    assert [row["key"] for row in first["rows"]] == ["n0"]
    waiting = asyncio.create_task(next_event(stream))
    await view.refresh()
    # The same facts again are nothing new; a report that changes no row neither.
    known.seen_workers = [replace(worker(0), kv_free_tokens=17)]
    await view.refresh()
    assert not waiting.done()
    known.seen_workers = [replace(worker(0), running_requests=3)]
    await view.refresh()
    second = await waiting
    assert (second["reset"], [row["running"] for row in second["rows"]]) == (False, [3])
    known.seen_nodes, known.seen_workers = [], []
    await view.refresh()
    assert (await next_event(stream))["gone"] == ["n0"]
    await stream.aclose()


async def test_rows_that_nobody_followed_are_made_anew(known: Known, view: LiveView) -> None:
    known.seen_nodes = [node()]
    for name in ("n0", "n1"):
        known.seen_nodes = [replace(node(), node_id=name)]
        stream = view.events([Topic.NODES])
        await anext(stream)
        await view.refresh()
        assert [row["key"] for row in (await next_event(stream))["rows"]] == [name]
        await stream.aclose()


async def test_thousands_of_rows_come_in_pieces(known: Known, view: LiveView) -> None:
    known.seen_nodes = [replace(node(), node_id=f"n{number:04d}") for number in range(1000)]
    stream = view.events([Topic.NODES])
    await anext(stream)
    await view.refresh()
    pieces = [await next_event(stream) for _ in range(4)]
    assert [piece["more"] for piece in pieces] == [True, True, True, False]
    assert [piece["reset"] for piece in pieces] == [True, False, False, False]
    assert len({row["key"] for piece in pieces for row in piece["rows"]}) == 1000
    await stream.aclose()


async def test_an_empty_list_is_told_too(view: LiveView) -> None:
    stream = view.events([Topic.TRANSFERS])
    await anext(stream)
    await view.refresh()
    event = await next_event(stream)
    assert (event["reset"], event["rows"]) == (True, [])
    await stream.aclose()


async def test_clients_have_a_bound(view: LiveView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_CLIENTS", 2)
    streams = [view.events([Topic.NODES]) for _ in range(3)]
    await anext(streams[0])
    await anext(streams[1])
    with pytest.raises(QueueFull):
        await anext(streams[2])
    await streams[0].aclose()
    again = view.events([Topic.NODES])
    await anext(again)
    for stream in (streams[1], again):
        await stream.aclose()


async def test_a_silent_stream_has_a_heartbeat(
    view: LiveView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.01)
    stream = view.events([Topic.NODES])
    assert [await anext(stream) for _ in range(3)] == [b": live\n\n"] * 3
    await stream.aclose()


async def test_streams_end_when_the_gateway_stops(view: LiveView) -> None:
    await view.start()
    stream = view.events([Topic.MODELS])
    await anext(stream)
    await next_event(stream)
    await view.stop()
    async with asyncio.timeout(10):
        assert [data async for data in stream] == []


async def test_the_database_is_away(known: Known, view: LiveView) -> None:
    stream = view.events([Topic.COLD_STARTS, Topic.NODES])
    await anext(stream)
    known.away = True
    await view.refresh()
    assert (await next_event(stream))["topic"] == "nodes"
    known.away = False
    await view.refresh()
    assert (await next_event(stream))["topic"] == "cold_starts"
    await stream.aclose()


async def test_models_by_their_instances(known: Known, view: LiveView) -> None:
    registered = model()
    known.models = {registered.name: SimpleNamespace(model=registered)}
    stream = view.events([Topic.MODELS])
    await anext(stream)
    await view.refresh()
    assert (await next_event(stream))["rows"][0]["state"] == "cold"
    starting = replace(instance(), state=InstanceState.FETCHING)
    known.of_model = {registered.name: (Seen(starting, None),)}
    await view.refresh()
    row = (await next_event(stream))["rows"][0]
    assert (row["state"], row["phase"], row["fetched"]) == ("starting", "fetch", 0.25)
    known.of_model = {}
    known.failure = FailedStart(digest=Digest("d"), reason="source_changed: gone", at_s=0)
    await view.refresh()
    row = (await next_event(stream))["rows"][0]
    assert (row["state"], row["reason"]) == ("failed", "source_changed: gone")
    await stream.aclose()


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (InstanceState.READY, "ready"),
        (InstanceState.PLANNED, "starting"),
        (InstanceState.DRAINING, "draining"),
        (InstanceState.GONE, "cold"),
    ],
)
def test_states_of_a_model(state: InstanceState, shown: str) -> None:
    row = model_row(model(), [replace(instance(), state=state)], 2, StartState())
    assert (row.state, row.in_flight) == (shown, 2)


def test_a_node_names_its_largest_models_and_counts_the_rest() -> None:
    stages = tuple(
        replace(held(f"m{number}"), device_bytes=10 * (number + 1)) for number in range(8)
    )
    row = node_row("n0", node(), [replace(worker(0), held=stages)])
    assert [share.model for share in row.shares] == ["m7", "m6", "m5", "m4", "m3", "m2", ""]
    assert sum(share.size_bytes for share in row.shares) == row.used_bytes == 360
    dead = replace(worker(1), liveness=Liveness.DEAD)
    gone = node_row("n0", None, [dead])
    assert (gone.state, gone.memory_bytes) == ("away", 0)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), max_size=6), st.booleans()
        ),
        max_size=12,
    )
)
def test_a_client_that_listens_now_and_then_has_what_the_table_has(
    steps: list[tuple[dict[str, int], bool]],
) -> None:
    table, seen, mine = Table(), 0, dict[str, int]()
    for rows, listens in [*steps, (dict[str, int](), True)]:
        for key, value in rows.items():
            table.put(key, None, Row(key=key, value=value))
        table.filled(rows)
        if not listens:
            continue
        for event in table.events(Topic.NODES, seen):
            _take(mine, event)
        seen = table.version
        assert mine == rows


def test_a_client_that_missed_too_much_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_GONE", 2)
    table = Table()
    keys = [f"k{number}" for number in range(6)]
    for key in keys:
        table.put(key, None, Row(key=key, value=1))
    table.filled(keys)
    seen = table.version
    table.filled(keys[:1])
    (event,) = table.events(Topic.NODES, seen)
    assert event.reset
    mine = dict.fromkeys(keys, 1)
    _take(mine, event)
    assert list(mine) == ["k0"]


def _take(mine: dict[str, int], event: RowsEvent) -> None:
    if event.reset:
        mine.clear()
    for row in event.rows:
        decoded = msgspec.json.decode(bytes(row), type=Row)
        mine[decoded.key] = decoded.value
    for key in event.gone:
        mine.pop(key, None)
