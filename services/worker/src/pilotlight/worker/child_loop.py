"""The engine child's loop: commands in, steps, answers out. One thread; whatever it does, the next thing waits."""

import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog

from pilotlight.common.clock import Clock, moment_of, wall_offset_s
from pilotlight.common.errors import EngineFailed as EngineFailedError
from pilotlight.common.errors import PilotlightError
from pilotlight.common.faults import Faults
from pilotlight.common.messages.codec import FrameBuffer, frame
from pilotlight.common.messages.engine import (
    Abort,
    EngineFault,
    EngineUp,
    FromEngine,
    LoadStage,
    PlacePart,
    Produced,
    Promote,
    Run,
    Shutdown,
    StageFailed,
    StageOpened,
    StageUnloaded,
    StepDone,
    ToEngine,
    UnloadStage,
)
from pilotlight.engine import results
from pilotlight.engine.errors import EngineError
from pilotlight.engine.faults import context_lost
from pilotlight.engine.watching import listen
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.hang import Doing
from pilotlight.policy.types import FinishReason, InstanceId, Moment, RequestId, Sampling, Vocabulary
from pilotlight.worker.child_pins import Pins
from pilotlight.worker.child_prefills import Prefills
from pilotlight.worker.child_stages import LoadingEngine, StageLoads, pause_blocking
from pilotlight.worker.slate import Slate, mark_of

log = structlog.get_logger()

RECEIVE_BYTES = 1024 * 1024
LAST_WORDS_S = 1.0
_CODES = {"bad_request": "invalid_request", "unknown_instance": "not_loaded"}
"""The engine's own codes that the taxonomy calls something else."""


class StepEngine(LoadingEngine, Protocol):
    """What the loop asks of the engine (``pilotlight.engine.engine.Engine``), so that it can be tested without torch."""

    @property
    def has_work(self) -> bool: ...
    @property
    def due_s(self) -> float | None: ...
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
    ) -> None: ...
    def abort(self, request_id: RequestId, attempt: int) -> None: ...
    def step(self) -> results.StepResult: ...


