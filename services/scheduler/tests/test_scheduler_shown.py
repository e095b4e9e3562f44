"""What the scheduler learns from what workers show beside their starts."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.common.clock import ManualClock, wall_offset_s
from pilotlight.common.db.events import Event
from pilotlight.common.messages.phases import FirstToken, PhaseReport
from pilotlight.policy.cluster import DeviceKind, HeldStage, HeldState, WorkerFacts
from pilotlight.policy.coldstart.timings import SEED_STARTS, step_bytes
from pilotlight.policy.control.books import Record
from pilotlight.policy.ids import InstanceId, NodeId, RequestId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.shown import EngineStart, StageTimes
from pilotlight.policy.testing import instance, model, worker
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.explained import actual_of
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.records import LATE_PHASES_S, ColdStart, sample_of, stage_sample_of
from pilotlight.scheduler.repository import SchedulerRepository
from pilotlight.scheduler.shown import WRITE_EVERY_S, Shown

pytestmark = pytest.mark.anyio
W0, W1 = WorkerId("w0"), WorkerId("w1")
ONE, GROUP = InstanceId("one"), InstanceId("group")
START = EngineStart(create_s=0.2, context_s=1.0, libraries_s=2.0)
STEPS = StageTimes(steps=16, batch=2, context_tokens=300.0, step_s=0.01)
HOPS = StageTimes(hops=16, hop_s=0.003)
MODEL = model("m")
KIND = worker().device.kind


class Kept:
    """A repository that counts what is written."""

    def __init__(self) -> None:
        self.rows = list[set[str]]()
        self.saved = list[ColdStart]()

    async def save_cold_starts(
        self, records: Iterable[ColdStart], finished: AbstractSet[InstanceId]
    ) -> None:
        self.saved += records

    async def save_learned(self, estimates: Any, rows: Any, told: Sequence[Event]) -> None:
        self.rows.append(set(rows))


def held(instance_id: InstanceId, times: StageTimes) -> HeldStage:
    one = instance("m", instance_id)
    return HeldStage(
        instance_id=instance_id,
        generation=one.generation,
        model=one.model,
        digest=one.digest,
        stage=MODEL.spec.whole,
        state=HeldState.READY,
        device_bytes=10,
        times=times,
    )


def facts(*stages: HeldStage, start: EngineStart | None = None) -> WorkerFacts:
    return replace(worker(0, held_stages=stages), engine_start=start)


def record(instance_id: InstanceId, *node_ids: str) -> Record:
    """An instance with a stage on each node."""
    one, of = instance("m", instance_id), MODEL
    if len(node_ids) == 1:
        place = replace(one.placements[0], node_id=NodeId(node_ids[0]), stage=of.spec.whole)
        return Record(instance=replace(one, placements=(place,)), model=of)
    places = tuple(
        replace(
            one.placements[0],
            worker_id=WorkerId(f"w{at}"),
            node_id=NodeId(node_id),
            stage=Stage(at, at + 1),
        )
        for at, node_id in enumerate(node_ids)
    )
    return Record(instance=replace(one, placements=places), model=of)


@dataclass
class Starts:
    """A term's records, and what was heard."""

    clock: ManualClock = field(default_factory=ManualClock)
    book: Book = field(default_factory=Book)
    repository: Kept = field(default_factory=Kept)
    shown: Shown = field(default_factory=Shown)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    records: ColdStarts = field(init=False)

    def __post_init__(self) -> None:
        repository = cast(SchedulerRepository, self.repository)
        metrics = SchedulerMetrics(self.registry)
        self.records = ColdStarts(repository, self.book, self.clock, "scheduler", metrics)
        self.records.know({}, self.records.timings)
        self.book.put(record(ONE, "n0"), record(GROUP, "n0", "n1", "n2"))

    @property
    def coverage(self) -> float | None:
        """As the metric has it."""
        return self.registry.get_sample_value("pilotlight_cold_start_coverage")

    async def hear(self, *stages: HeldStage, start: EngineStart | None = None) -> None:
        self.shown.hear(W0, facts(*stages, start=start))
        await self.records.take_shown(self.shown)


