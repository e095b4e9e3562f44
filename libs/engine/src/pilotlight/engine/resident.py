"""One stage that the engine holds, from its first part to its unloading."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.channel.channel import Channel
from pilotlight.engine.compute import GraphPlan, compute_on
from pilotlight.engine.core.admission import check_request
from pilotlight.engine.core.batch import Batch, Plan
from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockPool
from pilotlight.engine.core.lifecycle import RequestEvent, RequestState
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.engine.device.copying import Source
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Early, Following, Parameters
from pilotlight.engine.device.sampler import SampledToken
from pilotlight.engine.errors import (
    BadRequest,
    DeadlinePassed,
    EngineError,
    OutOfDeviceMemory,
    UnknownInstance,
)
from pilotlight.engine.lookahead import LaunchedStep, launch_step, may_follow
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline_protocol import Pipeline, StageStep
from pilotlight.engine.results import FirstPrefill, GrownStage, PlacedPart
from pilotlight.engine.room import divide
from pilotlight.engine.sampling import (
    Outcome,
    ended,
    give,
    sample_requests,
    wait_for_late,
)
from pilotlight.engine.under_way import UnderWay, token_ids_of
from pilotlight.engine.watching import stepping
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.request import FinishReason


class ResidentStage:
    """Owns a stage's parameters, its KV cache and the requests on it.

    A whole model takes requests from the beginning. Until every part is in place, one batch is
    under way: it runs as far as parts are in place, and goes on with the next ones::

        parts   [ embedding | layer 0 | layer 1 )[ layer 2 | ... | head ]
                  in place                         on their way
        batch   [ has run ......................)^ next_layer
    """

    def __init__(
        self,
        instance_id: InstanceId,
        spec: ModelSpec,
        stage: Stage,
        dtype: Dtype,
        device_bytes: int,
        limits: BatchLimits,
        arena: Arena,
        slot: int | None = None,
        plan: GraphPlan | None = None,
        *,
        may_grow: bool = False,
        early: Early | None = None,
    ) -> None:
        if stage.stop > spec.num_layers:
            raise BadRequest(
                f"the model has {spec.num_layers} layers, so none of [{stage.start}, {stage.stop})"
            )
        decoder = decoder_of(spec)
        self.spec = spec
        self.instance_id = instance_id
        self.stage = stage
        """The layers that it runs."""
        self.target: Stage | None = None
        """The longer range that it is to have, while parts or KV of that are missing
        (``extension``)."""
        self.target_bytes = 0
        self.target_vouched = False
        """As ``vouched``, of that range."""
        self.dtype = dtype
        self.pipeline: Pipeline | None = None
        self.vouched = False
        """Its parts were whole when they were copied (``Engine.vouch``)."""
        self.room = divide(arena, decoder, stage, dtype, device_bytes, may_grow=may_grow)
        self.memory = StageMemory(arena, decoder, stage, dtype, slot)
        self.parameters = Parameters(self.memory)
        try:
            self.kv = KvCache(self.memory, self.num_blocks)
            # Behind what maps most: that and copies wait for each other. Before all else.
            self.parameters.order(early.first() if early else {})
            self.compute = compute_on(self.memory, self.parameters, self.kv, plan)
        except (EngineError, torch.OutOfMemoryError):
            self.parameters.close()
            self.memory.close()
            raise
        self.parameters.meanwhile = self.compute.rehearse
        self.parameters.behind_last = lambda: self.compute.arriving(len(self.scheduler.requests))
        self.parameters.order(early.come() if early else {})
        self.sample = self.compute.sample
        # One model in one dtype: its name tells contents apart, also between its stages.
        self.tables = BlockTables(
            BlockPool(self.num_blocks), instance_id, prefix_cache=limits.prefix_cache
        )
        self.scheduler = BatchScheduler(self.tables, limits, whole_prompts=spec.encoder is not None)
        self._has_sampled = False
        self._under_way: UnderWay | None = None
        self._launched: LaunchedStep | None = None
        """The lookahead: a batch whose tokens are not known yet."""

    def place(
        self,
        part: int,
        tensors: Mapping[str, Source],
        monotonic_s: Callable[[], float],
        following: Following | None = None,
        *,
        background: bool = False,
    ) -> PlacedPart:
        """As ``Parameters.place``."""
        return self.parameters.place(part, tensors, monotonic_s, following, background=background)

    @property
    def complete(self) -> bool:
        """Every part of the layers that it runs is in place."""
        placed, own = self.parameters, self.spec.parts_of(self.stage)
        return placed.complete or (self.target is not None and all(one in placed for one in own))

    @property
    def has_work(self) -> bool:
        """A step would do something. It does nothing while all that is wanted are parts."""
        if self.pipeline is not None:
            return self.pipeline.has_work
        if not self.scheduler.has_work:
            return False
        batch = self._going()
        return self.reach > (batch.next_layer if batch is not None else 0)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended, its own or those of the stage that leads."""
        return len(self.scheduler.requests) + (self.pipeline.in_flight if self.pipeline else 0)

    @property
    def serves(self) -> bool:
        """It is a whole model, or leads the connected stages of one."""
        return self.stage == self.spec.whole or (self.pipeline is not None and self.pipeline.leads)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """To and from other stages."""
        return self.pipeline.channels if self.pipeline else ()

    @property
    def grows(self) -> bool:
        """It serves, and parts of a longer range come beside."""
        return self.target is not None and self.pipeline is not None

    @property
    def grown(self) -> GrownStage:
        """What is told of a stage that has its longer range."""
        return GrownStage(
            instance_id=self.instance_id,
            stage=self.target or self.stage,
            kv_capacity_tokens=self.scheduler.kv_capacity_tokens,
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks of the stage."""
        return self.room.kv_capacity_tokens // BLOCK_TOKENS

    def close(self) -> None:
        """Gives the memory back; the stage is of no use any more."""
        if self.pipeline is not None:
            self.pipeline.close()
        try:
            self.parameters.close()
            self.compute.close()
        finally:
            self.memory.close()

    def check(self, request: Request) -> None:
        """Refuses a request that this stage cannot serve, and expects any other.

        Raises:
            UnknownInstance: the stage is not a whole model, which it must be to score a prompt.
            BadRequest, NoRoom: the request can never be served; see ``check_request``.
        """
        if not self.serves:
            raise UnknownInstance(
                f"only layers [{self.stage.start}, {self.stage.stop}) of {self.instance_id} are here"
            )
        if (request.scores or request.pooled) is not None and self.pipeline is not None:
            raise UnknownInstance("prompts are read by whole models; this stage leads a pipeline")
        check_request(self.spec, self.scheduler.kv_capacity_tokens, request)
        self.compute.expect(len(request.token_ids))

    def step(self, monotonic_s: Callable[[], float], *, may_wait: bool = False) -> StageStep:
        """Runs one batch, as far as parts are in place, and samples at its end; in a pipeline, see
        ``Pipeline.step``.
        """
        if self.pipeline is not None:
            return self.pipeline.step(monotonic_s, may_wait=may_wait)
        launched, self._launched = self._launched, None
        if launched is not None:
            return self._go_on(launched, monotonic_s, may_wait=may_wait)
        # Before the batch is taken: whether one is under way says how far another may go.
        reach, batch, self._under_way = self.reach, self._going(), None
        if batch is None:
            plan = self.scheduler.schedule(monotonic_s())
            if not plan.requests:
                wait_for_late(self.scheduler.requests)
                return StageStep(plan=plan)
            batch = UnderWay(plan, token_ids_of(plan), 0)
        plan = batch.plan
        began_s = monotonic_s() if self.compute.launch is not None else 0.0
        outputs = self.run(plan.batch, batch.inputs, Stage(batch.next_layer, reach))
        if reach < self.spec.num_layers:
            self._under_way = UnderWay(plan, outputs, reach)
            return StageStep()
        if self.compute.launch is not None and all(
            request.state is RequestState.RUNNING for request in plan.requests
        ):
            launched = launch_step(plan, outputs, self.compute.launch, under_way=())
            if launched is not None:
                launched = launched.begun(began_s, self.scheduler.promises.pace)
                return self._go_on(launched, monotonic_s, may_wait=may_wait)
        self.scheduler.advance(plan)
        # Some may have ended while the batch waited for parts: what their rows give is dropped.
        left = [
            row for row, request in enumerate(plan.sampled) if request.state is RequestState.RUNNING
        ]
        requests = tuple(plan.sampled[row] for row in left)
        whole = len(left) == len(outputs)
        logits = outputs if whole else outputs[torch.tensor(left, dtype=torch.int64)]
        sampled = sample_requests(logits, requests, self.sample)
        return self.hand_out(plan, requests, sampled, monotonic_s())

    def relieve(self) -> StageStep:
        """After a batch that the device had no memory for: ends the request with most to run, since
        it may run elsewhere.

        Of the batch nothing is booked, so the others are where they were. Nothing, where none ran.
        """
        self._under_way = self._launched = None
        running = [
            request for request in self.scheduler.requests if request.state is RequestState.RUNNING
        ]
        if self.pipeline is not None or not running:
            return StageStep()
        largest = max(
            reversed(running), key=lambda request: len(request.token_ids) - request.computed
        )
        why = f"the device has no memory for a batch of {len(running)} requests"
        return StageStep(produced=(self.cancel(largest, OutOfDeviceMemory(why)),))

    def rest_s(self, now_s: float) -> float:
        """How long a step would do nothing but wait for the device, while others may come; 0: it is
        time for it.
        """
        launched = self._launched
        return launched.rest_s(now_s) if launched is not None and self._has_sampled else 0.0

    def _go_on(
        self, launched: LaunchedStep, monotonic_s: Callable[[], float], *, may_wait: bool
    ) -> StageStep:
        """Hands out what a batch gave, after starting the next one if nothing else can want the
        device meanwhile; nothing yet, where that is better planned later. The stage's first token
        waits for no other batch.
        """
        launch = self.compute.launch if may_wait and self._has_sampled else None
        if launch is not None:
            now_s = monotonic_s()
            if launched.rest_s(now_s):
                self._launched = launched
                return StageStep()
            following = self.scheduler.follow_on(launched.plan, now_s, may_follow, launched.ends_s)
            if following is not None:
                logits = self.run(following.batch, launched.inputs_of(following))
                under_way = frozenset(launched.plan.sampled)
                self._launched = launch_step(following, logits, launch, under_way=under_way)
        finished, ended_s = launched.wait(), monotonic_s()
        if self._launched is not None:
            self._launched = self._launched.begun(ended_s, self.scheduler.promises.pace)
        self.scheduler.advance(finished.plan)
        done = self.hand_out(finished.plan, finished.requests, finished.sampled, ended_s)
        return replace(done, began_s=launched.since_s)

    @property
    def reach(self) -> int:
        """Its layers before this one can run; a model's last runs with the head, and waits for it,
        too. A prompt alone that has one graph waits for all.
        """
        layers = () if self.complete else range(self.stage.start, self.stage.stop)
        parts = ((layer, self.spec.parts_of(Stage(layer, layer + 1))) for layer in layers)
        waiting = (
            layer for layer, need in parts if any(one not in self.parameters for one in need)
        )
        requests = self.scheduler.requests
        if layers and self._going() is None and len(requests) == 1:
            (request,) = requests
            if self.compute.expect(len(request.token_ids)):
                return self.stage.start
        return next(waiting, self.stage.stop)

    def _going(self) -> UnderWay | None:
        """The batch under way, unless all of its requests have ended."""
        batch = self._under_way
        alive = batch is not None and any(
            request.state is RequestState.RUNNING for request in batch.plan.requests
        )
        return batch if alive else None

    def forget_batch(self) -> None:
        """Drops the batch under way, of which nothing is booked: its blocks may move."""
        self._under_way = None

    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """Runs any range of the stage's layers; see ``RangeRunner.run``."""
        stepping(self.instance_id, batch.num_tokens)
        return self.compute.runner.run(batch, inputs, layers or self.stage)

    def hand_out(
        self,
        plan: Plan | None,
        requests: Sequence[Request],
        sampled: Sequence[Outcome],
        sampled_s: float,
    ) -> StageStep:
        """Gives requests what was sampled for them.

        Args:
            plan: what this turn ran; None: it only took tokens of an earlier one.
            requests: those that sampled.
            sampled: what came of each of them, in order.
            sampled_s: when, on the engine's clock.
        """
        given = [
            give(self.scheduler, request, outcome, sampled_s)
            for request, outcome in zip(requests, sampled, strict=True)
        ]
        produced = tuple(one for one in given if one is not None)
        first = next(
            (
                request
                for request, outcome in zip(requests, sampled, strict=True)
                if isinstance(outcome, SampledToken)
            ),
            None,
        )
        return StageStep(
            plan=plan, produced=produced, first_prefill=self._first_prefill(first, sampled_s)
        )

    def cancel(self, request: Request, error: EngineError | None = None) -> Produced:
        """Ends a request at once, wherever it stands; with ``error``, for that, otherwise because
        it was asked for.
        """
        self.scheduler.end(request, RequestEvent.DROP)
        return ended(request, FinishReason.ERROR if error else FinishReason.CANCELLED, error)

    def expire(self, now_s: float) -> tuple[Produced, ...]:
        """Ends the requests whose deadline has passed."""
        overdue = self.scheduler.overdue(now_s)
        for request in overdue:
            self.scheduler.end(request, RequestEvent.DROP)
        return tuple(
            ended(
                request,
                FinishReason.ERROR,
                DeadlinePassed(f"the deadline passed after {request.position} output tokens"),
            )
            for request in overdue
        )

    def _first_prefill(self, first: Request | None, sampled_s: float) -> FirstPrefill | None:
        """The record of the stage's first token, once."""
        if first is None or self._has_sampled:
            return None
        self._has_sampled = True
        return FirstPrefill(
            instance_id=self.instance_id,
            request_id=first.key.request_id,
            start_s=first.taken_s,
            end_s=sampled_s,
            tokens=len(first.token_ids) - 1,
        )
