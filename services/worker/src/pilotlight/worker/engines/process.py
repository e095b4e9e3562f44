"""The engine as a child process, over a Unix socketpair.

A busy Python thread beside a step of a few milliseconds doubles it; a busy process does not. A
crash in native code ends the child alone: this side notices at once, because the socket closes with
the last process that has it.
"""

import asyncio
from collections.abc import AsyncIterator

import structlog

from pilotlight.common.clock import Clock, SystemClock, moment_of
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import DeadlineExceeded, EngineFailed, PilotlightError
from pilotlight.common.messages.codec import read_frame, write_frame
from pilotlight.common.messages.engine import (
    Abort,
    EngineFault,
    EngineUp,
    EventFrame,
    LeaveRoom,
    LoadStage,
    PlacePart,
    ResizeStage,
    Run,
    Shutdown,
    StepDone,
    ToEngine,
    UnloadStage,
)
from pilotlight.common.messages.pipelines import (
    CallOffExtend,
    ConnectStage,
    ExtendStage,
    OpenDoor,
    RenameStage,
    VouchStage,
)
from pilotlight.common.waiting import cancel_all, within
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.hang import Patience
from pilotlight.policy.phase import Moment
from pilotlight.worker.engines.child_ahead import ChildAhead
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.child_process import (
    Child,
    begun,
    bury,
    end_ahead,
    kill_group,
    said_of,
    with_process,
)
from pilotlight.worker.engines.client import EngineDied, EngineEvent
from pilotlight.worker.engines.event_queue import EventQueue
from pilotlight.worker.engines.hang_watch import HangWatch
from pilotlight.worker.engines.spare import Spare

log = structlog.get_logger()

START_DEADLINE_S = 60.0
"""Importing torch from a cold disk takes most of it."""
CUDA_START_DEADLINE_S = 240.0
"""On a new machine native code and kernels are compiled, too."""
COMMAND_DEADLINE_S = 300.0
"""For handing a command over. A child reads between two steps, however long those are; one that
hangs is found earlier."""
STOP_DEADLINE_S = 3.0
LET_GO_S = 1.0
"""A child that is killed and has its socket then is stuck in the driver: it is left to itself."""
MAX_EVENTS = 1024
"""Events that wait to be worked on; past it the child waits."""


