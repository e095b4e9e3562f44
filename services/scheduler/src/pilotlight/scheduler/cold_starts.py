"""Keeps the record of each cold start: merges reports, closes it at its first token, learns."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import structlog

from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.db.events import Event
from pilotlight.common.messages.phases import PhaseReport, PhasesKept
from pilotlight.common.phases import PhaseRecorder
from pilotlight.policy.cluster import DeviceKind, NodeFacts
from pilotlight.policy.coldstart.facts import link_bytes_per_s
from pilotlight.policy.coldstart.profiles import seeded, seeded_estimates
from pilotlight.policy.coldstart.timings import StageSample, Timings
from pilotlight.policy.control.books import Record
from pilotlight.policy.cost import estimate_for
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.estimates import learn, with_estimates
from pilotlight.policy.ids import InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import ENDED
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment, PhaseName
from pilotlight.policy.plan import Estimate, Estimates, Instance
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.records import (
    LATE_PHASES_S,
    ColdStart,
    figures_of,
    in_lane,
    lanes_of,
    merged,
    readied,
    reported,
    sample_of,
    stage_sample_of,
)
from pilotlight.scheduler.registered import StoredProfile
from pilotlight.scheduler.repository import SchedulerRepository
from pilotlight.scheduler.rows import slow
from pilotlight.scheduler.shown import WRITE_EVERY_S, Shown
from pilotlight.scheduler.timing_rows import changed_rows

log = structlog.get_logger()


@dataclass(slots=True)
class _Kept:
    record: ColdStart
    closed_s: float | None = None
    saved: ColdStart | None = None
    shared: bool = False
    """Several workers began with a part of the model each: what that took says nothing of a start
    on one."""
    lanes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of a group: the layers at each worker and at each node, by id."""
    fetches_on: frozenset[NodeId] = frozenset()
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is written: what is written last has everything."""
    beside_others: bool = False
    """Another start's bytes came to one of these nodes in the same time: what this one got is not
    what the link gives."""


class ColdStarts:
    """The records of one term. A record's writes are one after the other; the last has
    everything.
    """

    def __init__(
        self,
        repository: SchedulerRepository,
        book: Book,
        clock: Clock,
        process: str,
        metrics: SchedulerMetrics,
    ) -> None:
        self._repository = repository
        self._book = book
        self._clock = clock
        self._phases = PhaseRecorder(clock, process)
        self._metrics = metrics
        self._kept: dict[InstanceId, _Kept] = {}
        self.estimates: Estimates = {}
        self.timings = Timings()
        """Learned from every start; what none has shown goes by size."""
        self._written = (0.0, self.timings)
        """When timings were last written, and which."""
        self._profiled: dict[tuple[ModelName, DeviceKind], Estimate] = {}
        """Estimates by profiles that are not written yet: the cache reads the rows."""
        self._learned: set[NodeId] = set()
        self._fetching = defaultdict[NodeId, set[InstanceId]](set)
        """Kept starts that fetch, or did, by node."""

    def know(self, estimates: Estimates, timings: Timings) -> None:
        """Go on with what the last leader has learned."""
        self.estimates, self.timings = estimates, timings
        self._written = (self._clock.monotonic_s(), timings)

    def open(self, record: ColdStart) -> None:
        """Take in a record that is in the database."""
        entry = self._book.get(record.instance_id)
        placements = entry.instance.placements if entry is not None else ()
        kept = self._kept[record.instance_id] = _Kept(
            record,
            self._clock.monotonic_s() if record.closed else None,
            record,
            shared=entry is not None and _is_shared(entry.instance),
            lanes=lanes_of(placements),
            fetches_on=frozenset(one.node_id for one in placements if one.fetch_bytes > 0),
        )
        for node_id in kept.fetches_on:
            self._fetching[node_id].add(record.instance_id)

    def dispatched(
        self, instance_id: InstanceId, planned_from_s: float, start_s: float, end_s: float
    ) -> None:
        """Note the scheduler's own first phases: planning, and the publishing of the commands.

        Args:
            instance_id: What starts.
            planned_from_s: When planning began, monotonic, as the others are.
            start_s: When the first command was published.
            end_s: When the last one was.
        """
        kept = self._kept.get(instance_id)
        if kept is None:
            return
        self._phases.record(instance_id, PhaseName.SCHEDULE, planned_from_s, start_s)
        self._phases.record(instance_id, PhaseName.DISPATCH, start_s, end_s)
        own = self._phases.take(instance_id).phases
        kept.record = merged(replace(kept.record, dispatched_s=start_s), own)

    def activated(
        self, instance_id: InstanceId, heard_s: float, loaded: Moment | None, *, awaited: bool
    ) -> None:
        """Note that the bucket shows the instance as ready.

        Args:
            instance_id: The instance.
            heard_s: When this process heard that it is ready.
            loaded: When its worker had it loaded.
            awaited: Some gateway holds requests for it.
        """
        kept = self._kept.get(instance_id)
        if kept is None or kept.record.closed:
            return
        now_s = self._clock.monotonic_s()
        start_s = departed_s(loaded, Moment(at_s=heard_s, wall_offset_s=wall_offset_s(self._clock)))
        self._phases.record(instance_id, PhaseName.ACTIVATE, start_s, now_s)
        kept.record = merged(kept.record, self._phases.take(instance_id).phases)
        if not awaited:
            kept.record = readied(kept.record, now_s)

    async def keep(self, report: PhaseReport) -> PhasesKept:
        """Serve ``PHASES_SUBJECT``.

        Raises:
            NotLeader: the term is over; the reporter asks the next leader.
            DatabaseUnavailable: the report is kept in memory only; the reporter tries again.
        """
        kept = self._kept.get(report.instance_id)
        if kept is not None:
            kept.record = reported(kept.record, in_lane(report, kept.lanes.get(report.place, "")))
            await self._save(kept)
        return PhasesKept()

    async def settle(
        self,
        device_kinds: Mapping[WorkerId, DeviceKind],
        nodes: Mapping[NodeId, NodeFacts],
    ) -> None:
        """Write what changed, abandon what ended without a first token, learn from what is
        complete.

        Args:
            device_kinds: Of the workers.
            nodes: What their links gave lately.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the rest is written the next time.
        """
        now_s = self._clock.monotonic_s()
        for instance_id, kept in self._kept.items():
            entry = self._book.get(instance_id)
            if not kept.record.closed and (entry is None or entry.instance.state in ENDED):
                kept.record = replace(kept.record, status="abandoned")
        await self._save(*(one for one in self._kept.values() if not one.saving.locked()))
        known: list[tuple[_Kept, Record, DeviceKind]] = []
        for instance_id, kept in list(self._kept.items()):
            if kept.closed_s is None or now_s - kept.closed_s <= LATE_PHASES_S:
                continue
            del self._kept[instance_id]
            self._log(kept.record)
            for node_id in kept.fetches_on:
                self._fetching[node_id].discard(instance_id)
            entry = self._book.get(instance_id)
            kind = device_kinds.get(entry.instance.lead) if entry is not None else None
            if entry is not None and kind is not None and not kept.shared:
                known.append((kept, entry, kind))
        await self._learn(known, nodes)

    def seed(
        self,
        profiles: Iterable[StoredProfile],
        models: Mapping[ModelName, Model],
        nodes: Iterable[NodeId],
    ) -> None:
        """Take over what was measured offline of models that no start has shown yet.

        Args:
            profiles: what was measured.
            models: the registered ones.
            nodes: where their starts are predicted.
        """
        known = [
            (models[one.model], one.device_kind, one.profile)
            for one in profiles
            if one.model in models
        ]
        timings, taken = seeded(self.timings, known)
        news = seeded_estimates(self.estimates, timings, known)
        if taken or timings.devices is not self.timings.devices:
            self._learned.update(nodes)
            log.info("profiles taken over", action="profiles_taken", models=taken)
        self.timings = timings
        if news:
            self.estimates = with_estimates(self.estimates, news)
            self._profiled.update({(one.model, one.device_kind): one for one in news})

    def take_learned(self) -> frozenset[NodeId]:
        """Nodes of which something was learned since the last call."""
        learned, self._learned = frozenset(self._learned), set()
        return learned

    def record(self, instance_id: InstanceId) -> ColdStart | None:
        """A record that is still kept."""
        kept = self._kept.get(instance_id)
        return kept.record if kept is not None else None

    async def _save(self, *several: _Kept) -> None:
        """Write those that are others than their rows, together."""
        async with AsyncExitStack() as held:
            for kept in several:
                await held.enter_async_context(kept.saving)
            news = [(kept, kept.record) for kept in several if kept.record != kept.saved]
            ended = [
                kept
                for kept, record in news
                if record.closed and not (kept.saved is not None and kept.saved.closed)
            ]
            if news:
                await self._repository.save_cold_starts(
                    [record for _, record in news], {one.record.instance_id for one in ended}
                )
            for kept, record in news:
                kept.saved = record
        for kept in ended:
            kept.closed_s = self._clock.monotonic_s()
            self._note_others(kept)
            self._metrics.cold_start_finished(kept.record)

    def _note_others(self, ended: _Kept) -> None:
        """Of a start that has just ended, and of those beside it: they shared a node's link."""
        for node_id in ended.fetches_on:
            for one in self._fetching[node_id]:
                other = self._kept[one]
                if other is not ended and not _ended_before(other.record, ended.record):
                    ended.beside_others = other.beside_others = True

    async def _learn(
        self,
        known: Iterable[tuple[_Kept, Record, DeviceKind]],
        nodes: Mapping[NodeId, NodeFacts],
    ) -> None:
        """Take over what starts have shown, and write it.

        Args:
            known: Starts that are complete, and the kinds of their devices.
            nodes: What their links gave lately.
        """
        estimates, learned_of = self.estimates, list[Record]()
        stages: list[StageSample] = []
        news: dict[tuple[ModelName, DeviceKind], Estimate] = {}
        for kept, entry, kind in known:
            model = entry.model
            sample = sample_of(kept.record, model, kind)
            if sample is None:
                continue
            if len(entry.instance.placements) == 1:
                place = entry.instance.placements[0]
                if kept.beside_others:
                    node = nodes.get(place.node_id)
                    together = link_bytes_per_s(node, place.source) if node is not None else None
                    sample = replace(sample, fetch_bytes_per_s=together)
                stages.append(stage_sample_of(sample, place, model))
            before = news.get((model.name, kind)) or estimate_for(model.name, kind, estimates)
            news[model.name, kind] = learn(before, sample)
            learned_of.append(entry)
        if not news:
            return
        timings = self.timings.learned(stages) if stages else self.timings
        for of_model, estimate in news.items():
            news[of_model] = replace(estimate, init_s=timings.init_s(*of_model))
        lag = self._newly_slow(timings, {one.source for one in stages})
        await self._write(timings, list(news.values()), [slow(*one) for one in lag])
        # Decisions may still look at the mappings as they were.
        self.estimates = with_estimates(self.estimates, news.values())
        for node_id, source, bytes_per_s in lag:
            log.warning(
                "a node fetches at less than half of the rate of others",
                action="node_slow",
                node_id=node_id,
                source=source,
                bytes_per_s=bytes_per_s,
            )
        self.timings = timings
        self._learned.update(
            one.node_id for entry in learned_of for one in entry.instance.placements
        )

    async def take_shown(self, shown: Shown) -> None:
        """Learn what workers show beside their starts, and write it now and then.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: it is written the next time.
        """
        now = shown.take(self._book.get)
        if now.samples or now.hops:
            self.timings = self.timings.learned(now.samples, now.hops)
        for instance_id, tpot_s in now.tpot_s.items():
            if (kept := self._kept.get(instance_id)) is not None:
                kept.record = replace(kept.record, tpot_s=tpot_s)
        at_s, written = self._written
        has_news = self.timings is not written or self._profiled
        if has_news and self._clock.monotonic_s() - at_s >= WRITE_EVERY_S:
            await self._write(self.timings, [])

    async def _write(
        self, timings: Timings, estimates: list[Estimate], told: Sequence[Event] = ()
    ) -> None:
        """Write what differs from what was written; estimates also of profiles."""
        rows = changed_rows(self._written[1], timings)
        learned = {(one.model, one.device_kind): one for one in estimates}
        every = {**self._profiled, **learned}
        await self._repository.save_learned(list(every.values()), rows, told)
        self._written, self._profiled = (self._clock.monotonic_s(), timings), {}

    def _newly_slow(
        self, timings: Timings, sources: AbstractSet[str]
    ) -> list[tuple[NodeId, str, float]]:
        """Nodes whose link gives less than that of others, each once. It may be seen only when
        others fetch: a node that promised the most gets the first start, and then no more.
        """
        return [
            (node_id, source, rate.value)
            for (node_id, source), rate in timings.rates.items()
            if source in sources
            and timings.lags(node_id, source)
            and not self.timings.lags(node_id, source)
        ]

    def _log(self, record: ColdStart) -> None:
        self._metrics.cold_start_explained(record)
        figures = figures_of(record)
        seconds = figures.seconds if figures is not None else ()
        log.info(
            "cold start finished",
            action="cold_start_finished",
            instance_id=record.instance_id,
            model=record.model,
            status=record.status,
            ttft_s=record.ttft_s,
            coverage=record.coverage,
            phases={one.name.value: round(one.seconds, 4) for one in seconds},
        )


def _ended_before(record: ColdStart, other: ColdStart) -> bool:
    """Whether a start was over when another one began."""
    return (
        record.end_s is not None
        and other.dispatched_s is not None
        and record.end_s <= other.dispatched_s
    )


def _is_shared(instance: Instance) -> bool:
    """Whether several workers share a start, or may have: a group that has become one worker shows
    by its generation alone that it was one.
    """
    return len(instance.placements) > 1 or instance.generation > 1
