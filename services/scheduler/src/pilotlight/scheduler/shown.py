"""What workers show beside their starts, from reports to samples: what is told anew, once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pilotlight.policy.cluster import WorkerFacts
from pilotlight.policy.coldstart.decayed import Point
from pilotlight.policy.coldstart.timings import HopSample, StageSample, step_bytes
from pilotlight.policy.control.books import Record
from pilotlight.policy.ids import InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.shown import NO_TIMES, EngineStart, StageTimes

WRITE_EVERY_S = 30.0
"""What was learned of steps is written so seldom, or with what a start has shown."""


@dataclass(frozen=True, slots=True)
class _Told:
    facts: WorkerFacts
    start: EngineStart | None
    times: Mapping[InstanceId, StageTimes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownNow:
    """What was told anew."""

    samples: tuple[StageSample, ...] = ()
    hops: tuple[HopSample, ...] = ()
    tpot_s: Mapping[InstanceId, float] = field(default_factory=dict[InstanceId, float])
    """Time of a decode step, of instances that have one worker."""


@dataclass(slots=True)
class Shown:
    """By worker what it told last, and what of that was learned from: bounded by what is held."""

    _told: dict[WorkerId, _Told] = field(default_factory=dict[WorkerId, _Told])
    _learned: dict[WorkerId, _Told] = field(default_factory=dict[WorkerId, _Told])
    _news: set[WorkerId] = field(default_factory=set[WorkerId])

    def hear(self, worker_id: WorkerId, facts: WorkerFacts | None) -> None:
        """A report came; None: the worker is gone."""
        if facts is None:
            self._told.pop(worker_id, None)
            self._learned.pop(worker_id, None)
            self._news.discard(worker_id)
            return
        times = {one.instance_id: one.times for one in facts.held if one.times != NO_TIMES}
        before = self._told.get(worker_id)
        if before is None or (before.start, before.times) != (facts.engine_start, times):
            self._told[worker_id] = _Told(facts, facts.engine_start, times)
            self._news.add(worker_id)

    def take(self, find: Callable[[InstanceId], Record | None]) -> ShownNow:
        """What is new since the last call.

        Args:
            find: The record of an instance, if it is known.
        """
        samples: list[StageSample] = []
        hops: list[HopSample] = []
        tpot_s: dict[InstanceId, float] = {}
        for worker_id in sorted(self._news):
            told, before = self._told[worker_id], self._learned.get(worker_id)
            if told.start is not None and (before is None or told.start != before.start):
                samples.append(_of_start(told.facts, told.start))
            for instance_id, times in told.times.items():
                if before is not None and before.times.get(instance_id) == times:
                    continue
                entry = find(instance_id)
                if entry is None:
                    continue
                hops += _hops_of(entry, times)
                sample = _of_steps(told.facts, entry, times)
                if sample is not None:
                    samples.append(sample)
                    tpot_s[instance_id] = times.step_s
            self._learned[worker_id] = told
        self._news.clear()
        return ShownNow(samples=tuple(samples), hops=tuple(hops), tpot_s=tpot_s)


def _of_start(facts: WorkerFacts, start: EngineStart) -> StageSample:
    return StageSample(
        model=ModelName(""),
        device_kind=facts.device.kind,
        node_id=facts.node_id,
        create_s=start.create_s or None,
        context_s=start.context_s or None,
        libraries_s=start.libraries_s or None,
    )


def _of_steps(facts: WorkerFacts, entry: Record, times: StageTimes) -> StageSample | None:
    """Of a worker that has the whole model alone: a step of a group is no step of a device."""
    if len(entry.instance.placements) != 1 or times.steps == 0:
        return None
    if entry.instance.placements[0].stage != entry.model.spec.whole:
        return None
    read_bytes = step_bytes(entry.model, 1, round(times.context_tokens))
    return StageSample(
        model=entry.model.name,
        device_kind=facts.device.kind,
        node_id=facts.node_id,
        decode=Point(float(read_bytes), times.step_s),
    )


def _hops_of(entry: Record, times: StageTimes) -> Iterator[HopSample]:
    """Of each pair of neighbours in a group: exact for two stages, else the mean of its hops."""
    nodes = [one.node_id for one in entry.instance.placements]
    if len(nodes) < 2 or times.hops == 0:
        return
    around = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
    pairs: set[tuple[NodeId, NodeId]] = {
        (min(first, second), max(first, second)) for first, second in around
    }
    for first, second in sorted(pairs):
        yield HopSample(first=first, second=second, hop_s=times.hop_s)