async def test_the_start_of_an_engine_is_learned_once() -> None:
    starts = Starts()
    await starts.hear(start=START)
    for _ in range(3):  # Said again, as reports are.
        await starts.hear(start=START)
    known = starts.records.timings.devices[NodeId("n0"), KIND]
    assert known.create is not None
    assert (known.create.value, known.create.samples) == (0.2, 1)
    times = starts.records.timings.start_times(NodeId("n0"), KIND)
    assert (times.create_s, times.context_s, times.libraries_s) == (0.2, 1.0, 2.0)


async def test_a_spare_shows_nothing_of_its_process() -> None:
    starts = Starts()
    await starts.hear(start=EngineStart(context_s=1.0))
    times = starts.records.timings.start_times(NodeId("n0"), KIND)
    assert times == replace(SEED_STARTS[KIND], context_s=1.0)


async def test_steps_of_a_whole_model_are_learned_where_they_were() -> None:
    starts = Starts()
    await starts.hear(held(ONE, STEPS))
    line = starts.records.timings.models[MODEL.name, KIND].decode
    assert (line.x, line.y) == (step_bytes(MODEL, 1, 300), 0.01)
    await starts.hear(held(ONE, STEPS))
    assert starts.records.timings.models[MODEL.name, KIND].decode.samples == 1, "told again"
    await starts.hear(held(ONE, replace(STEPS, step_s=0.02)))
    assert starts.records.timings.models[MODEL.name, KIND].decode.samples == 2


async def test_a_group_teaches_hops_and_no_steps() -> None:
    starts = Starts()
    await starts.hear(held(GROUP, replace(HOPS, steps=16, step_s=0.5)))
    timings = starts.records.timings
    assert not timings.models
    pairs = [("n0", "n1"), ("n1", "n2"), ("n0", "n2")]
    assert {key for key in timings.hops if key[0]} == {
        (NodeId(one), NodeId(other)) for one, other in pairs
    }
    assert timings.hop_s(NodeId("n2"), NodeId("n0")) == 0.003


async def test_of_an_instance_that_is_not_known_nothing_is_learned() -> None:
    starts = Starts()
    await starts.hear(held(InstanceId("other"), STEPS))
    assert not starts.records.timings.models


async def test_a_worker_that_is_gone_is_forgotten() -> None:
    starts = Starts()
    starts.shown.hear(W0, facts(start=START))
    starts.shown.hear(W0, None)
    await starts.records.take_shown(starts.shown)
    assert not starts.records.timings.devices
    await starts.hear(start=START)
    assert starts.records.timings.devices


async def test_what_was_learned_of_steps_is_written_now_and_then() -> None:
    """Each report may teach something; rows are written together."""
    starts = Starts()
    for at in range(1, 20):
        starts.clock.advance(1.0)
        await starts.hear(held(ONE, replace(STEPS, step_s=0.01 * at)))
    assert starts.repository.rows == []
    starts.clock.advance(WRITE_EVERY_S)
    await starts.records.take_shown(starts.shown)
    (rows,) = starts.repository.rows
    assert rows == {f'["model","m","{KIND}"]'}
    starts.clock.advance(WRITE_EVERY_S)
    await starts.records.take_shown(starts.shown)
    assert len(starts.repository.rows) == 1, "nothing is new"


def a_record(clock: ManualClock, prompt_tokens: int = 100, **phases: float) -> ColdStart:
    now_s, offset_s = clock.monotonic_s(), wall_offset_s(clock)
    made = tuple(
        Phase(
            name=PhaseName(name),
            start_s=now_s,
            end_s=now_s + took_s,
            wall_offset_s=offset_s,
            process="worker",
            tokens=prompt_tokens if name == "prefill" else 0,
        )
        for name, took_s in phases.items()
    )
    return ColdStart(
        instance_id=ONE,
        model=MODEL.name,
        decision_id=instance("m", ONE).decision_id,
        trace_id="",
        demand_seen_s=now_s,
        wall_offset_s=offset_s,
        dispatched_s=now_s,
        end_s=now_s + 2.0,
        ttft_s=2.0,
        status="done",
        phases=made,
    )


