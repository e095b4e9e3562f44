"""An engine that computes nothing: it answers with a profile's timing and with tokens that follow from the seed and all before them.

Hundreds of them run in one process, for load and failure tests of everything around them. A grammar is refused: tokens without a
meaning cannot follow one, and an answer that only looks as if it did would deceive a test.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from pilotlight.common.clock import Clock, moment_of, wall_offset_s
from pilotlight.common.errors import BadRequest, DeadlineExceeded, EngineFailed, NotLoaded
from pilotlight.common.faults import Faults
from pilotlight.common.messages.engine import (
    Abort,
    EngineUp,
    LoadStage,
    PlacePart,
    Prefilled,
    Produced,
    Run,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.common.waiting import cancel_all, pause, woken
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.types import FinishReason, InstanceId, Phase, PhaseName
from pilotlight.worker.engine_client import EngineDied, EngineEvent
from pilotlight.worker.requests import RequestKey

MAX_BATCH = 64
"""Requests that advance in one step; the others wait."""
MAX_EVENTS = 1024
"""Events that wait to be worked on; past it the engine waits."""
NO_GRAMMAR = (
    "a simulated worker makes tokens without a meaning, which follow no grammar; leave out what the answer must look like, or run the "
    "model on workers that compute"
)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimProfile:
    """What a simulated device takes for its work."""

    load_bytes_per_s: float
    prefill_tokens_per_s: float
    decode_step_s: float


@dataclass(slots=True, kw_only=True)
class _Stage:
    command: LoadStage
    placed: set[int] = field(default_factory=set[int])
    phases: list[Phase] = field(default_factory=list[Phase])
    ready: bool = False
    prefilled: bool = False

    @property
    def kv_capacity_tokens(self) -> int:
        model, stage = self.command.model, self.command.stage
        room_bytes = self.command.device_bytes - model.device_bytes(stage)
        return max(0, room_bytes // model.spec.kv_bytes_per_token(stage, model.dtype))


@dataclass(slots=True)
class SimTokens:
    """The tokens of one request on every simulated engine: each is a hash of the seed and of all tokens before it.

    So a request that is resumed with another prompt, other output, another seed or at another position gives other tokens.
    """

    state: int
    vocab_size: int

    @classmethod
    def after(cls, seed: int, token_ids: Iterable[int], vocab_size: int) -> "SimTokens":
        """Those that follow the prompt and the output so far."""
        tokens = cls(_mix(seed), vocab_size)
        for token_id in token_ids:
            tokens.take(token_id)
        return tokens

    def next(self) -> tuple[int, float]:
        """The next token and its log probability; ``take`` it to go on."""
        drawn = _mix(self.state)
        return drawn % self.vocab_size, -(drawn >> 40) / (1 << 24)

    def take(self, token_id: int) -> None:
        """This token comes next."""
        self.state = _mix(self.state + token_id + 1)


def _mix(value: int) -> int:
    """SplitMix64."""
    mixed = (value + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


@dataclass(slots=True, kw_only=True)
class _Request:
    run: Run
    position: int
    deadline_s: float
    tokens: SimTokens | None = None
    """Set when its prompt has been worked on."""


class SimEngine:
    """``EngineClient`` without a process and without computation."""

    def __init__(self, profile: SimProfile, clock: Clock, faults: Faults | None = None) -> None:
        self._profile = profile
        self._clock = clock
        self._faults = faults or Faults()
        self._events: asyncio.Queue[EngineEvent | None] = asyncio.Queue(MAX_EVENTS)
        self._stages: dict[InstanceId, _Stage] = {}
        self._parts: deque[PlacePart] = deque()
        self._requests: dict[RequestKey, _Request] = {}
        self._ended: list[Produced] = []
        self._wake = asyncio.Event()
        self._turning: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._turning is not None

    async def start(self) -> EngineUp:
        if self._turning is None:
            self._turning = asyncio.create_task(self._turn_for_ever(), name="simulated engine")
        return EngineUp(pid=os.getpid(), device_name="sim", load_bytes_per_s=self._profile.load_bytes_per_s)

    async def load_stage(self, command: LoadStage) -> None:
        self._check()
        stage = _Stage(command=command)
        if stage.kv_capacity_tokens == 0:
            message = f"{command.device_bytes} bytes hold no KV beside the parameters"
            await self._say(StageFailed(instance_id=command.instance_id, code="no_room", message=message))
            return
        self._stages[command.instance_id] = stage
        if command.stage == command.model.spec.whole:
            await self._say(StageOpened(instance_id=command.instance_id, kv_capacity_tokens=stage.kv_capacity_tokens))

    async def place_part(self, command: PlacePart) -> None:
        self._check()
        self._parts.append(command)
        self._wake.set()

    async def unload_stage(self, command: UnloadStage) -> None:
        self._check()
        stage = self._stages.pop(command.instance_id, None)
        for key, request in list(self._requests.items()):
            if request.run.instance_id == command.instance_id and stage is not None and stage.ready:
                self._end(key, FinishReason.CANCELLED)
            elif request.run.instance_id == command.instance_id:
                self._end(key, FinishReason.ERROR, NotLoaded.code, f"{command.instance_id} was given up before it was loaded")
        await self._say(StageUnloaded(instance_id=command.instance_id))

    async def run(self, command: Run) -> None:
        self._check()
        key = RequestKey(command.request_id, command.attempt)
        left_s = math.inf if command.deadline_in_s is None else command.deadline_in_s
        deadline_s = departed_s(command.sent, moment_of(self._clock)) + left_s
        self._requests[key] = _Request(run=command, position=len(command.output_ids), deadline_s=deadline_s)
        stage = self._stages.get(command.instance_id)
        if stage is None or stage.command.stage != stage.command.model.spec.whole:
            self._end(key, FinishReason.ERROR, NotLoaded.code, f"{command.instance_id} is not held here")
        elif command.sampling.grammar is not None:
            self._end(key, FinishReason.ERROR, BadRequest.code, NO_GRAMMAR)
        self._wake.set()

    async def abort(self, command: Abort) -> None:
        self._check()
        key = RequestKey(command.request_id, command.attempt)
        if key in self._requests:
            self._end(key, FinishReason.CANCELLED)

    async def events(self) -> AsyncIterator[EngineEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def kill(self, reason: str, code: str = EngineFailed.code) -> None:
        if await self._still():
            await self._say(EngineDied(reason=reason, code=code or EngineFailed.code))

    async def stop(self) -> None:
        await self._still()
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)

    async def _still(self) -> bool:
        turning, self._turning = self._turning, None
        if turning is None:
            return False
        await cancel_all((turning,))
        self._stages.clear()
        self._parts.clear()
        self._requests.clear()
        self._ended.clear()
        return True

    async def _turn_for_ever(self) -> None:
        while True:
            if self._parts:
                await self._place(self._parts.popleft())
            if self._runnable() or self._ended:
                await self._step()
            elif not self._parts:
                await self._idle()

    async def _idle(self) -> None:
        """Until a command comes, or the deadline of a request that waits for parts has passed."""
        due_s = min((request.deadline_s for request in self._requests.values()), default=math.inf)
        self._wake.clear()
        if due_s == math.inf:
            await self._wake.wait()
        elif not await woken(self._wake, max(0.0, due_s - self._clock.monotonic_s())):
            self._expire(self._clock.monotonic_s())

    def _runnable(self) -> list[tuple[RequestKey, _Request]]:
        """Requests of stages that are loaded: nothing is computed here, so nothing of them runs before."""
        return [(key, request) for key, request in self._requests.items() if self._stages[request.run.instance_id].ready]

    async def _place(self, command: PlacePart) -> None:
        stage = self._stages.get(command.instance_id)
        if stage is None or stage.ready or command.part in stage.placed:
            return
        start_s = self._clock.monotonic_s()
        if not stage.placed:
            await self._faults.delay("load")
        await _take(stage.command.model.spec.part_bytes[command.part] / self._profile.load_bytes_per_s)
        stage.placed.add(command.part)
        stage.phases.append(self._phase(PhaseName.LOAD, start_s))
        if self._stages.get(command.instance_id) is not stage:
            return
        if stage.placed.issuperset(stage.command.model.spec.parts_of(stage.command.stage)):
            stage.ready = True
            await self._say(
                StageLoaded(
                    instance_id=command.instance_id,
                    phases=tuple(stage.phases),
                    kv_capacity_tokens=stage.kv_capacity_tokens,
                )
            )

    async def _step(self) -> None:
        """One batch: the prompts of its new requests, then a token for each."""
        start_s = self._clock.monotonic_s()
        self._expire(start_s)
        batch = self._runnable()[:MAX_BATCH]
        fresh = [request for _, request in batch if request.tokens is None]
        prompt_tokens = sum(len(request.run.prompt_ids) + len(request.run.output_ids) for request in fresh)
        if batch:
            if any(not self._stages[request.run.instance_id].prefilled for request in fresh):
                await self._faults.delay("prefill")
            await _take(self._profile.decode_step_s + prompt_tokens / self._profile.prefill_tokens_per_s)
        for request in fresh:
            await self._first(request, start_s)
        # Aborted while time passed: no token any more.
        produced = [self._advance(key, request) for key, request in batch if key in self._requests]
        ended, self._ended = self._ended, []
        waiting = len(self._requests) - len(self._runnable()[:MAX_BATCH])
        await self._say(
            StepDone(
                produced=[*ended, *produced],
                waiting=waiting,
                running=len(self._requests) - waiting,
                kv_free_tokens=self._kv_free_tokens(),
                step_time_s=self._clock.monotonic_s() - start_s,
                kv_used_tokens=self._kv_used_tokens(),
                batch_tokens=prompt_tokens + len(batch) - len(fresh),
                sampled=moment_of(self._clock),
            )
        )

    def _expire(self, now_s: float) -> None:
        for key, request in list(self._requests.items()):
            if now_s >= request.deadline_s:
                message = f"the deadline passed after {request.position} output tokens"
                self._end(key, FinishReason.ERROR, DeadlineExceeded.code, message)

    async def _first(self, request: _Request, start_s: float) -> None:
        run, stage = request.run, self._stages.get(request.run.instance_id)
        if stage is None:
            return
        vocab_size = stage.command.model.spec.vocab_size
        request.tokens = SimTokens.after(run.sampling.seed, (*run.prompt_ids, *run.output_ids), vocab_size)
        if not stage.prefilled:
            stage.prefilled = True
            phase = self._phase(PhaseName.PREFILL, start_s)
            await self._say(Prefilled(instance_id=run.instance_id, request_id=run.request_id, phase=phase))

    def _advance(self, key: RequestKey, request: _Request) -> Produced:
        sampling, spec = request.run.sampling, self._stages[request.run.instance_id].command.model.spec
        assert request.tokens is not None
        token_id, logprob = request.tokens.next()
        request.tokens.take(token_id)
        position, stops = request.position, not sampling.ignore_eos and token_id in sampling.stop_token_ids
        request.position += not stops
        total = len(request.run.prompt_ids) + request.position
        full = request.position >= sampling.max_tokens or total >= spec.max_context_tokens
        if stops or full:
            del self._requests[key]
        return Produced(
            request_id=key.request_id,
            attempt=key.attempt,
            position=position,
            token_ids=[] if stops else [token_id],
            logprobs=([] if stops else [logprob]) if sampling.logprobs else None,
            finish=FinishReason.STOP if stops else FinishReason.LENGTH if full else None,
        )

    def _kv_free_tokens(self) -> int:
        capacity = sum(stage.kv_capacity_tokens for stage in self._stages.values() if stage.ready)
        return max(0, capacity - self._kv_used_tokens())

    def _kv_used_tokens(self) -> int:
        return sum(len(request.run.prompt_ids) + request.position for request in self._requests.values())

    def _end(self, key: RequestKey, finish: FinishReason, code: str = "", message: str = "") -> None:
        request = self._requests.pop(key)
        self._ended.append(
            Produced(
                request_id=key.request_id,
                attempt=key.attempt,
                position=request.position,
                token_ids=[],
                logprobs=None,
                finish=finish,
                code=code,
                message=message,
            )
        )
        self._wake.set()

    def _phase(self, name: PhaseName, start_s: float) -> Phase:
        end_s = self._clock.monotonic_s()
        return Phase(
            name=name, start_s=start_s, end_s=end_s, wall_offset_s=wall_offset_s(self._clock), process="worker", detail="sim"
        )

    async def _say(self, event: EngineEvent) -> None:
        await self._events.put(event)

    def _check(self) -> None:
        if self._turning is None:
            raise EngineFailed("the engine is not running")


async def _take(seconds: float) -> None:
    """Let simulated work pass; what takes no time at all still lets others have their turn."""
    await pause(max(0.0, seconds))