class ChildLoop:
    """Everything but parts is done as soon as it is read; parts are copied one between two steps, so that a load of one model stops
    no stream of another for longer than a part takes, and an abort is obeyed within one step.
    """

    def __init__(
        self,
        connection: socket.socket,
        engine: StepEngine,
        clock: Clock,
        faults: Faults,
        pins: Pins | None = None,
        slate: Slate | None = None,
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._clock = clock
        self._faults = faults
        self._buffer = FrameBuffer(ToEngine)
        self._loads = StageLoads(engine, clock, faults, pins)
        self._pins = pins
        self._parts: deque[PlacePart] = deque()
        self._prefills = Prefills(clock)
        self._slate = slate or Slate()
        """Where the worker looks for what is being done."""
        self._batch_tokens = 0
        """Of the last batch, whose end may be waited for while the next one runs already."""
        self._refused: list[Produced] = []
        """Ends of requests that the engine did not take; they leave with the next step."""
        self._ended = False
        self._received = False
        """Something came when it was last looked."""

    def run(self, up: EngineUp) -> None:
        """Serve until told to shut down, or until the parent is gone.

        Raises:
            OSError: the parent went away in the middle of an answer.
            Exception: a step failed, or the device's context is lost: nothing that the engine holds can be trusted.
        """
        listen(self._turn_to)
        self._send(up)
        while not self._ended:
            busy = bool(self._parts) or self._engine.has_work
            pins = self._pins is not None and self._pins.waiting and not busy and not self._loads.any
            self._receive(0 if busy or pins else self._idle_s())
            if pins and not self._received and self._pins is not None:
                self._slate.write(Doing.OBEYING)
                self._pins.pin_one()
            if self._parts:
                self._slate.write(Doing.OBEYING)
                self._place(self._parts.popleft())
            if (self._engine.has_work or self._refused) and not self._ended:
                self._step()

    def _idle_s(self) -> float | None:
        """How long there is nothing to do if nothing comes; None: for ever."""
        due_s = self._engine.due_s
        return None if due_s is None else max(0.0, due_s - self._clock.monotonic_s())

    def _receive(self, wait_s: float | None) -> None:
        """Read and obey everything that has arrived; wait so long for the first of it."""
        self._received = False
        self._slate.write(Doing.WAITING)
        while select.select([self._connection], [], [], wait_s)[0]:
            wait_s, self._received = 0, True
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                self._ended = True
                return
            for command in self._buffer.feed(data):
                self._slate.obey()
                self._obey(command)
            self._slate.write(Doing.WAITING)

    def _obey(self, command: ToEngine) -> None:
        match command:
            case LoadStage():
                self._load(command)
            case PlacePart():
                self._parts.append(command)
            case UnloadStage():
                self._unload(command.instance_id)
                self._send(StageUnloaded(instance_id=command.instance_id))
            case Run():
                self._add(command)
            case Abort():
                self._engine.abort(command.request_id, command.attempt)
            case Promote():
                pass  # It is the engine already.
            case Shutdown():
                self._ended = True

    def _load(self, command: LoadStage) -> None:
        try:
            room = self._loads.begin(command)
        except Exception as error:  # noqa: BLE001 - a stage that cannot be loaded must not take the others with it
            _raise_if_lost(error)
            self._fail(command.instance_id, error)
            return
        self._prefills.begin(command.instance_id)
        if command.stage == command.model.spec.whole:
            self._send(StageOpened(instance_id=command.instance_id, kv_capacity_tokens=room.kv_capacity_tokens))

    def _place(self, command: PlacePart) -> None:
        if command.instance_id not in self._loads:
            return  # The load failed, or was called off, after this was sent.
        try:
            loaded = self._loads.place(command)
        except Exception as error:  # noqa: BLE001 - as above
            _raise_if_lost(error)
            self._fail(command.instance_id, error)
            return
        if loaded is not None:
            placed_s = max((phase.end_s for phase in loaded.phases), default=self._clock.monotonic_s())
            self._prefills.loaded(command.instance_id, placed_s)
            self._send(loaded)

    def _unload(self, instance_id: InstanceId) -> None:
        self._loads.drop(instance_id)
        self._prefills.drop(instance_id)
        self._engine.drop(instance_id)

    def _fail(self, instance_id: InstanceId, error: Exception) -> None:
        code, message = _told(error)
        log.error("stage failed", action="stage_failed", instance_id=instance_id, code=code, exc_info=error)
        self._unload(instance_id)
        self._send(StageFailed(instance_id=instance_id, code=code, message=message))

    def _add(self, command: Run) -> None:
        command_sent_s = departed_s(command.sent, moment_of(self._clock))
        is_first = self._prefills.sent(command.instance_id, command.request_id, command_sent_s)
        if is_first and self._faults.delay_s("prefill") > 0:
            start_s = self._clock.monotonic_s()
            pause_blocking(self._faults.delay_s("prefill"))
            self._prefills.delayed(command.instance_id, self._loads.ran(command.instance_id, start_s))
        try:
            self._engine.add(
                command.request_id,
                command.attempt,
                command.instance_id,
                command.prompt_ids,
                command.output_ids,
                command.sampling,
                None if command.deadline_in_s is None else command_sent_s + command.deadline_in_s,
                vocabulary=command.vocabulary,
            )
        except Exception as error:  # noqa: BLE001 - what one request does to the engine's door must not end the others
            _raise_if_lost(error)
            code, message = _told(error)
            self._refused.append(_refusal_of(command, code, message))

    def _step(self) -> None:
        """One batch. What it raises ends the process: the engine's books cannot be trusted after it."""
        self._slate.write(Doing.OBEYING)
        pause_blocking(self._faults.delay_s("step"))
        start_s = self._clock.monotonic_s()
        self._slate.write(Doing.STEPPING)
        result = self._engine.step()
        if result.turn_of is not None:
            self._prefills.ran(result.turn_of, self._loads.ran(result.turn_of, start_s))
        # What comes after the first token of a stage is not that token's work.
        sampled_s = min((first.end_s for first in result.first_prefills), default=self._clock.monotonic_s())
        for first in result.first_prefills:
            self._send(self._prefills.ended(first))
        refused, self._refused = self._refused, []
        self._send(
            StepDone(
                produced=[*refused, *(_message_of(produced) for produced in result.produced)],
                waiting=result.waiting,
                running=result.running,
                kv_free_tokens=result.kv_free_tokens,
                step_time_s=result.step_time_s,
                kv_used_tokens=result.kv_used_tokens,
                kv_cached_tokens=result.kv_cached_tokens,
                batch_tokens=result.batch_tokens,
                prefix_looked_up_tokens=result.prefix_looked_up_tokens,
                prefix_hit_tokens=result.prefix_hit_tokens,
                preemptions=result.preemptions,
                sampled=Moment(at_s=sampled_s, wall_offset_s=wall_offset_s(self._clock)),
                turn_of=result.turn_of,
            )
        )

    def _turn_to(self, doing: Doing, instance_id: InstanceId, tokens: int) -> None:
        """The engine's word, from within a step."""
        last, self._batch_tokens = self._batch_tokens, tokens
        self._slate.write(doing, max(last, tokens), mark_of(instance_id))

    def _send(self, message: FromEngine) -> None:
        self._slate.write(Doing.TELLING)
        self._connection.sendall(frame(message))


def last_words(connection: socket.socket, error: Exception) -> None:
    """Tell the parent why nothing more comes.

    Raises:
        OSError: the parent is gone, too.
    """
    code, message = _told(error)
    # A parent that reads nothing must not keep it.
    connection.settimeout(LAST_WORDS_S)
    connection.sendall(frame(EngineFault(code=code, message=message)))


def _raise_if_lost(error: Exception) -> None:
    """Raise an error after which the process can do nothing more on its device."""
    if context_lost(error):
        raise error


def _told(error: Exception) -> tuple[str, str]:
    """Code and sentence for the worker."""
    match error:
        case EngineError():
            return _code_of(error.code), error.message
        case PilotlightError():
            return error.code, error.message
        case _:
            return EngineFailedError.code, f"{type(error).__name__}: {error}"


def _code_of(engine_code: str) -> str:
    """What the taxonomy calls it: a gateway takes a code that it does not know for one that trying again can help."""
    return _CODES.get(engine_code, engine_code)


def _refusal_of(command: Run, code: str, message: str) -> Produced:
    return Produced(
        request_id=command.request_id,
        attempt=command.attempt,
        position=len(command.output_ids),
        token_ids=[],
        logprobs=None,
        finish=FinishReason.ERROR,
        code=code,
        message=message,
    )


def _message_of(produced: results.Produced) -> Produced:
    return Produced(
        request_id=produced.request_id,
        attempt=produced.attempt,
        position=produced.position,
        token_ids=list(produced.token_ids),
        logprobs=None if produced.logprobs is None else list(produced.logprobs),
        finish=produced.finish,
        code=_code_of(produced.code),
        message=produced.message,
        top_logprobs=None if produced.top_logprobs is None else [list(top) for top in produced.top_logprobs],
    )
