"""The requests of a simulated engine, and the ends that its next step tells."""

import math
from collections.abc import Mapping

from pilotlight.common.errors import DeadlineExceeded, NotLoaded
from pilotlight.common.messages.engine import Produced
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.request import FinishReason, RequestKey
from pilotlight.worker.engines.sim_request import SimRequest
from pilotlight.worker.engines.sim_stage import SimStage


class SimRequests(dict[RequestKey, SimRequest]):
    """Requests that have not ended, oldest first."""

    def __init__(self, stages: Mapping[InstanceId, SimStage]) -> None:
        """Has none yet; ``stages`` are the engine's, which they run on."""
        super().__init__()
        self._stages = stages
        self.ended: list[Produced] = []
        """Ends beside a step; the next step tells them."""

    @property
    def runnable(self) -> list[tuple[RequestKey, SimRequest]]:
        """Requests of stages that are loaded: nothing is computed here, so nothing of them runs
        before.
        """
        return [
            (key, request)
            for key, request in self.items()
            if self._stages[request.run.instance_id].ready
        ]

    @property
    def due_s(self) -> float:
        """The next deadline."""
        return min((request.deadline_s for request in self.values()), default=math.inf)

    @property
    def kv_free_tokens(self) -> int:
        """Room that is left on the stages that are loaded."""
        capacity = sum(stage.kv_capacity_tokens for stage in self._stages.values() if stage.ready)
        return max(0, capacity - self.kv_used_tokens)

    @property
    def kv_used_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(len(request.run.prompt_ids) + request.position for request in self.values())

    def advance(self, key: RequestKey, request: SimRequest) -> Produced:
        """The next token of a request, and its end if it is the last one."""
        produced = request.advance(self._stages[request.run.instance_id].model.spec)
        if produced.finish is not None:
            del self[key]
        return produced

    def end(self, key: RequestKey, finish: FinishReason, code: str = "", message: str = "") -> None:
        """End a request.

        Args:
            key: The request.
            finish: How it ends.
            code: Of the error, if it ends with one.
            message: The error's.
        """
        request = self.pop(key)
        self.ended.append(
            Produced(
                request_id=key.request_id,
                attempt=key.attempt,
                position=request.position,
                finish=finish,
                code=code,
                message=message,
            )
        )

    def expire(self, now_s: float) -> None:
        """Ends those whose deadline has passed."""
        for key, request in list(self.items()):
            if now_s >= request.deadline_s:
                message = f"the deadline passed after {request.position} output tokens"
                self.end(key, FinishReason.ERROR, DeadlineExceeded.code, message)

    def end_all(self, instance_id: InstanceId, *, loaded: bool) -> bool:
        """Ends those of a stage that is given up; whether there were any."""
        keys = [key for key, request in self.items() if request.run.instance_id == instance_id]
        for key in keys:
            if loaded:
                self.end(key, FinishReason.CANCELLED)
            else:
                message = f"{instance_id} was given up before it was loaded"
                self.end(key, FinishReason.ERROR, NotLoaded.code, message)
        return bool(keys)

    def take_ended(self) -> list[Produced]:
        """The ends that have not been told."""
        ended, self.ended = self.ended, []
        return ended

    def clear(self) -> None:
        """Forgets all requests, and the ends that have not been told."""
        super().clear()
        self.ended.clear()
