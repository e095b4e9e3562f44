"""Gateways: requests go to the instance of their model with the fewest, or wait for one."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.model import Model
from pilotlight.policy.request import Demand
from pilotlight.sim.cluster.engine import Engine, Request


@dataclass(slots=True)
class Gateway:
    """All gateways as one."""

    models: Mapping[ModelName, Model]
    max_batch: int
    """Requests that an instance takes at once."""
    came: Callable[[InstanceId], None]
    """An instance got a request."""
    waits: Callable[[], None]
    """A request waits."""
    waiting: dict[ModelName, deque[Request]] = field(
        default_factory=dict[ModelName, "deque[Request]"]
    )
    since_s: dict[ModelName, float] = field(default_factory=dict[ModelName, float])
    """Since when requests wait for a model."""
    _routes: dict[ModelName, dict[InstanceId, Engine]] = field(
        default_factory=dict[ModelName, dict[InstanceId, Engine]]
    )

    def submit(self, request: Request, now_s: float) -> None:
        """Send a request where there is room, else keep it."""
        if request.model in self.waiting or not self._send(request):
            self.waiting.setdefault(request.model, deque()).append(request)
            self.since_s.setdefault(request.model, now_s)
            self.waits()

    def serve(self, model: ModelName, instance_id: InstanceId, engine: Engine) -> None:
        """An instance takes requests from now on."""
        self._routes.setdefault(model, {})[instance_id] = engine
        self.drain(model)

    def leave(self, model: ModelName, instance_id: InstanceId) -> None:
        """It takes none any more."""
        self._routes.get(model, {}).pop(instance_id, None)

    def again(self, requests: Iterable[Request], now_s: float) -> None:
        """Requests whose instance is gone go on elsewhere."""
        for request in requests:
            self.submit(request, now_s)

    def drain(self, model: ModelName) -> None:
        """Send what waits, the oldest first, as far as there is room."""
        queue = self.waiting.get(model)
        while queue and self._send(queue[0]):
            queue.popleft()
        if queue is not None and not queue:
            del self.waiting[model], self.since_s[model]

    def demand(self, now_s: float) -> tuple[Demand, ...]:
        """What waits, with the length of the oldest prompt, as gateways tell it."""
        return tuple(
            Demand(
                model=model,
                waiting=len(queue),
                oldest_age_s=now_s - queue[0].arrived_s,
                deadline_in_s=queue[0].arrived_s + self.models[model].slo.ttft_ms / 1000 - now_s,
                prompt_tokens=queue[0].prompt_tokens,
            )
            for model, queue in sorted(self.waiting.items())
        )

    def _send(self, request: Request) -> bool:
        routes = self._routes.get(request.model)
        if not routes:
            return False
        instance_id = min(routes, key=lambda one: (routes[one].in_flight, one))
        if routes[instance_id].in_flight >= self.max_batch:
            return False
        routes[instance_id].submit(request)
        self.came(instance_id)
        return True
