"""The engine child's loop: commands in, steps, answers out, all of it in one thread."""

import math
import select
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import error_of
from pilotlight.common.faults import Faults
from pilotlight.common.messages.codec import frame
from pilotlight.common.messages.engine import (
    Abort,
    EngineUp,
    FromEngine,
    LoadStage,
    PlacePart,
    Produced,
    Promote,
    Run,
    Shutdown,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageUnloaded,
    ToEngine,
    UnloadStage,
)
from pilotlight.common.messages.pipelines import CallOffExtend
from pilotlight.common.phases import PhaseRecorder
from pilotlight.engine.results import StepResult
from pilotlight.engine.watching import listen
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.hang import Doing
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import FinishReason, Promise, RequestKey, Sampling, Vocabulary
from pilotlight.worker.engine_child.ahead import IdleWork, WarmUp
from pilotlight.worker.engine_child.inbox import Inbox
from pilotlight.worker.engine_child.kv_sharing import SharingEngine
from pilotlight.worker.engine_child.neighbours import Neighbours
from pilotlight.worker.engine_child.part_queue import PartQueue
from pilotlight.worker.engine_child.pins import LOOK_S, Pins
from pilotlight.worker.engine_child.pipelines import PipelineEngine, Pipelines
from pilotlight.worker.engine_child.prefills import Prefills
from pilotlight.worker.engine_child.slate import Slate, mark_of
from pilotlight.worker.engine_child.stages import LoadingEngine, StageLoads, pause_blocking
from pilotlight.worker.engine_child.told import end_of, raise_if_lost, told_of

if TYPE_CHECKING:
    from pilotlight.engine.kv_pieces import KvPiece
    from pilotlight.worker.engine_child.start_record import StartRecord

log = structlog.get_logger()

COPYING_S = 0.001
"""How often a part whose copies go on is looked at, where there is nothing else to do."""


class StepEngine(LoadingEngine, PipelineEngine, SharingEngine, Protocol):
    """What the loop asks of the engine (``pilotlight.engine.engine.Engine``), so that it can be
    tested without torch.
    """

    @property
    def has_work(self) -> bool: ...
    @property
    def due_s(self) -> float | None: ...
    @property
    def rest_s(self) -> float: ...
    def drop(self, instance_id: InstanceId) -> None: ...
    def add(
        self,
        request_id: RequestId,
        attempt: int,
        instance_id: InstanceId,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: Sampling,
        deadline_s: float | None,
        *,
        vocabulary: Vocabulary | None,
        pieces: "Sequence[KvPiece]" = (),
        share: FairShare = NO_TENANT,
        promise: Promise | None = None,
    ) -> None: ...
    def abort(self, request_id: RequestId, attempt: int) -> None: ...
    def prepare(self) -> bool: ...
    def step(self) -> StepResult: ...