class ProcessEngine:
    """``EngineClient`` whose engine is ``python -m pilotlight.worker.engine_main``."""

    def __init__(
        self,
        options: ChildOptions,
        spare: Spare | None = None,
        *,
        patience: Patience | None = None,
        clock: Clock | None = None,
        ahead: ChildAhead | None = None,
    ) -> None:
        self._options = options
        self._spare = spare
        self._ahead = ahead
        """The first child, if it was started before this."""
        self._patience = patience or Patience()
        self._clock = clock or SystemClock()
        self._watching: asyncio.Task[None] | None = None
        self._sent = 0
        """Commands to this child."""
        self._events = EventQueue(MAX_EVENTS)
        self._child: Child | None = None
        self._up: EngineUp | None = None
        self._reading: asyncio.Task[None] | None = None
        self._kill_reason = ""
        """Why this child was killed, or is to be while it is started."""
        self._kill_code = ""
        self._stopping = False
        self._renewing = False
        """The child ends because another is to take its place: that is no death."""
        self._starting = asyncio.Lock()
        self._start_deadline_s = (
            CUDA_START_DEADLINE_S if options.device is DeviceKind.CUDA else START_DEADLINE_S
        )

    @property
    def alive(self) -> bool:
        return self._up is not None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._child.process.pid if self._child else None

    @property
    def pids(self) -> frozenset[int]:
        """Those of the child and of its spare."""
        spare_pid = self._spare.pid if self._spare is not None else None
        return frozenset(pid for pid in (self.pid, spare_pid) if pid is not None)

    async def start(self) -> EngineUp:
        async with self._starting:
            if self._up is not None:
                return self._up
            # Before anything is waited for: from here on a kill means the child that is being
            # started.
            self._kill_reason = self._kill_code = ""
            if self._reading is not None:
                await self._reading
            self._check_wanted()
            spare = await self._spare.take() if self._spare is not None else None
            if spare is not None:
                try:
                    return await self._begin(spare)
                except EngineFailed as error:
                    log.warning(
                        "the spare engine does not start",
                        action="spare_start_failed",
                        error=error.message,
                    )
            self._check_wanted()
            began_s = self._clock.monotonic_s()
            ahead, self._ahead = self._ahead, None
            try:
                child = await begun(self._options, ahead)
            except OSError as error:
                raise EngineFailed(f"the engine cannot be started: {error}") from error
            up = await self._begin(child)
            self._up = up = with_process(up, self._clock.monotonic_s() - began_s)
            return up

    def _check_wanted(self) -> None:
        """The engine is still wanted, as it was when the start began.

        Raises:
            EngineFailed: the engine was stopped for good, or killed: no child may be started in the
                place of this one.
        """
        if self._stopping:
            raise EngineFailed("the engine was stopped for good")
        if self._kill_reason:
            raise EngineFailed(f"it was killed: {self._kill_reason}")

    async def _begin(self, child: Child) -> EngineUp:
        """The child says that it is up, or is buried."""
        self._child = child
        watch = self._begin_to_watch(child)
        try:
            # There was no child to be killed while it was taken or spawned.
            self._check_wanted()
            starting = read_frame(child.reader, EventFrame)
            told: EventFrame | None = await within(
                self._start_deadline_s, starting, "the engine's start"
            )
            first = told.message if told is not None else None
            self._check_wanted()
        except PilotlightError as error:
            kill_group(child.process)
            await self._bury(child)
            raise EngineFailed(
                f"the engine did not start: {error.message}. See {self._options.log_path}."
            ) from error
        except OSError:
            first = None
        if not isinstance(first, EngineUp):
            # Not killed: what it has to say of its end is still to be written to its log.
            status = await self._bury(child)
            reason = (
                first.message
                if isinstance(first, EngineFault)
                else watch.verdict or f"it ended with status {status}"
            )
            raise EngineFailed(f"the engine did not start: {reason}. See {self._options.log_path}.")
        self._up = first
        self._reading = asyncio.create_task(self._read(child, watch), name="engine events")
        log.info("engine started", action="engine_started", **said_of(first))
        if self._spare is not None:
            self._spare.keep()
        return first

    def _begin_to_watch(self, child: Child) -> HangWatch:
        self._sent = 0
        watch = HangWatch(
            child.process.pid,
            child.slate,
            self._clock,
            sent=lambda: self._sent,
            on_cores=self._options.device is DeviceKind.CPU,
            patience=self._patience,
        )
        self._watching = asyncio.create_task(_end_when_hung(child, watch), name="hanging engine")
        return watch

    async def load_stage(self, command: LoadStage, sent: Moment | None = None) -> None:
        await self._send(command, sent)

    async def place_part(self, command: PlacePart, ready: Moment | None = None) -> None:
        await self._send(command, ready)

    async def unload_stage(self, command: UnloadStage) -> None:
        await self._send(command)

    async def open_door(self, command: OpenDoor) -> None:
        await self._send(command)

    async def connect_stage(self, command: ConnectStage) -> None:
        await self._send(command)

    async def extend_stage(self, command: ExtendStage) -> None:
        await self._send(command)

    async def vouch_stage(self, command: VouchStage) -> None:
        await self._send(command)

    async def call_off_extend(self, command: CallOffExtend) -> None:
        await self._send(command)

    async def rename_stage(self, command: RenameStage) -> None:
        await self._send(command)

    async def resize_stage(self, command: ResizeStage) -> None:
        await self._send(command)

    async def leave_room(self, command: LeaveRoom) -> None:
        await self._send(command)

    async def run(self, command: Run) -> None:
        await self._send(command)

    def run_soon(self, command: Run) -> bool:
        child = self._child
        if child is None or self._up is None or child.writer.transport.get_write_buffer_size():
            return False
        try:
            write_frame(child.writer, Timed(command, moment_of(self._clock)))
        except OSError:
            return False
        self._sent += 1
        return True

    async def abort(self, command: Abort) -> None:
        await self._send(command)

    def events(self) -> AsyncIterator[Timed[EngineEvent]]:
        return self._events.events()

    def steps_now(self) -> list[Timed[StepDone]]:
        return self._events.steps_now()

    async def kill(self, reason: str, code: str = "") -> None:
        self._kill_reason, self._kill_code = reason, code
        if self._child is not None:
            _kill(self._child)

    async def renew(self) -> None:
        """Put a new child in the place of this one, which holds nothing; nobody hears of its end.

        Raises:
            EngineFailed: the new one does not start; ``EngineDied`` follows.
        """
        child, reading = self._child, self._reading
        self._renewing = True
        try:
            if child is not None and reading is not None:
                await self._ask_to_end(child)
                _kill(child)
                await reading
        finally:
            self._renewing = False
        try:
            await self.start()
        except EngineFailed as error:
            await self._events.put(Timed(EngineDied(reason=error.message)))
            raise

    async def stop(self) -> None:
        self._stopping = True
        child, reading = self._child, self._reading
        if self._spare is not None:
            await self._spare.stop()
        if self._ahead is not None:
            await end_ahead(self._ahead)
        if child is not None:
            if self._up is not None:
                await self._ask_to_end(child)
            # Also one that has ended: what it started may have its socket still.
            _kill(child)
        if reading is not None:
            self._reading = None
            # Its reader of events may have left already: what waits is of no use then.
            self._events.clear()
            await reading
        async with self._starting:
            pass  # The start that makes a child buries it.
        self._events.end()

    async def _ask_to_end(self, child: Child) -> None:
        try:
            write_frame(child.writer, Timed(Shutdown()))
            await within(STOP_DEADLINE_S, child.process.wait(), "the engine's end")
        except (DeadlineExceeded, OSError):
            log.warning(
                "engine killed: it did not end in time",
                action="engine_stop_killed",
                pid=child.process.pid,
            )

    async def _send(self, command: ToEngine, sent: Moment | None = None) -> None:
        child = self._child
        if child is None or self._up is None:
            raise EngineFailed("the engine is not running")
        try:
            write_frame(child.writer, Timed(command, sent or moment_of(self._clock)))
            # Not before it is a frame: what is too large for one is never taken, and must not be
            # waited for.
            self._sent += 1
            await within(
                COMMAND_DEADLINE_S, child.writer.drain(), "handing a command to the engine"
            )
        except DeadlineExceeded as error:
            await self.kill(f"it took no command for {COMMAND_DEADLINE_S:g} s")
            raise EngineFailed(error.message) from error
        except OSError as error:
            raise EngineFailed(f"the engine is gone: {error}") from error

    async def _read(self, child: Child, watch: HangWatch) -> None:
        """Pass frames on until the child ends, whichever way, and say so."""
        reason, code = "", EngineFailed.code
        try:
            while (told := await read_frame(child.reader, EventFrame)) is not None:
                event = told.message
                if isinstance(event, EngineFault):
                    reason, code = event.message, event.code
                else:
                    watch.heard(event)
                    await self._events.put(told)
        except PilotlightError as error:
            reason = error.message
        except OSError as error:
            reason = str(error)
        # Taken now: while it is buried the next start may begin, whose kill is another.
        reason, code = self._kill_reason or watch.verdict or reason, self._kill_code or code
        hung = bool(watch.verdict) and not self._kill_reason
        status = await self._bury(child)
        if self._stopping or self._renewing:
            return
        reason = reason or f"it ended with status {status}"
        log.error(
            "engine ended", action="engine_died", pid=child.process.pid, reason=reason, code=code
        )
        await self._events.put(Timed(EngineDied(reason=reason, code=code, hung=hung)))

    async def _bury(self, child: Child) -> int | None:
        self._up = None
        self._child = None
        if self._watching is not None:
            await cancel_all((self._watching,))
        return await bury(child)


async def _end_when_hung(child: Child, watch: HangWatch) -> None:
    verdict = await watch.until_hung()
    log.error("the engine hangs", action="engine_hung", pid=child.process.pid, reason=verdict)
    _kill(child)


def _kill(child: Child) -> None:
    """Kill a child.

    One that is stuck in the driver keeps its socket, and what was not sent: it is left to itself,
    and so is that.
    """
    kill_group(child.process)
    asyncio.get_running_loop().call_later(LET_GO_S, child.writer.transport.abort)
