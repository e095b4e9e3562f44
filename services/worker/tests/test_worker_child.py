"""The child's loop with an engine that is a script: what it obeys, in which order, and what it reports."""

import itertools
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.errors import error_of
from pilotlight.common.faults import Faults
from pilotlight.common.messages.codec import FrameBuffer, frame
from pilotlight.common.messages.engine import (
    Abort,
    EngineUp,
    FromEngine,
    Prefilled,
    Run,
    Shutdown,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.engine.errors import EngineError, NoRoom, UnknownInstance
from pilotlight.engine.results import FirstPrefill, PlacedPart, Produced, StageRoom, StepResult
from pilotlight.policy.types import FinishReason, InstanceId, Moment, PhaseName, RequestId, Sampling
from pilotlight.worker.child_loop import ChildLoop, _code_of
from pilotlight.worker.child_pins import Pins
from pilotlight.worker.child_stages import Intervals

UP = EngineUp(pid=1, device_name="script", load_bytes_per_s=1.0)
INSTANCE = InstanceId("inst-1")


class ScriptedEngine:
    """Counts parts, gives one token a step, and raises what it is told to."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.expected: dict[InstanceId, set[int]] = {}
        self.seen: list[tuple[str, bytes]] = []
        self.running: list[Run] = []
        self.deadlines: dict[RequestId, float | None] = {}
        self.ended: list[Produced] = []
        self.convert_s = 0.0
        self.begin_error: Exception | None = None
        self.place_error: Exception | None = None
        self.step_error: Exception | None = None
        self.prefilled = False
        self.due_s: float | None = None
        self.step_s = 0.001
        self.early = False
        """Requests run as far as parts are in place."""
        self.fresh = False
        self.may_step = threading.Event()
        self.may_step.set()

    @property
    def has_work(self) -> bool:
        if self.due_s is not None and self.clock.monotonic_s() >= self.due_s:
            return True
        waits = self.early and not self.fresh and any(self.expected.values())
        return bool(self.ended or (self.running and not waits))

    def begin_load(self, instance_id: InstanceId, spec: Any, stage: Any, dtype: Any, device_bytes: int) -> StageRoom:
        if self.begin_error is not None:
            raise self.begin_error
        self.expected[instance_id] = set(spec.parts_of(stage))
        return StageRoom(parts=spec.parts_of(stage), parameter_bytes=1, kv_bytes_per_token=1, kv_capacity_tokens=512)

    def place_part(self, instance_id: InstanceId, part: int, tensors: Any) -> PlacedPart:
        if self.place_error is not None:
            raise self.place_error
        self.seen += [(name, bytes(view[:8])) for name, (_, _, view) in tensors.items()]
        assert all(view.readonly for _, _, view in tensors.values())
        self.expected[instance_id].discard(part)
        self.fresh = True
        return PlacedPart(copy_s=0.0, convert_s=self.convert_s, ready=not self.expected[instance_id])

    def drop(self, instance_id: InstanceId) -> None:
        self.expected.pop(instance_id, None)

    def add(
        self,
        request_id: Any,
        attempt: int,
        instance_id: Any,
        prompt_ids: Any,
        output_ids: Any,
        sampling: Any,
        deadline_s: float | None,
        *,
        vocabulary: Any,
    ) -> None:
        self.deadlines[request_id] = deadline_s
        if instance_id not in self.expected:
            raise UnknownInstance(f"{instance_id} is not held here")
        run = Run(
            request_id=request_id,
            attempt=attempt,
            instance_id=instance_id,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            sampling=sampling,
        )
        self.running.append(run)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self.running = [run for run in self.running if run.request_id != request_id]
        self.ended.append(Produced(request_id=request_id, attempt=attempt, position=0, finish=FinishReason.CANCELLED))

    def step(self) -> StepResult:
        assert self.may_step.wait(5)
        threading.Event().wait(self.step_s)  # a computation's time: the parent of this thread reads along
        if self.step_error is not None:
            raise self.step_error
        start_s = self.clock.monotonic_s()
        produced, self.ended = self.ended, []
        if self.due_s is not None and start_s >= self.due_s:
            late = {"position": 0, "finish": FinishReason.ERROR, "code": "deadline_exceeded"}
            produced += [Produced(request_id=run.request_id, attempt=1, **late) for run in self.running]
            self.running, self.due_s = [], None
        fresh, self.fresh = self.fresh, False
        if self.early and any(self.expected.values()):
            return idle_result(produced, self.running[0].instance_id if fresh and self.running else None)
        produced += [Produced(request_id=run.request_id, attempt=1, position=0, token_ids=(7,)) for run in self.running]
        first = ()
        if self.running and not self.prefilled:
            self.prefilled = True
            run = self.running[0]
            end_s = self.clock.monotonic_s()
            first = (FirstPrefill(instance_id=run.instance_id, request_id=run.request_id, start_s=start_s, end_s=end_s),)
        return StepResult(
            produced=tuple(produced),
            waiting=0,
            running=len(self.running),
            kv_free_tokens=1,
            step_time_s=0.0,
            first_prefills=first,
        )


def idle_result(produced: list[Produced], turn_of: InstanceId | None) -> StepResult:
    """No token in it."""
    return StepResult(
        produced=tuple(produced),
        waiting=0,
        running=1,
        kv_free_tokens=1,
        step_time_s=0.0,
        first_prefills=(),
        turn_of=turn_of,
    )


class Parent:
    """The other end: sends commands, reads answers until one of a kind comes."""

    def __init__(self, engine: ScriptedEngine, faults: str = "", pins: Pins | None = None) -> None:
        self.ours, theirs = socket.socketpair()
        self.theirs = theirs
        self._buffer = FrameBuffer(FromEngine)
        self.events: list[Any] = []
        self.failure: Exception | None = None
        loop = ChildLoop(theirs, engine, SystemClock(), Faults.parse(faults), pins)

        def serve() -> None:
            try:
                loop.run(UP)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test's own thread judges it
                self.failure = error

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    def send(self, *commands: object) -> None:
        self.ours.sendall(b"".join(frame(command) for command in commands))

    def until(self, kind: type, matches: Callable[[Any], bool] = lambda _: True) -> Any:
        for _ in range(1000):
            while self.events:
                event = self.events.pop(0)
                if isinstance(event, kind) and matches(event):
                    return event
            assert select.select([self.ours], [], [], 5)[0], f"no {kind.__name__} came"
            self.events += self._buffer.feed(self.ours.recv(65536))
        raise AssertionError(f"much came, and no {kind.__name__}")

    def close(self) -> None:
        self.ours.close()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.theirs.close()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def start(engine: ScriptedEngine) -> Iterator[Callable[..., Parent]]:
    parents: list[Parent] = []

    def make(faults: str = "", pins: Pins | None = None) -> Parent:
        parents.append(Parent(engine, faults, pins))
        assert parents[-1].until(EngineUp) == UP
        return parents[-1]

    yield make
    for parent in parents:
        parent.close()


def run(request_id: str = "req-1", instance_id: str = "inst-1", earlier: int = 0) -> Run:
    return Run(
        request_id=RequestId(request_id),
        attempt=1,
        instance_id=InstanceId(instance_id),
        prompt_ids=[1],
        output_ids=list(range(earlier)),
        sampling=Sampling(seed=1, max_tokens=8),
    )


def test_a_load_reads_the_pool_and_reports_active_intervals(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    engine.convert_s = 1e-5
    parent = start()
    before_s = SystemClock().monotonic_s()
    parent.send(pool.load(), *pool.places())
    loaded = parent.until(StageLoaded)
    after_s = SystemClock().monotonic_s()
    image = pool.path.read_bytes()
    expected = [(place.name, image[place.offset : place.offset + 8]) for part in pool.parts.values() for place in part]
    assert engine.seen == expected
    assert loaded.kv_capacity_tokens == 512
    names = {phase.name for phase in loaded.phases}
    assert names == {PhaseName.INIT, PhaseName.LOAD, PhaseName.CONVERT}
    times = [time_s for phase in loaded.phases for time_s in (phase.start_s, phase.end_s)]
    assert times == sorted(times), "leaf intervals do not overlap"
    assert before_s <= times[0] <= times[-1] <= after_s


def before(seconds: float) -> Moment:
    now = moment_of(SystemClock())
    return Moment(at_s=now.at_s - seconds, wall_offset_s=now.wall_offset_s)


def test_phases_begin_with_the_word_that_led_to_them(start: Any, pool: Any) -> None:
    parent = start()
    asked, ready, early = before(0.3), before(0.2), before(0.25)
    first, *others = pool.places()
    parent.send(msgspec.structs.replace(pool.load(), sent=asked))
    # A part that was ready before the stage was set up is loaded from then on; one that came while another was copied, from its end.
    parent.send(msgspec.structs.replace(first, ready=early), *(msgspec.structs.replace(place, ready=ready) for place in others))
    loaded = parent.until(StageLoaded)
    init, load = loaded.phases
    assert (init.name, init.start_s) == (PhaseName.INIT, asked.at_s)
    assert (load.name, load.start_s) == (PhaseName.LOAD, init.end_s), "one interval: no part was waited for"
    submitted = before(0.1)
    parent.send(msgspec.structs.replace(run(), sent=submitted))
    prefill = parent.until(Prefilled).phase
    assert prefill.start_s == submitted.at_s
    step = parent.until(StepDone)
    assert step.sampled is not None
    assert step.sampled.at_s == prefill.end_s


def test_a_load_that_waits_for_its_part_is_not_loading(start: Any, pool: Any) -> None:
    parent = start()
    first, *others = pool.places()
    parent.send(pool.load(), first)
    # A step comes after a part that was there before it.
    parent.send(run("req-1", "inst-unknown"))
    parent.until(StepDone)
    threading.Event().wait(0.02)
    ready = before(0.005)
    parent.send(*(msgspec.structs.replace(place, ready=ready) for place in others))
    _, one, rest = parent.until(StageLoaded).phases
    assert (one.name, rest.name, rest.start_s) == (PhaseName.LOAD, PhaseName.LOAD, ready.at_s)
    assert one.end_s <= rest.start_s


@pytest.mark.parametrize("fault", ["", "prefill=0.2", "load=0.2"])
def test_what_runs_between_two_parts_is_prefill_and_no_load(fault: str, start: Any, engine: ScriptedEngine, pool: Any) -> None:
    engine.early, engine.step_s = True, 0.004
    parent = start(fault)
    places = pool.places()
    parent.send(pool.load())
    opened = parent.until(StageOpened)
    assert (opened.instance_id, opened.kv_capacity_tokens) == (INSTANCE, 512)
    parent.send(run(), places[0], places[1])
    for _ in range(2):
        parent.until(StepDone)
    threading.Event().wait(0.2)  # nothing comes
    parent.send(*places[2:])
    loaded = parent.until(StageLoaded)
    prefilled = parent.until(Prefilled)
    step = parent.until(StepDone)
    assert len(step.produced) == 1
    work = sorted([*loaded.phases, *prefilled.earlier, prefilled.phase], key=lambda phase: phase.start_s)
    assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(work)), "nothing is counted twice"
    taken_s = {name: sum(one.end_s - one.start_s for one in work if one.name is name) for name in PhaseName}
    noise_s = 0.15
    prefill_s, load_s = len(places) * engine.step_s + 0.2 * ("prefill" in fault), 0.2 * ("load" in fault)
    assert prefill_s <= taken_s[PhaseName.PREFILL] < prefill_s + noise_s
    assert load_s <= taken_s[PhaseName.LOAD] < load_s + noise_s
    assert step.sampled is not None
    assert step.sampled.at_s == prefilled.phase.end_s


def test_a_request_that_waits_for_parts_is_looked_at_when_its_time_is_over(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    engine.early = True
    parent = start()
    parent.send(pool.load(), pool.places()[0], run())
    parent.until(StepDone)
    engine.due_s = engine.clock.monotonic_s() + 0.05
    parent.send(Abort(request_id=RequestId("req-other"), attempt=1))  # it reads when that is
    step = parent.until(StepDone, lambda step: any(one.code for one in step.produced))
    assert [(one.request_id, one.code) for one in step.produced] == [("req-1", "deadline_exceeded")]


def test_neighbouring_intervals_become_one() -> None:
    intervals = Intervals(wall_offset_s=0.0)
    for name, start_s, end_s in [
        (PhaseName.LOAD, 1.0, 1.1),
        (PhaseName.LOAD, 1.1005, 1.2),
        (PhaseName.LOAD, 1.3, 1.4),
        (PhaseName.CONVERT, 1.4, 1.4),
        (PhaseName.CONVERT, 1.4, 1.5),
    ]:
        intervals.add(name, start_s, end_s)
    assert [(phase.name, phase.start_s, phase.end_s) for phase in intervals.phases] == [
        (PhaseName.LOAD, 1.0, 1.2),
        (PhaseName.LOAD, 1.3, 1.4),
        (PhaseName.CONVERT, 1.4, 1.5),
    ]


@pytest.mark.parametrize(("point", "name"), [("load", PhaseName.LOAD), ("prefill", PhaseName.PREFILL)])
def test_an_injected_delay_lies_in_its_phase_alone(start: Any, pool: Any, point: str, name: PhaseName) -> None:
    parent = start(f"{point}=0.05")
    parent.send(pool.load(), *pool.places())
    loaded = parent.until(StageLoaded)
    parent.send(run())
    phases = [*loaded.phases, parent.until(Prefilled).phase]
    taken_s = {phase: sum(one.end_s - one.start_s for one in phases if one.name is phase) for phase in PhaseName}
    assert taken_s.pop(name) >= 0.05
    assert sum(taken_s.values()) < 0.04


def test_a_stage_that_cannot_be_held_fails_alone(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    parent = start()
    engine.begin_error = NoRoom("too small")
    parent.send(pool.load(), *pool.places())
    failed = parent.until(StageFailed)
    assert (failed.code, failed.message) == ("no_room", "too small")
    engine.begin_error = None
    engine.place_error = RuntimeError("boom")
    parent.send(pool.load(), *pool.places())
    assert parent.until(StageFailed).code == "engine_failed"
    engine.place_error = None
    parent.send(pool.load(), *pool.places())
    assert parent.until(StageLoaded)


def test_a_part_outside_the_pool_fails_the_stage(start: Any, pool: Any) -> None:
    parent = start()
    place = pool.places()[0]
    tensor = place.tensors[0]
    outside = type(tensor)(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, offset=pool.pool_bytes, size_bytes=tensor.size_bytes
    )
    parent.send(pool.load(), type(place)(instance_id=INSTANCE, part=place.part, tensors=(outside,)))
    assert parent.until(StageFailed).code == "bad_checkpoint"


def test_a_request_that_is_refused_ends_with_an_error_and_the_others_go_on(start: Any, pool: Any) -> None:
    parent = start()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    parent.send(run("req-1"))
    parent.until(StepDone)
    parent.send(run("req-2", "inst-unknown", earlier=3))
    step = parent.until(StepDone, lambda step: any(one.finish for one in step.produced))
    (ended,) = [one for one in step.produced if one.finish]
    assert (ended.request_id, ended.position, ended.code) == ("req-2", 3, "not_loaded")
    assert parent.until(StepDone).produced[0].request_id == "req-1"


def test_what_a_step_says_of_a_request_has_a_code_of_the_taxonomy(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    """A grammar that cannot be used shows in a step, long after its request was taken in."""
    parent = start()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    wrong = {"finish": FinishReason.ERROR, "code": "bad_request", "message": "the grammar is too large"}
    engine.ended.append(Produced(request_id=RequestId("req-2"), attempt=1, position=0, **wrong))
    parent.send(run())
    step = parent.until(StepDone, lambda step: any(one.finish for one in step.produced))
    (ended,) = [one for one in step.produced if one.finish]
    assert (ended.code, ended.message) == ("invalid_request", "the grammar is too large")


def test_every_error_of_the_engine_has_its_code_in_the_taxonomy() -> None:
    kinds, codes = [EngineError], set()
    while kinds:
        kind = kinds.pop()
        codes.add(kind.code)
        kinds += kind.__subclasses__()
    assert len(codes) >= 10
    told = {code: error_of(_code_of(code), "as told") for code in codes}
    assert {code: error.code for code, error in told.items()} == {code: _code_of(code) for code in codes}


def test_a_deadline_counts_from_when_the_request_was_sent(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    parent = start()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    now = moment_of(SystemClock())
    sent = Moment(at_s=now.at_s - 2.0, wall_offset_s=now.wall_offset_s)
    late = msgspec.structs.replace(run("req-late"), deadline_in_s=3.0)
    parent.send(run(), msgspec.structs.replace(late, request_id=RequestId("req-2"), sent=sent), late)
    parent.until(StepDone, lambda step: len(engine.deadlines) == 3)
    assert engine.deadlines["req-1"] is None
    assert engine.deadlines["req-2"] == pytest.approx(sent.at_s + 3.0, abs=1e-6)
    assert now.at_s + 3.0 <= engine.deadlines["req-late"] <= SystemClock().monotonic_s() + 3.0, "an earlier release does not say"


def test_an_abort_is_obeyed_within_one_step_even_behind_a_load(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    parent = start()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    parent.send(run("req-1"))
    parent.until(StepDone, lambda step: step.running == 1)
    engine.may_step.clear()
    parent.send(pool.load("inst-2"), *pool.places("inst-2"), Abort(request_id=RequestId("req-1"), attempt=1))
    # Whatever step is going on ends; the next one must know.
    engine.may_step.set()
    parent.until(StepDone, lambda step: any(one.finish is FinishReason.CANCELLED for one in step.produced))
    assert parent.until(StageLoaded).instance_id == "inst-2"


def test_an_unload_is_answered_and_calls_a_load_off(start: Any, pool: Any) -> None:
    parent = start()
    parent.send(pool.load(), *pool.places()[:2], UnloadStage(instance_id=INSTANCE), *pool.places()[2:])
    assert parent.until(StageUnloaded).instance_id == INSTANCE
    parent.send(UnloadStage(instance_id=InstanceId("never-held")))
    assert parent.until(StageUnloaded).instance_id == "never-held"
    assert not [event for event in parent.events if isinstance(event, StageLoaded)]


def test_shutdown_and_the_parents_death_end_it(start: Any) -> None:
    told = start()
    told.send(Shutdown())
    told.thread.join(5)
    assert not told.thread.is_alive()
    left = start()
    left.ours.shutdown(socket.SHUT_RDWR)
    left.thread.join(5)
    assert not left.thread.is_alive()


def test_a_step_that_raises_ends_the_process(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    parent = start()
    engine.step_error = RuntimeError("boom")
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    parent.send(run())
    parent.thread.join(5)
    assert isinstance(parent.failure, RuntimeError)


class Slabs:
    """Slabs of the pool that were pinned, one of them at a time when it is let."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.pinning = threading.Event()

    def pin_next(self, wanted: Any = ()) -> bool:
        self.pinned += wanted
        self.pinning.set()
        return True

    def close(self) -> None:
        self.pinned.clear()


def test_what_was_loaded_from_is_pinned_when_nothing_is_to_be_done(start: Any, engine: ScriptedEngine, pool: Any) -> None:
    slabs = Slabs()
    parent = start(pins=Pins(lambda view, slab_bytes: slabs, slab_bytes=4096))
    parent.send(pool.load(), *pool.places()[:-1])
    parent.send(UnloadStage(instance_id=InstanceId("nothing")))
    parent.until(StageUnloaded)
    assert slabs.pinned == [], "while anything loads the bus is its"
    parent.send(pool.places()[-1])
    parent.until(StageLoaded)
    last = pool.places()[-1].tensors[-1]
    assert slabs.pinning.wait(5)
    parent.send(UnloadStage(instance_id=INSTANCE))
    parent.until(StageUnloaded)
    assert slabs.pinned[0] <= last.offset + last.size_bytes
    assert slabs.pinned[0] >= last.offset - 2 * 4096, "what was wanted last goes first"


@pytest.mark.parametrize("moment", ["begin", "place", "step"])
def test_a_lost_context_ends_the_loop_whatever_it_was_doing(start: Any, engine: ScriptedEngine, pool: Any, moment: str) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    parent = start()
    if moment != "begin":
        parent.send(pool.load())
        parent.until(StageOpened)
    setattr(engine, f"{moment}_error", error)
    if moment == "step":
        for place in pool.places():
            parent.send(place)
        parent.send(run())
    else:
        parent.send(pool.load() if moment == "begin" else pool.places()[0])
    parent.thread.join(5)
    assert parent.failure is error