class ChildLoop:
    """Everything but parts is done as soon as it is read; parts are copied one between two steps,
    so that a load of one model stops no stream of another for longer than a part takes, and an
    abort is obeyed within one step.
    """

    def __init__(
        self,
        connection: socket.socket,
        engine: StepEngine,
        clock: Clock,
        faults: Faults,
        pins: Pins | None = None,
        slate: Slate | None = None,
        neighbours: Neighbours | None = None,
        warm_up: WarmUp | None = None,
        record: "StartRecord | None" = None,
    ) -> None:
        self._warm_up = warm_up or WarmUp(clock)
        self._for_later = IdleWork(
            clock, lambda: (record is not None and record.write(self._loads)) or engine.prepare()
        )
        work = (lambda: False) if pins is None else pins.pin_ahead
        self._pin_ahead = IdleWork(clock, work, again_s=LOOK_S)
        self._connection = connection
        self._engine = engine
        self._clock = clock
        self._faults = faults
        self._inbox = Inbox(connection)
        self._phases = PhaseRecorder(clock, "worker", "engine")
        self._loads = StageLoads(engine, clock, faults, self._phases, pins)
        self._neighbours = neighbours or Neighbours(clock.monotonic_s)
        self._kv = self._neighbours.kv
        self._pipelines = Pipelines(engine, self._loads, self._neighbours, self._send, told_of)
        self._pins = pins
        self._parts = PartQueue()
        self._copying = False  # The first of them is on its way to the device.
        self._prefills = Prefills(self._phases)
        self._slate = slate or Slate()
        """Where the worker looks for what is being done."""
        self._batch_tokens = 0
        """Of the last batch, whose end may be waited for while the next one runs already."""
        self._counts = (0, 0, 0, 0)
        """Last told: requests waiting and running, tokens of KV free and cached."""
        self._refused: list[Produced] = []
        """Ends of those that the engine did not take; they leave with the next step."""
        self._ended = self._received = False  # Something came when it was last looked.

    def run(self, up: EngineUp) -> None:
        """Serve until told to shut down, or until the parent is gone.

        Raises:
            OSError: the parent went away in the middle of an answer.
            Exception: a step failed, or the device's context is lost: nothing held can be trusted.
        """
        listen(self._turn_to)
        self._send(up)
        self._warm_up.wait()
        while not self._ended:
            places = bool(self._parts) and not self._copying
            busy = places or self._engine.has_work
            idle = not (busy or self._loads.any)
            self._for_later.look(idle=idle)
            pins = idle and self._pins is not None and self._pins.waiting
            ahead = idle and self._pins is not None and self._pins.looks_ahead
            self._pin_ahead.look(idle=ahead)
            proof = idle and self._loads.restoring.due
            wait_s = self._engine.rest_s if busy else self._idle_s()
            self._receive(0 if places or pins or proof else wait_s)
            if self._warm_up.due(loading=self._loads.any or self._ended):
                self._slate.write(Doing.COMPILING)
                self._warm_up.run(lambda: self._has_come(0))
            if pins and not self._received and self._pins is not None:
                self._slate.write(Doing.OBEYING)
                self._pins.pin_one()
            if proof and not self._received:
                self._loads.restoring.prove_one(self._engine)
            if self._for_later.due and not self._received:
                self._slate.write(Doing.COMPILING)
                self._for_later.run()
            elif self._pin_ahead.due and not self._received:
                self._slate.write(Doing.OBEYING)
                self._pin_ahead.run()
            self._pipelines.join()
            self._share_kv()
            self._tell()
            if self._parts:
                self._slate.write(Doing.OBEYING)
                self._place(*self._parts.popleft())
            steps = self._engine.has_work and not self._engine.rest_s
            if (steps or self._refused) and not self._ended:
                self._step()

    def _idle_s(self) -> float | None:
        if self._copying and self._parts:
            return COPYING_S
        due_s = self._for_later.before(self._warm_up.before(self._engine.due_s))
        due_s = self._pin_ahead.before(due_s)
        return None if due_s is None else max(0.0, due_s - self._clock.monotonic_s())

    def _receive(self, wait_s: float | None) -> None:
        """Obey everything that has arrived; wait up to ``wait_s`` for the first of it."""
        self._received = False
        self._slate.write(Doing.WAITING)
        while self._has_come(wait_s):
            wait_s, self._received = 0, True
            if not self._inbox.read():
                self._ended = True
                return
            for told in self._inbox.commands():
                self._slate.obey()
                self._obey(told.message, told.sent_s(self._clock))
            self._slate.write(Doing.WAITING)

    def _has_come(self, wait_s: float | None) -> bool:
        """The parent has said something; ends early when another stage has, or is joined."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if wait_s != 0:
            poll.register(self._neighbours.wake_fd, select.POLLIN)
            for channel in self._engine.channels:
                poll.register(*channel.interest())
        ready = poll.poll(None if wait_s is None else math.ceil(wait_s * 1000))
        return any(descriptor == self._connection.fileno() for descriptor, _ in ready)

    def _obey(self, command: ToEngine, sent_s: float) -> None:
        match command:
            case LoadStage():
                self._load(command, sent_s)
            case PlacePart():
                self._parts.append((command, sent_s))
            case UnloadStage():
                self._unload(command.instance_id)
                kernels = self._loads.kernels.unloaded(command.instance_id)
                self._send(StageUnloaded(instance_id=command.instance_id, kernels=kernels))
            case Run():
                if not self._kv.asks(command, sent_s):
                    self._add(command, sent_s)
            case Abort():
                self._abort(command)
            case CallOffExtend():
                self._call_off(command)
            case Promote():
                pass  # It is the engine already.
            case Shutdown():
                self._ended = True
            case _:
                self._pipelines.obey(command, sent_s)

    def _load(self, command: LoadStage, sent_s: float) -> None:
        try:
            # They would keep batches of others waiting.
            parts = () if self._engine.has_work else (self._inbox,)
            room = self._loads.begin(command, sent_s, *parts)
        except Exception as error:  # noqa: BLE001 - a stage that cannot be loaded must not take the others with it
            raise_if_lost(error)
            self._fail(command.instance_id, error)
            return
        self._prefills.begin(command.instance_id)
        if self._engine.serves(command.instance_id):
            tokens = room.kv_capacity_tokens
            self._send(StageOpened(instance_id=command.instance_id, kv_capacity_tokens=tokens))

    def _place(self, command: PlacePart, ready_s: float) -> None:
        self._copying = False
        if command.instance_id not in self._loads:
            return  # The load failed, or was called off, after this was sent.
        grows = self._loads.grows(command.instance_id)
        try:
            loaded = self._loads.place(command, ready_s, self._parts[0][0] if self._parts else None)
        except Exception as error:  # noqa: BLE001 - as above
            raise_if_lost(error)
            self._loads.drop(command.instance_id)
            self._parts.drop(command.instance_id)
            # The engine gives a growth up by itself, where the stage can serve its old range on.
            if grows and self._engine.kv_capacity_tokens(command.instance_id):
                self._pipelines.refuse(command.instance_id, error)
            else:
                self._fail(command.instance_id, error)
            return
        self._copying = loaded is False
        if self._copying:
            self._parts.appendleft((command, ready_s))
        elif isinstance(loaded, StageLoaded):
            placed_s = max(
                (phase.end_s for phase in loaded.phases), default=self._clock.monotonic_s()
            )
            self._prefills.loaded(command.instance_id, placed_s)
            self._tell()
            self._send(loaded)

    def _tell(self) -> None:
        for news in (*self._loads.graphs.news(), *self._loads.kernels.news()):
            self._send(news)

    def _call_off(self, command: CallOffExtend) -> None:
        error = error_of(command.code, command.message)
        if self._engine.call_off(command.instance_id):
            self._loads.drop(command.instance_id)
            self._parts.drop(command.instance_id)
            self._pipelines.refuse(command.instance_id, error)
        else:
            self._fail(command.instance_id, error)

    def _unload(self, instance_id: InstanceId) -> None:
        for holder in (self._parts, self._loads, self._prefills, self._pipelines, self._engine):
            holder.drop(instance_id)

    def _fail(self, instance_id: InstanceId, error: Exception) -> None:
        code, message = told_of(error)
        log.error(
            "stage failed",
            action="stage_failed",
            instance_id=instance_id,
            code=code,
            exc_info=error,
        )
        self._unload(instance_id)
        self._send(StageFailed(instance_id=instance_id, code=code, message=message))

    def _share_kv(self) -> None:
        self._kv.look(self._engine)
        for moved in self._kv.moved():
            self._add(moved.run, moved.sent_s, moved.pieces)

    def _abort(self, command: Abort) -> None:
        self._engine.abort(command.request_id, command.attempt)
        if run := self._kv.call_off(RequestKey(command.request_id, command.attempt)):
            self._refused.append(end_of(run, FinishReason.CANCELLED))

    def _add(self, command: Run, sent_s: float, pieces: "Sequence[KvPiece]" = ()) -> None:
        self._loads.restoring.make_way(self._engine)
        is_first = self._prefills.sent(command.instance_id, command.request_id, sent_s)
        if is_first and self._faults.delay_s("prefill") > 0:
            start_s = self._clock.monotonic_s()
            pause_blocking(self._faults.delay_s("prefill"))
            self._prefills.delayed(command.instance_id, start_s)
        try:
            self._engine.add(
                command.request_id,
                command.attempt,
                command.instance_id,
                command.prompt_ids,
                command.output_ids,
                command.sampling,
                None if command.deadline_in_s is None else sent_s + command.deadline_in_s,
                vocabulary=command.vocabulary,
                share=command.share,
                promise=command.promise,
                pieces=pieces,
            )
        except Exception as error:  # noqa: BLE001 - what one request does to the engine's door must not end the others
            raise_if_lost(error)
            if pieces:  # There may be room for it later, and what does not fit is computed.
                self._add(command, sent_s)
            else:
                self._refused.append(end_of(command, FinishReason.ERROR, *told_of(error)))

    def _step(self) -> None:
        """One batch; what it raises ends the process."""
        for later in (self._for_later, self._pin_ahead):
            later.look(idle=False)  # Between two looks a batch may begin and end.
        self._slate.write(Doing.OBEYING)
        pause_blocking(self._faults.delay_s("step"))
        start_s = self._clock.monotonic_s()
        self._slate.write(Doing.STEPPING)
        result = self._engine.step()
        if result.turn_of is not None:
            self._prefills.ran(result.turn_of, start_s)
        # What comes after the first token of a stage is not that token's work.
        sampled_s = min(
            (first.end_s for first in result.first_prefills), default=self._clock.monotonic_s()
        )
        for first in result.first_prefills:
            self._send(self._prefills.ended(first))
            self._loads.restoring.first_token(first)
            self._loads.kernels.settle(first.instance_id)
        self._pipelines.after(result)
        refused, self._refused = self._refused, []
        produced = (*refused, *self._loads.restoring.take(result.produced))
        counts = result.waiting, result.running, result.kv_free_tokens, result.kv_cached_tokens
        if (
            self._engine.channels
            and not (produced or result.batch_tokens)
            and counts == self._counts
        ):
            return  # The stage looked out for what others send.
        self._counts = counts
        said = msgspec.structs.replace(
            result, produced=produced, first_prefills=(), lost=(), left=(), grown=()
        )
        self._send(said, sampled_s)

    def _turn_to(self, doing: Doing, instance_id: InstanceId, tokens: int) -> None:
        """The engine's word, from within a step."""
        last, self._batch_tokens = self._batch_tokens, tokens
        self._slate.write(doing, max(last, tokens), mark_of(instance_id))

    def _send(self, message: FromEngine, sent_s: float | None = None) -> None:
        """Tell the worker something; ``sent_s``: as of when, None: now."""
        self._slate.write(Doing.TELLING)
        now = moment_of(self._clock)
        sent = now if sent_s is None else Moment(at_s=sent_s, wall_offset_s=now.wall_offset_s)
        self._connection.sendall(frame(Timed(message, sent)))
