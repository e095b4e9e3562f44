"""The requests of a simulated engine, and the ends that its next step tells."""

import math
from collections import Counter
from collections.abc import Mapping

from pilotlight.common.errors import DeadlineExceeded, NotLoaded
from pilotlight.common.messages.engine import Produced
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.request import FinishReason, RequestKey
from pilotlight.worker.engines.sim_request import SimRequest
from pilotlight.worker.engines.sim_stage import SimStage

Batch = list[tuple[RequestKey, SimRequest]]


class SimRequests:
    """Requests that have not ended, oldest first.

    Sums are kept and not made: a step of an engine that takes no time costs little else.
    """

    def __init__(self, stages: Mapping[InstanceId, SimStage]) -> None:
        """Has none yet; ``stages`` are the engine's, which they run on."""
        self._requests: dict[RequestKey, SimRequest] = {}
        self._stages = stages
        self._held_tokens = Counter[InstanceId]()
        """Tokens of an instance's requests."""
        self._counts = Counter[InstanceId]()
        self._due_s = math.inf
        """No deadline is before it."""
        self.ended: list[Produced] = []
        """Ends beside a step; the next step tells them."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def add(self, key: RequestKey, request: SimRequest) -> None:
        """A new one."""
        instance_id = request.run.instance_id
        self._requests[key] = request
        self._counts[instance_id] += 1
        self._held_tokens[instance_id] += request.held_tokens
        self._due_s = min(self._due_s, request.deadline_s)

    def leave(self, key: RequestKey) -> SimRequest | None:
        """Forget one, and return it."""
        request = self._requests.pop(key, None)
        if request is not None:
            instance_id = request.run.instance_id
            self._counts[instance_id] -= 1
            self._held_tokens[instance_id] -= request.held_tokens
            if not self._counts[instance_id]:
                del self._counts[instance_id], self._held_tokens[instance_id]
        return request

    @property
    def runnable(self) -> Batch:
        """Requests of stages that are loaded: nothing is computed here, so nothing of them runs
        before.
        """
        return [
            (key, request)
            for key, request in self._requests.items()
            if self._stages[request.run.instance_id].ready
        ]

    def batch(self, at_most: int) -> Batch:
        """Those that advance next: oldest first, as far as the KV of their stages goes.

        The first one of a stage does in any case, and none overtakes one that has no room.
        """
        if self.all_fit(at_most):
            return list(self._requests.items())
        left = {
            instance_id: stage.kv_capacity_tokens for instance_id, stage in self._stages.items()
        }
        full = set[InstanceId]()
        taken: Batch = []
        for key, request in self.runnable:
            instance_id = request.run.instance_id
            begun = left[instance_id] < self._stages[instance_id].kv_capacity_tokens
            if instance_id in full or (begun and request.held_tokens > left[instance_id]):
                full.add(instance_id)
                continue
            left[instance_id] -= request.held_tokens
            taken.append((key, request))
            if len(taken) == at_most:
                break
        return taken

    def waiting(self, at_most: int) -> int:
        """How many the next batch leaves out."""
        return 0 if self.all_fit(at_most) else len(self) - len(self.batch(at_most))

    def all_fit(self, at_most: int) -> bool:
        """Every request advances with the next batch."""
        if len(self._requests) > at_most:
            return False
        for instance_id, tokens in self._held_tokens.items():
            stage = self._stages[instance_id]
            if not stage.ready or tokens > stage.kv_capacity_tokens:
                return False
        return True

    def steps_that_fit(self, at_most: int) -> int:
        """Steps of all requests, of which none ends, before ``all_fit`` has to be asked again."""
        if not self._counts or not self.all_fit(at_most):
            return 0
        stages, held = self._stages, self._held_tokens
        return 1 + min(
            [
                (stages[instance_id].kv_capacity_tokens - held[instance_id]) // count
                for instance_id, count in self._counts.items()
            ]
        )

    def end_beyond(self, instance_id: InstanceId, kv_capacity_tokens: int) -> bool:
        """Ends those of a stage that have more tokens than it has room for; whether there were
        any.
        """
        keys = [
            key
            for key, request in self._requests.items()
            if request.run.instance_id == instance_id and request.held_tokens > kv_capacity_tokens
        ]
        for key in keys:
            message = f"{instance_id} gives KV back: the request goes on elsewhere"
            self.end(key, FinishReason.ERROR, NotLoaded.code, message)
        return bool(keys)

    @property
    def any_runnable(self) -> bool:
        """Some request is."""
        return any(self._stages[instance_id].ready for instance_id in self._counts)

    @property
    def due_s(self) -> float:
        """The next deadline."""
        return min((request.deadline_s for request in self._requests.values()), default=math.inf)

    @property
    def kv_capacity_tokens(self) -> int:
        """Room of the stages that are loaded."""
        return sum([stage.kv_capacity_tokens for stage in self._stages.values() if stage.ready])

    @property
    def kv_used_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self._held_tokens.values())

    def advance(self, batch: Batch) -> list[Produced]:
        """The next token of each that is still here, and its end if it is the last one."""
        given: list[Produced] = []
        requests, stages, held_tokens = self._requests, self._stages, self._held_tokens
        for key, request in batch:
            if key not in requests:
                continue
            instance_id = request.run.instance_id
            produced = request.advance(stages[instance_id].model.spec)
            if produced.token_ids:
                held_tokens[instance_id] += 1
            if produced.finish is not None:
                self.leave(key)
            given.append(produced)
        return given

    def advance_together(self, batch: Batch, at_most: int) -> list[tuple[Produced, ...]]:
        """Steps of a batch one after the other, as long as none of them ends a request."""
        if at_most < 1 or any(key not in self._requests for key, _ in batch):
            return []
        coming = [request.coming(at_most) for _, request in batch]
        steps = min(map(len, coming))
        if not steps:
            return []
        for _, request in batch:
            self._held_tokens[request.run.instance_id] += steps
        given = [
            request.advance_by(token_ids[:steps])
            for (_, request), token_ids in zip(batch, coming, strict=True)
        ]
        return list(zip(*given, strict=True))

    def end(self, key: RequestKey, finish: FinishReason, code: str = "", message: str = "") -> None:
        """End a request that is here.

        Args:
            key: The request.
            finish: How it ends.
            code: Of the error, if it ends with one.
            message: The error's.
        """
        request = self.leave(key)
        assert request is not None, "it is here"
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
        if now_s < self._due_s:
            return
        overdue = [key for key, request in self._requests.items() if now_s >= request.deadline_s]
        for key in overdue:
            message = f"the deadline passed after {self._requests[key].position} output tokens"
            self.end(key, FinishReason.ERROR, DeadlineExceeded.code, message)
        self._due_s = self.due_s

    def end_all(self, instance_id: InstanceId, *, loaded: bool) -> bool:
        """Ends those of a stage that is given up; whether there were any."""
        keys = [
            key for key, request in self._requests.items() if request.run.instance_id == instance_id
        ]
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
        self._requests.clear()
        self._held_tokens.clear()
        self._counts.clear()
        self.ended.clear()
