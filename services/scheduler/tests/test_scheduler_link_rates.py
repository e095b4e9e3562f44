"""What a start teaches of its node's link: what the link gave to all, whoever shared it."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from pilotlight.common.clock import ManualClock, wall_offset_s
from pilotlight.common.db.events import Event
from pilotlight.common.messages.phases import FirstToken, PhaseReport
from pilotlight.policy.cluster import DeviceKind, LinkSpeed, OriginKind
from pilotlight.policy.control.books import Record
from pilotlight.policy.ids import InstanceId, NodeId, RequestId, WorkerId
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.testing import instance, model, node
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.records import LATE_PHASES_S, ColdStart
from pilotlight.scheduler.repository import SchedulerRepository

pytestmark = pytest.mark.anyio
SOURCE = "file://"
LINK = LinkSpeed(kind=OriginKind.SOURCE, name=SOURCE, bytes_per_s=10.0)


class Kept:
    """A repository that keeps what is told alone."""

    def __init__(self) -> None:
        self.told = list[Event]()

    async def save_cold_starts(
        self, records: Iterable[ColdStart], finished: AbstractSet[InstanceId]
    ) -> None:
        """Nothing."""

    async def save_learned(self, estimates: Any, rows: Any, told: Sequence[Event]) -> None:
        self.told += told


@dataclass
class Starts:
    """Starts of one worker's node, one after the other or together."""

    clock: ManualClock = field(default_factory=ManualClock)
    book: Book = field(default_factory=Book)
    kept: Kept = field(default_factory=Kept)
    records: ColdStarts = field(init=False)

    def __post_init__(self) -> None:
        repository = cast(SchedulerRepository, self.kept)
        metrics = SchedulerMetrics(CollectorRegistry())
        self.records = ColdStarts(repository, self.book, self.clock, "scheduler", metrics)

    def begin(self, name: str, node_id: str = "n0") -> None:
        """All of a model is to be fetched."""
        of, now_s = model(name), self.clock.monotonic_s()
        one = instance(name, name, worker_id=WorkerId("w0"))
        place = replace(
            one.placements[0],
            node_id=NodeId(node_id),
            source=SOURCE,
            fetch_bytes=of.spec.total_bytes,
        )
        self.book.put(Record(instance=replace(one, placements=(place,)), model=of))
        self.records.open(
            ColdStart(
                instance_id=InstanceId(name),
                model=of.name,
                decision_id=one.decision_id,
                trace_id="",
                demand_seen_s=now_s,
                wall_offset_s=wall_offset_s(self.clock),
            )
        )
        self.records.dispatched(InstanceId(name), now_s, now_s, now_s)

    async def end(self, name: str, fetch_s: float) -> None:
        """Its bytes have come until now, and its first token."""
        now_s, offset_s = self.clock.monotonic_s(), wall_offset_s(self.clock)
        fetch = Phase(
            name=PhaseName.FETCH,
            start_s=now_s - fetch_s,
            end_s=now_s,
            wall_offset_s=offset_s,
            process="loader",
        )
        first = FirstToken(
            request_id=RequestId("r"),
            at_s=now_s,
            wall_offset_s=offset_s,
            arrived_s=now_s - fetch_s,
        )
        report = PhaseReport(instance_id=InstanceId(name), phases=(fetch,), first_token=first)
        await self.records.keep(report)

    async def rate(self, *links: LinkSpeed) -> float | None:
        """What was learned of the link, once late phases cannot come any more."""
        nodes = {NodeId("n0"): replace(node(), links=links)}
        self.clock.advance(LATE_PHASES_S + 1)
        await self.records.settle({WorkerId("w0"): DeviceKind.CPU}, nodes)
        known = self.records.timings.rates.get((NodeId("n0"), SOURCE))
        return known.value if known is not None else None


async def _two_at_once() -> Starts:
    starts = Starts()
    starts.begin("a")
    starts.clock.advance(4.0)
    starts.begin("b")
    starts.clock.advance(8.0)
    await starts.end("a", 12.0)
    starts.clock.advance(1.0)
    await starts.end("b", 9.0)
    return starts


async def test_one_that_was_alone_teaches_its_own_rate() -> None:
    starts = Starts()
    starts.begin("a")
    starts.clock.advance(12.0)
    await starts.end("a", 12.0)
    assert await starts.rate(LINK) == pytest.approx(5.0)


async def test_those_that_shared_it_teach_what_it_gave_to_both() -> None:
    """Five and seven bytes a second each: the next one alone would be predicted to be as slow."""
    assert await (await _two_at_once()).rate(LINK) == pytest.approx(10.0)


async def test_where_the_loader_has_not_said_they_teach_nothing_of_it() -> None:
    assert await (await _two_at_once()).rate() is None


async def test_one_after_the_other_is_not_together() -> None:
    starts = Starts()
    for name in "ab":
        starts.begin(name)
        starts.clock.advance(6.0)
        await starts.end(name, 6.0)
    other = LinkSpeed(kind=OriginKind.SOURCE, name=SOURCE, bytes_per_s=99.0)
    assert await starts.rate(other) == pytest.approx(10.0)


@pytest.mark.parametrize("order", ["slow first", "fast first"])
async def test_a_node_that_gives_less_than_others_is_told_of_once(order: str) -> None:
    """Also where others had not fetched yet when it did, and it never fetches again."""
    starts, took_s = Starts(), {"n0": 60.0, "n1": 6.0}
    names = ("n0", "n1", "n1") if order == "slow first" else ("n1", "n1", "n0", "n0")
    with capture_logs() as logs:
        for at, name in enumerate(names):
            starts.begin(f"m{at}", name)
            starts.clock.advance(took_s[name])
            await starts.end(f"m{at}", took_s[name])
            await starts.rate()
    told = [one for one in logs if one.get("action") == "node_slow"]
    assert [(one["node_id"], one["source"], one["bytes_per_s"]) for one in told] == [
        ("n0", SOURCE, pytest.approx(1.0))
    ]
    (event,) = starts.kept.told
    assert (event.kind, event.entity) == ("node_slow", "n0")
    assert event.data == {"source": SOURCE, "bytes_per_s": pytest.approx(1.0)}
