"""The facade: what the worker's engine child calls, in one thread, one call at a time."""

from collections.abc import Callable, Mapping, Sequence

import torch

from pilotlight.engine.core.request import Request, RequestKey
from pilotlight.engine.core.scheduler import BatchLimits
from pilotlight.engine.device.parameters import Source
from pilotlight.engine.errors import BadCheckpoint, BadRequest, UnknownInstance
from pilotlight.engine.resident import ResidentStage, ended
from pilotlight.engine.results import PlacedPart, Produced, StageRoom, StepResult
from pilotlight.policy.types import Dtype, FinishReason, InstanceId, ModelSpec, RequestId, Sampling, Stage


class Engine:
    """Any number of resident stages on one CPU device.

    ::

        begin_load ─> place_part (each part) ─> add / abort / step ... ─> unload

    Refusals are raised where they are made. What was added ends in exactly one ``Produced`` with a finish, from some later
    ``step``.
    """

    def __init__(self, threads: int, monotonic_s: Callable[[], float], limits: BatchLimits | None = None) -> None:
        """Takes the process over for torch: the number of threads is a setting of the process, not of this object."""
        torch.set_num_threads(threads)
        self._monotonic_s = monotonic_s
        self._limits = limits or BatchLimits()
        self._stages: dict[InstanceId, ResidentStage] = {}
        """The one whose turn is longest ago comes first."""
        self._ended: list[Produced] = []
        """Ends that no forward pass brought about; the next step reports them."""

    @property
    def has_work(self) -> bool:
        """A step would do or report something."""
        return bool(self._ended) or any(stage.scheduler.has_work for stage in self._stages.values())

    def begin_load(self, instance_id: InstanceId, spec: ModelSpec, stage: Stage, dtype: Dtype, device_bytes: int) -> StageRoom:
        """Sets up a stage whose parts follow, and says how its bytes are divided.

        Raises:
            UnsupportedModel: no decoder runs it.
            NoRoom: ``device_bytes`` do not hold its parameters and one KV block.
            BadRequest: the instance is held already, or the model has no such stage.
        """
        if instance_id in self._stages:
            raise BadRequest(f"{instance_id} is held already")
        resident = ResidentStage(instance_id, spec, stage, dtype, device_bytes, self._limits)
        self._stages[instance_id] = resident
        return resident.room

    def place_part(self, instance_id: InstanceId, part: int, tensors: Mapping[str, Source]) -> PlacedPart:
        """Copies one part out of the given buffers, which are not needed after the call. The last part makes the stage ready.

        Raises:
            BadCheckpoint: the tensors are not those that the architecture has in this part. The stage can never be ready: its
                memory is free, and it is held no longer.
            UnknownInstance: no such load began, or it failed before.
            BadRequest: the stage has no such part. It stays as it is.
        """
        resident = self._resident(instance_id)
        try:
            return resident.place(part, tensors, self._monotonic_s)
        except BadCheckpoint:
            self.unload(instance_id)
            raise

    def unload(self, instance_id: InstanceId) -> None:
        """Frees a stage. Requests on it end as cancelled. An instance that is not held is as free as it can be."""
        resident = self._stages.pop(instance_id, None)
        if resident is not None:
            self._ended.extend(resident.cancel(request) for request in resident.scheduler.requests)

    def add(
        self,
        request_id: RequestId,
        attempt: int,
        instance_id: InstanceId,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: Sampling,
        deadline_s: float | None = None,
    ) -> None:
        """Queues a request.

        Args:
            request_id: whose tokens these are.
            attempt: another attempt at the same request is another request here.
            instance_id: the model that runs it.
            prompt_ids: at least one token.
            output_ids: what another engine sampled already: positions go on after them.
            sampling: how tokens are drawn.
            deadline_s: on the engine's clock. The first step after it ends the request with the error ``deadline_exceeded``.

        Raises:
            UnknownInstance: no whole model of this name is ready here.
            BadRequest: the request makes no sense, has no room in the model's context, or is here already.
            NoRoom: it can never fit into the instance's KV cache.
        """
        key = RequestKey(request_id, attempt)
        if self._find(key) is not None:
            raise BadRequest(f"request {request_id}, attempt {attempt}, is here already")
        resident = self._resident(instance_id)
        request = Request(key, prompt_ids, output_ids, sampling, resident.spec.max_context_tokens, deadline_s)
        resident.check(request)
        if request.exhausted:
            # Resumed after its last token, which its finish did not follow in time.
            self._ended.append(ended(request, FinishReason.LENGTH))
        else:
            resident.scheduler.submit(request)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Cancels a request; nothing, if it has ended: it may have done so while the abort was on its way."""
        if found := self._find(RequestKey(request_id, attempt)):
            resident, request = found
            self._ended.append(resident.cancel(request))

    def step(self) -> StepResult:
        """Ends what is overdue, runs one batch of the stage whose turn it is, and reports what ended since the last step."""
        start_s = self._monotonic_s()
        produced, self._ended = self._ended, []
        for stage in self._stages.values():
            produced.extend(stage.expire(start_s))
        resident = self._take_turn()
        done = resident.step(self._monotonic_s) if resident is not None else None
        if done is not None:
            produced.extend(done.produced)
        plan = done.plan if done is not None else None
        schedulers = [stage.scheduler for stage in self._stages.values()]
        return StepResult(
            produced=tuple(produced),
            waiting=sum(scheduler.waiting for scheduler in schedulers),
            running=sum(scheduler.running for scheduler in schedulers),
            kv_free_tokens=sum(scheduler.kv_free_tokens for scheduler in schedulers),
            step_time_s=self._monotonic_s() - start_s,
            first_prefills=(done.first_prefill,) if done is not None and done.first_prefill else (),
            kv_used_tokens=sum(scheduler.kv_used_tokens for scheduler in schedulers),
            kv_cached_tokens=sum(scheduler.kv_cached_tokens for scheduler in schedulers),
            batch_tokens=plan.batch.num_tokens if plan else 0,
            prefix_looked_up_tokens=plan.prefix_looked_up_tokens if plan else 0,
            prefix_hit_tokens=plan.prefix_hit_tokens if plan else 0,
            preemptions=plan.preempted if plan else 0,
        )

    def _take_turn(self) -> ResidentStage | None:
        """The stage with work whose turn is longest ago. One model a step: its tokens need not wait for another's batch."""
        for instance_id, resident in self._stages.items():
            if resident.scheduler.has_work:
                self._stages[instance_id] = self._stages.pop(instance_id)
                return resident
        return None

    def _resident(self, instance_id: InstanceId) -> ResidentStage:
        resident = self._stages.get(instance_id)
        if resident is None:
            raise UnknownInstance(f"{instance_id} is not held here")
        return resident

    def _find(self, key: RequestKey) -> tuple[ResidentStage, Request] | None:
        for resident in self._stages.values():
            request = resident.scheduler.find(key)
            if request is not None:
                return resident, request
        return None
