"""One stage that the engine holds, from its first part to its unloading."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pilotlight.engine.core.admission import check_request
from pilotlight.engine.core.batch import Plan
from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockPool
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchLimits, BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.parameters import Parameters, Source
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.engine.device.sampler import Draw, Drawn, sample
from pilotlight.engine.errors import BadRequest, DeadlinePassed, EngineError, EngineFailed, NoRoom, UnknownInstance
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.results import FirstPrefill, PlacedPart, Produced, StageRoom
from pilotlight.policy.types import Dtype, FinishReason, InstanceId, ModelSpec, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep:
    """What one forward pass of a stage gave."""

    plan: Plan
    produced: tuple[Produced, ...]
    first_prefill: FirstPrefill | None


class ResidentStage:
    """Owns a stage's parameters, its KV cache and the requests on it."""

    def __init__(
        self, instance_id: InstanceId, spec: ModelSpec, stage: Stage, dtype: Dtype, device_bytes: int, limits: BatchLimits
    ) -> None:
        if stage.stop > spec.num_layers:
            raise BadRequest(f"the model has {spec.num_layers} layers, so none of [{stage.start}, {stage.stop})")
        decoder = decoder_of(spec)
        self.spec = spec
        self._instance_id = instance_id
        self._stage = stage
        self._parameters = Parameters(decoder, stage, dtype)
        self.room = _divide(self._parameters, spec.kv_bytes_per_token(stage, dtype), device_bytes)
        num_blocks = self.room.kv_capacity_tokens // BLOCK_TOKENS
        self._runner = RangeRunner(decoder, stage, self._parameters, KvCache(spec, stage, dtype, num_blocks))
        # An instance is one model in one dtype: its name tells contents apart, also between the stages that share it.
        tables = BlockTables(BlockPool(num_blocks), instance_id, prefix_cache=limits.prefix_cache)
        self.scheduler = BatchScheduler(tables, limits)
        self._has_sampled = False

    def place(self, part: int, tensors: Mapping[str, Source], monotonic_s: Callable[[], float]) -> PlacedPart:
        """Copies one part's tensors to their place; see ``Parameters.place``."""
        return self._parameters.place(part, tensors, monotonic_s)

    def check(self, request: Request) -> None:
        """Refuses a request that this stage cannot serve.

        Raises:
            UnknownInstance: the stage is not a whole model, or not all of it is in place.
            BadRequest, NoRoom: the request can never be served; see ``check_request``.
        """
        if self._stage != self.spec.whole:
            raise UnknownInstance(f"only layers [{self._stage.start}, {self._stage.stop}) of {self._instance_id} are here")
        if not self._parameters.complete:
            raise UnknownInstance(f"{self._instance_id} is still loading")
        check_request(self.spec, self.room.kv_capacity_tokens, request)

    def step(self, monotonic_s: Callable[[], float]) -> StageStep:
        """Runs one batch and samples."""
        plan = self.scheduler.schedule(monotonic_s())
        logits = self._runner.run(plan.batch, torch.tensor(plan.token_ids))
        self.scheduler.advance(plan)
        drawn = sample(logits, [Draw(request.sampling, request.position) for request in plan.sampled])
        sampled_s = monotonic_s()
        produced = tuple(self._hand_out(request, token) for request, token in zip(plan.sampled, drawn, strict=True))
        first = next((request for request, token in zip(plan.sampled, drawn, strict=True) if token is not None), None)
        return StageStep(plan=plan, produced=produced, first_prefill=self._first_prefill(first, sampled_s))

    def cancel(self, request: Request) -> Produced:
        """Ends a request at once, wherever it stands."""
        self.scheduler.end(request, RequestEvent.DROP)
        return ended(request, FinishReason.CANCELLED)

    def expire(self, now_s: float) -> tuple[Produced, ...]:
        """Ends the requests whose deadline has passed."""
        overdue = self.scheduler.overdue(now_s)
        for request in overdue:
            self.scheduler.end(request, RequestEvent.DROP)
        return tuple(
            ended(request, FinishReason.ERROR, DeadlinePassed(f"the deadline passed after {request.position} output tokens"))
            for request in overdue
        )

    def _hand_out(self, request: Request, drawn: Drawn | None) -> Produced:
        """Gives a request its token, and ends it if that was the last."""
        if drawn is None:
            self.scheduler.end(request, RequestEvent.FINISH)
            return ended(
                request, FinishReason.ERROR, EngineFailed(f"the logits of output token {request.position} are not finite")
            )
        self.scheduler.vouch(request)
        position = request.position
        finish = request.accept(drawn.token_id)
        if finish is not None:
            self.scheduler.end(request, RequestEvent.FINISH)
        kept = () if finish is FinishReason.STOP else (drawn,)
        return Produced(
            request_id=request.key.request_id,
            attempt=request.key.attempt,
            position=position,
            token_ids=tuple(token.token_id for token in kept),
            logprobs=tuple(token.logprob for token in kept if token.logprob is not None) if request.sampling.logprobs else None,
            finish=finish,
        )

    def _first_prefill(self, first: Request | None, sampled_s: float) -> FirstPrefill | None:
        """The record of the stage's first token, once."""
        if first is None or self._has_sampled:
            return None
        self._has_sampled = True
        return FirstPrefill(
            instance_id=self._instance_id, request_id=first.key.request_id, start_s=first.taken_s, end_s=sampled_s
        )


def ended(request: Request, finish: FinishReason, error: EngineError | None = None) -> Produced:
    """The last word on a request that gets no token with it."""
    return Produced(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        position=request.position,
        finish=finish,
        code=error.code if error else "",
        message=error.message if error else "",
    )


def _divide(parameters: Parameters, kv_bytes_per_token: int, device_bytes: int) -> StageRoom:
    """Gives the KV cache what the parameters leave.

    Raises:
        NoRoom: that is less than one block.
    """
    room_tokens = (device_bytes - parameters.size_bytes) // kv_bytes_per_token
    if room_tokens < BLOCK_TOKENS:
        needed_bytes = parameters.size_bytes + BLOCK_TOKENS * kv_bytes_per_token
        raise NoRoom(f"the stage needs at least {needed_bytes} bytes for parameters and one KV block; {device_bytes} are given")
    return StageRoom(
        parts=parameters.parts,
        parameter_bytes=parameters.size_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_capacity_tokens=room_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
    )