def test_a_start_teaches_init_or_the_restore_and_the_length_of_its_prompt() -> None:
    clock, place = ManualClock(), record(ONE, "n0").instance.placements[0]

    def shown_by(**phases: float) -> Any:
        sample = sample_of(a_record(clock, **phases), MODEL, DeviceKind.CPU)
        assert sample is not None
        return stage_sample_of(sample, place, MODEL)

    plain = shown_by(init=0.5, prefill=0.2)
    assert (plain.init_s, plain.restore_s) == (0.5, None)
    assert plain.prefill is not None
    assert (plain.prefill.x, plain.prefill.y) == (100, pytest.approx(0.2))
    restored = shown_by(restore=0.1)
    assert (restored.init_s, restored.restore_s) == (None, pytest.approx(0.1))
    assert shown_by(load=0.1).init_s is None


def test_a_short_prompt_does_not_say_how_fast_a_device_computes() -> None:
    """Most of its time is a step's. Taken for a rate, all others would seem to be late."""
    clock, place = ManualClock(), record(ONE, "n0").instance.placements[0]
    rates: list[float | None] = []
    for tokens in (5, 512, 0):  # The last is of a worker that does not say: a usual one.
        sample = sample_of(a_record(clock, tokens, prefill=0.05), MODEL, DeviceKind.CPU)
        assert sample is not None
        rates.append(stage_sample_of(sample, place, MODEL).operations_per_s)
    short, long, usual = rates
    assert short is None
    assert long == usual is not None


async def test_a_decision_shows_the_time_of_a_token_beside_its_prediction() -> None:
    """As soon as it is known, also after the first token."""
    starts = Starts()
    now_s, offset_s = starts.clock.monotonic_s(), wall_offset_s(starts.clock)
    opened = replace(a_record(starts.clock), status="open", end_s=None, ttft_s=None)
    starts.records.open(opened)
    first = FirstToken(
        request_id=RequestId("r"), at_s=now_s + 1, wall_offset_s=offset_s, arrived_s=now_s
    )
    await starts.records.keep(PhaseReport(instance_id=ONE, phases=(), first_token=first))
    assert actual_of(starts.repository.saved[-1])["tpot_s"] is None
    await starts.hear(held(ONE, STEPS))
    starts.clock.advance(LATE_PHASES_S / 2)
    await starts.records.settle({W0: DeviceKind.CPU}, {})
    assert actual_of(starts.repository.saved[-1])["tpot_s"] == 0.01


async def test_what_explains_a_start_is_told_when_its_last_phases_have_come() -> None:
    """The gateway's word of the first token may come before the worker's of what gave it."""
    starts = Starts()
    now_s, offset_s = starts.clock.monotonic_s(), wall_offset_s(starts.clock)
    whole = a_record(starts.clock, load=1.0, prefill=2.0)
    starts.records.open(replace(whole, status="open", end_s=None, ttft_s=None, phases=()))
    load, prefill = whole.phases
    first = FirstToken(
        request_id=RequestId("r"), at_s=now_s + 2, wall_offset_s=offset_s, arrived_s=now_s
    )
    none = starts.coverage
    await starts.records.keep(PhaseReport(instance_id=ONE, phases=(load,), first_token=first))
    await starts.records.settle({W0: DeviceKind.CPU}, {})
    assert starts.repository.saved[-1].coverage == pytest.approx(0.5)
    assert starts.coverage == none
    await starts.records.keep(PhaseReport(instance_id=ONE, phases=(prefill,)))
    starts.clock.advance(LATE_PHASES_S + 1)
    await starts.records.settle({W0: DeviceKind.CPU}, {})
    assert starts.coverage == pytest.approx(1.0)
