"""A child's loop with an engine that is a script, and the parent at the other end of its socket."""

import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from pilotlight.common.clock import ManualClock, SystemClock
from pilotlight.common.envelope import Timed
from pilotlight.common.faults import Faults
from pilotlight.common.messages.codec import FrameBuffer, frame
from pilotlight.common.messages.engine import EngineUp, EventFrame, Produced, Run
from pilotlight.engine.errors import UnknownInstance
from pilotlight.engine.results import FirstPrefill, PlacedPart, StageRoom, StepResult
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engine_child.ahead import WarmUp
from pilotlight.worker.engine_child.loop import ChildLoop
from pilotlight.worker.engine_child.pins import Pins

UP = EngineUp(pid=1, device_name="script", load_bytes_per_s=1.0)
INSTANCE = InstanceId("inst-1")


class ScriptedArena:
    """Remembers what it was to leave to others."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.error: Exception | None = None

    def leave(self, num_bytes: int) -> None:
        self.left.append(num_bytes)
        if self.error is not None:
            raise self.error


class ScriptedEngine:
    """Counts parts, gives one token a step, and raises what it is told to."""

    def __init__(self) -> None:
        self.clock: SystemClock | ManualClock = SystemClock()
        self.arena = ScriptedArena()
        self.expected: dict[InstanceId, set[int]] = {}
        self.whole: set[InstanceId] = set()
        """Stages that are the whole of their models."""
        self.seen: list[tuple[str, bytes]] = []
        self.running: list[Run] = []
        self.deadlines: dict[RequestId, float | None] = {}
        self.ended: list[Produced] = []
        self.copy_s = 0.0
        self.convert_s = 0.0
        self.begin_error: Exception | None = None
        self.place_error: Exception | None = None
        self.step_error: Exception | None = None
        self.prefilled = False
        self.due_s: float | None = None
        self.rest_s = 0.0
        self.step_s = 0.001
        self.slots: dict[InstanceId, int | None] = {}
        self.early = False
        """Requests run as far as parts are in place."""
        self.fresh = False
        self.first_parts: list[list[int] | None] = []
        """Of each load, what had come when it had all of its memory, ..."""
        self.before_rest: Callable[[], None] = lambda: None
        """Called then, before the rest of it is set up."""
        self.early_parts: list[list[int] | None] = []
        """... and when it was set up; None: batches of others ran."""
        self.unprepared: list[str] = []
        """What it does for later, piece by piece."""
        self.prepared = threading.Event()
        self.may_step = threading.Event()
        self.may_step.set()

    def compute(self, seconds: float) -> None:
        """Take a computation's time. The parent of this thread reads along."""
        if isinstance(self.clock, ManualClock):
            self.clock.advance(seconds)
        else:
            threading.Event().wait(seconds)

    @property
    def has_work(self) -> bool:
        if self.due_s is not None and self.clock.monotonic_s() >= self.due_s:
            return True
        waits = self.early and not self.fresh and any(self.expected.values())
        return bool(self.ended or (self.running and not waits))

    def begin_load(
        self,
        instance_id: InstanceId,
        spec: Any,
        stage: Any,
        dtype: Any,
        device_bytes: int,
        slot: int | None = None,
        plan: Any = None,
        *,
        may_grow: bool = False,
        early: Any = None,
    ) -> StageRoom:
        if self.begin_error is not None:
            raise self.begin_error
        self.slots[instance_id] = slot
        self.first_parts.append(sorted(early.first()) if early is not None else None)
        self.before_rest()
        self.early_parts.append(sorted(early.come()) if early is not None else None)
        self.expected[instance_id] = set(spec.parts_of(stage))
        if stage == spec.whole:
            self.whole.add(instance_id)
        return StageRoom(
            parts=spec.parts_of(stage),
            parameter_bytes=1,
            kv_bytes_per_token=1,
            kv_capacity_tokens=512,
        )

    def place_part(
        self, instance_id: InstanceId, part: int, tensors: Any, following: Any = None
    ) -> PlacedPart:
        if self.place_error is not None:
            raise self.place_error
        self.seen += [(name, bytes(view[:8])) for name, (_, _, view) in tensors.items()]
        assert all(view.readonly for _, _, view in tensors.values())
        self.expected[instance_id].discard(part)
        self.compute(self.copy_s)
        self.fresh = True
        return PlacedPart(
            copy_s=0.0, convert_s=self.convert_s, ready=not self.expected[instance_id]
        )

    def prepare(self) -> bool:
        if self.unprepared:
            self.unprepared.pop(0)
            if not self.unprepared:
                self.prepared.set()
        return bool(self.unprepared)

    @property
    def channels(self) -> tuple[()]:
        return ()

    def serves(self, instance_id: InstanceId) -> bool:
        return instance_id in self.expected and instance_id in self.whole

    def drop(self, instance_id: InstanceId) -> None:
        self.expected.pop(instance_id, None)
        self.whole.discard(instance_id)

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
        share: Any,
        promise: Any,
        pieces: Any = (),
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
        self.ended.append(
            Produced(
                request_id=request_id, attempt=attempt, position=0, finish=FinishReason.CANCELLED
            )
        )

    def step(self) -> StepResult:
        assert self.may_step.wait(5)
        self.compute(self.step_s)
        if self.step_error is not None:
            raise self.step_error
        start_s = self.clock.monotonic_s()
        produced, self.ended = self.ended, []
        if self.due_s is not None and start_s >= self.due_s:
            late = {"position": 0, "finish": FinishReason.ERROR, "code": "deadline_exceeded"}
            produced += [
                Produced(request_id=run.request_id, attempt=1, **late) for run in self.running
            ]
            self.running, self.due_s = [], None
        fresh, self.fresh = self.fresh, False
        if self.early and any(self.expected.values()):
            return idle_result(
                produced, self.running[0].instance_id if fresh and self.running else None
            )
        produced += [
            Produced(request_id=run.request_id, attempt=1, position=0, token_ids=(7,))
            for run in self.running
        ]
        first = ()
        if self.running and not self.prefilled:
            self.prefilled = True
            run = self.running[0]
            end_s = self.clock.monotonic_s()
            first = (
                FirstPrefill(
                    instance_id=run.instance_id,
                    request_id=run.request_id,
                    start_s=start_s,
                    end_s=end_s,
                ),
            )
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

    def __init__(
        self,
        engine: ScriptedEngine,
        faults: str = "",
        pins: Pins | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        self.ours, theirs = socket.socketpair()
        self.theirs = theirs
        self._buffer = FrameBuffer(EventFrame)
        self.events: list[Any] = []
        self.sent_s = 0.0
        """When the last answer was sent, as its frame says."""
        self.failure: Exception | None = None
        served = ChildLoop(
            theirs, engine, engine.clock, Faults.parse(faults), pins, warm_up=warm_up
        )

        def serve() -> None:
            try:
                served.run(UP)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test's own thread judges it
                self.failure = error

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    def send(self, *commands: object) -> None:
        timed = (one if isinstance(one, Timed) else Timed(one) for one in commands)
        self.ours.sendall(b"".join(map(frame, timed)))

    def until(self, kind: type, matches: Callable[[Any], bool] = lambda _: True) -> Any:
        for _ in range(1000):
            while self.events:
                told = self.events.pop(0)
                if isinstance(told.message, kind) and matches(told.message):
                    self.sent_s = told.sent.at_s
                    return told.message
            poll = select.poll()
            poll.register(self.ours, select.POLLIN)
            assert poll.poll(5000), f"no {kind.__name__} came"
            self.events += self._buffer.feed(self.ours.recv(65536))
        raise AssertionError(f"much came, and no {kind.__name__}")

    def close(self) -> None:
        self.ours.close()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.theirs.close()


def run(request_id: str = "req-1", instance_id: str = "inst-1", earlier: int = 0) -> Run:
    return Run(
        request_id=RequestId(request_id),
        attempt=1,
        instance_id=InstanceId(instance_id),
        prompt_ids=[1],
        output_ids=list(range(earlier)),
        sampling=Sampling(seed=1, max_tokens=8),
    )
