"""An engine that computes nothing: it answers with a profile's timing and with tokens that follow
from the seed and all before them.

Hundreds of them run in one process, for load and failure tests of everything around them. A grammar
is refused: tokens without a meaning cannot follow one, and an answer that only looks as if it did
would deceive a test.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

import structlog

from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import BadRequest, EngineFailed, NotLoaded
from pilotlight.common.faults import Faults
from pilotlight.common.messages.engine import (
    Abort,
    EngineUp,
    LeaveRoom,
    LoadStage,
    PlacePart,
    Prefilled,
    ResizeStage,
    RoomLeft,
    Run,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageRefused,
    StageResized,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.common.messages.pipelines import (
    CallOffExtend,
    ConnectStage,
    DoorOpened,
    ExtendStage,
    OpenDoor,
    RenameStage,
    StageConnected,
    VouchStage,
)
from pilotlight.common.phases import PhaseRecorder
from pilotlight.common.waiting import cancel_all, pause, woken
from pilotlight.policy.cost import EngineSpeed, part_load_s, step_s
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.phase import Moment, PhaseName
from pilotlight.policy.request import FinishReason, RequestKey
from pilotlight.worker.engines.client import EngineDied, EngineEvent
from pilotlight.worker.engines.event_queue import EventQueue
from pilotlight.worker.engines.sim_request import SimRequest
from pilotlight.worker.engines.sim_requests import SimRequests
from pilotlight.worker.engines.sim_stage import SimStage
from pilotlight.worker.engines.sim_steps import AT_ONCE, NO_TIME_S, SimSteps

log = structlog.get_logger()

MAX_EVENTS = 1024  # That wait to be worked on; past it the engine waits.
SIM_PORT = 1
"""Where a simulated engine says that it listens: nothing connects to it."""
NO_GRAMMAR = (
    "a simulated worker follows no grammar: leave out what the answer must look like, or use one "
    "that computes"
)


class SimEngine:
    """``EngineClient`` without a process and without computation."""

    def __init__(
        self,
        speed: EngineSpeed,
        clock: Clock,
        faults: Faults | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        """Is not started yet.

        Args:
            speed: what it takes for its work, by the cost model.
            clock: for the times that it tells.
            faults: what a test injects.
            at_once: requests that advance in one step.
        """
        self._speed = speed
        self._clock = clock
        self._faults = faults or Faults()
        self._phases = PhaseRecorder(clock, "worker", "sim")
        self._events = EventQueue(MAX_EVENTS)
        self._stages: dict[InstanceId, SimStage] = {}
        self._parts: deque[PlacePart] = deque()
        self._requests = SimRequests(self._stages)
        self._wake = asyncio.Event()
        self._turning: asyncio.Task[None] | None = None
        self._steps = SimSteps(self._requests, self._events, clock, at_once)

    @property
    def alive(self) -> bool:
        return self._turning is not None

    async def start(self) -> EngineUp:
        if self._turning is None:
            self._turning = asyncio.create_task(self._live(), name="simulated engine")
        return EngineUp(
            pid=os.getpid(), device_name="sim", load_bytes_per_s=self._speed.load_bytes_per_s
        )

    async def load_stage(self, command: LoadStage, sent: Moment | None = None) -> None:
        self._check()
        stage = SimStage.of(command)
        name = command.instance_id
        if stage.kv_capacity_tokens == 0:
            message = f"{command.device_bytes} bytes hold no KV beside the parameters"
            await self._say(StageFailed(instance_id=name, code="no_room", message=message))
            return
        self._stages[name] = stage
        if stage.serves:
            await self._open(name, stage)

    async def place_part(self, command: PlacePart, ready: Moment | None = None) -> None:
        self._check()
        self._parts.append(command)
        self._wake.set()

    async def unload_stage(self, command: UnloadStage) -> None:
        self._check()
        stage = self._stages.pop(command.instance_id, None)
        self._phases.drop(command.instance_id)
        loaded = stage is not None and stage.ready
        if self._requests.end_all(command.instance_id, loaded=loaded):
            self._wake.set()
        await self._say(StageUnloaded(instance_id=command.instance_id))

    async def open_door(self, command: OpenDoor) -> None:
        self._check()
        await self._say(DoorOpened(port=SIM_PORT))

    async def connect_stage(self, command: ConnectStage) -> None:
        """The other stages are taken to answer at once."""
        stage = await self._stage_of(command.instance_id)
        if stage is None:
            return
        stage.leads = stage.stage.start == 0
        await self._say(StageConnected(instance_id=command.instance_id))
        if stage.leads:
            await self._open(command.instance_id, stage)

    async def extend_stage(self, command: ExtendStage) -> None:
        stage = await self._stage_of(command.instance_id)
        if stage is None:
            return
        if (refusal := stage.refusal_of(command)) is not None:
            await self._refuse(command.instance_id, *refusal)
            return
        stage.extend(command)

    async def rename_stage(self, command: RenameStage) -> None:
        stage = await self._stage_of(command.instance_id)
        if stage is None:
            return
        self._stages[command.new_id] = self._stages.pop(command.instance_id)
        await self._say(stage.renamed(command))

    async def resize_stage(self, command: ResizeStage) -> None:
        self._check()
        name = command.instance_id
        if (stage := self._stages.get(name)) is None:
            await self._refuse(name, NotLoaded.code, f"{name} is not held here")
            return
        before, stage.device_bytes = stage.device_bytes, command.device_bytes
        capacity_tokens = stage.kv_capacity_tokens
        if capacity_tokens == 0:
            stage.device_bytes = before
            await self._refuse(name, "no_room", f"{command.device_bytes} bytes hold no KV")
            return
        if command.must and self._requests.end_beyond(name, capacity_tokens):
            self._wake.set()
        await self._say(StageResized(instance_id=name, kv_capacity_tokens=capacity_tokens))

    async def leave_room(self, command: LeaveRoom) -> None:
        """There is no memory that could be kept."""
        self._check()
        await self._say(RoomLeft(device_bytes=command.device_bytes))

    async def vouch_stage(self, command: VouchStage) -> None:
        """Nothing is copied here that might not be whole."""
        self._check()

    async def call_off_extend(self, command: CallOffExtend) -> None:
        self._check()
        name = command.instance_id
        stage = self._stages.get(name)
        self._phases.drop(name)
        if stage is None or stage.call_off():
            await self._refuse(name, command.code, command.message)
            return
        del self._stages[name]
        await self._say(StageFailed(instance_id=name, code=command.code, message=command.message))

    async def _stage_of(self, instance_id: InstanceId) -> SimStage | None:
        """A stage that is loaded; where there is none, that is said."""
        self._check()
        stage = self._stages.get(instance_id)
        if stage is None or not stage.ready:
            await self._refuse(instance_id, NotLoaded.code, f"{instance_id} is not held here")
            return None
        return stage

    async def _open(self, instance_id: InstanceId, stage: SimStage) -> None:
        await self._say(
            StageOpened(instance_id=instance_id, kv_capacity_tokens=stage.kv_capacity_tokens)
        )

    async def _refuse(self, instance_id: InstanceId, code: str, message: str) -> None:
        await self._say(StageRefused(instance_id=instance_id, code=code, message=message))

    async def run(self, command: Run) -> None:
        self._check()
        self._run(command)

    def run_soon(self, command: Run) -> bool:
        if alive := self.alive:
            self._run(command)
        return alive

    def _run(self, command: Run) -> None:
        key = RequestKey(command.request_id, command.attempt)
        if key in self._requests:
            raise ValueError(f"request {key} is here already: a worker accepts it once")
        left_s = math.inf if command.deadline_in_s is None else command.deadline_in_s
        deadline_s = self._clock.monotonic_s() + left_s
        request = SimRequest(run=command, position=len(command.output_ids), deadline_s=deadline_s)
        self._requests.add(key, request)
        stage = self._stages.get(command.instance_id)
        if stage is None or not stage.serves:
            self._end(
                key, FinishReason.ERROR, NotLoaded.code, f"{command.instance_id} is not held here"
            )
        elif command.sampling.grammar is not None:
            self._end(key, FinishReason.ERROR, BadRequest.code, NO_GRAMMAR)
        self._wake.set()

    async def abort(self, command: Abort) -> None:
        self._check()
        key = RequestKey(command.request_id, command.attempt)
        if key in self._requests:
            self._end(key, FinishReason.CANCELLED)

    def events(self) -> AsyncIterator[Timed[EngineEvent]]:
        return self._events.events()

    def steps_now(self) -> list[Timed[StepDone]]:
        return self._events.steps_now()

    async def kill(self, reason: str, code: str = EngineFailed.code) -> None:
        if await self._still():
            await self._say(EngineDied(reason=reason, code=code or EngineFailed.code))

    async def stop(self) -> None:
        await self._still()
        self._events.end()

    async def _still(self) -> bool:
        turning, self._turning = self._turning, None
        if turning is None:
            return False
        await cancel_all((turning,))
        self._forget()
        return True

    def _forget(self) -> None:
        for instance_id in self._stages:
            self._phases.drop(instance_id)
        self._stages.clear()
        self._parts.clear()
        self._requests.clear()

    async def _live(self) -> None:
        """Turn, and die as a process would of its own fault: its worker hears of it."""
        try:
            await self._turn_for_ever()
        except Exception as error:
            log.exception("a simulated engine failed", action="sim_engine_failed")
            self._turning = None
            self._forget()
            await self._say(EngineDied(reason=repr(error), code=EngineFailed.code))

    async def _turn_for_ever(self) -> None:
        while True:
            if self._parts:
                await self._place(self._parts.popleft())
            if self._requests.ended or self._requests.any_runnable:
                await self._step()
            elif not self._parts:
                await self._idle()

    async def _idle(self) -> None:
        """Until a command comes, or the deadline of a request that waits for parts has passed."""
        due_s = self._requests.due_s
        self._wake.clear()
        self._steps.rest()
        if due_s == math.inf:
            await self._wake.wait()
        elif not await woken(self._wake, max(0.0, due_s - self._clock.monotonic_s())):
            self._requests.expire(self._clock.monotonic_s())

    async def _place(self, command: PlacePart) -> None:
        stage = self._stages.get(command.instance_id)
        if stage is None or command.part in stage.placed:
            return
        start_s = self._clock.monotonic_s()
        if not stage.placed:
            await self._faults.delay("load")
        await pause(part_load_s(stage.model, command.part, self._speed.load_bytes_per_s))
        stage.placed.add(command.part)
        if self._stages.get(command.instance_id) is not stage:
            return
        self._phases.record(command.instance_id, PhaseName.LOAD, start_s)
        if not stage.complete:
            return
        if stage.target is not None:
            phases = tuple(self._phases.take(command.instance_id).phases)
            for event in stage.grow(command.instance_id, phases):
                await self._say(event)
            if stage.serves:
                await self._open(command.instance_id, stage)
        elif not stage.ready:
            stage.ready = True
            await self._say(
                StageLoaded(
                    instance_id=command.instance_id,
                    phases=tuple(self._phases.take(command.instance_id).phases),
                    kv_capacity_tokens=stage.kv_capacity_tokens,
                )
            )

    async def _step(self) -> None:
        """One batch: the prompts of its new requests, then a token for each."""
        requests = self._requests
        start_s = self._clock.monotonic_s()
        requests.expire(start_s)
        batch = requests.batch(self._steps.at_once)
        fresh = [request for _, request in batch if request.tokens is None]
        prompt_tokens = sum(
            [len(request.run.prompt_ids) + len(request.run.output_ids) for request in fresh]
        )
        if any(not self._stages[request.run.instance_id].prefilled for request in fresh):
            await self._faults.delay("prefill")
        seconds = step_s(self._speed, prompt_tokens) if batch else 0.0
        if batch:
            await self._steps.pass_time(seconds, len(batch))
        for request in fresh:
            await self._first(request, start_s)
        step = self._steps.end(batch, prompt_tokens, len(fresh), start_s)
        # Of first tokens it matters when they were there.
        await self._events.put(Timed(step, moment_of(self._clock) if fresh else None))
        if seconds < NO_TIME_S:
            self._steps.again(batch)

    async def _first(self, request: SimRequest, start_s: float) -> None:
        run, stage = request.run, self._stages.get(request.run.instance_id)
        if stage is None:
            return
        request.read_prompt(stage.model.spec.vocab_size)
        if not stage.prefilled:
            stage.prefilled = True
            self._phases.record(run.instance_id, PhaseName.PREFILL, start_s)
            *earlier, phase = self._phases.take(run.instance_id).phases
            name, asked, before = run.instance_id, run.request_id, tuple(earlier)
            phase = replace(phase, tokens=len(run.prompt_ids) + len(run.output_ids))
            told = Prefilled(instance_id=name, request_id=asked, phase=phase, earlier=before)
            await self._say(told)

    def _end(
        self, key: RequestKey, finish: FinishReason, code: str = "", message: str = ""
    ) -> None:
        self._requests.end(key, finish, code, message)
        self._wake.set()

    async def _say(self, event: EngineEvent) -> None:
        await self._events.put(Timed(event, moment_of(self._clock)))

    def _check(self) -> None:
        if self._turning is None:
            raise EngineFailed("the engine is not running")
