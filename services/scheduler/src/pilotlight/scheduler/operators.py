"""Answers operators: warm a model, evict a model. The ticks do both (``OperatorRequests``)."""

import asyncio
from dataclasses import dataclass

from pilotlight.common.clock import Clock
from pilotlight.common.errors import ModelNotFound
from pilotlight.common.messages.demand import Evict, Evicting, Warm, Warming
from pilotlight.common.telemetry import current_traceparent
from pilotlight.policy.instance import SERVING
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.operator_requests import OperatorRequests
from pilotlight.scheduler.world import World


@dataclass(slots=True, kw_only=True)
class Operators:
    """Serves what operators ask, for one term."""

    requests: OperatorRequests
    book: Book
    world: World
    clock: Clock
    wake: asyncio.Event
    """Set when a decision may come out differently."""

    async def warm(self, ask: Warm) -> Warming:
        """Serve ``WARM_SUBJECT``.

        Raises:
            ModelNotFound: no model of that name is registered.
            NoRoom: it cannot be started now.
        """
        model = self.world.models.get(ask.model)
        if model is None:
            raise ModelNotFound(f"no model is named {ask.model}")
        now_s = self.clock.monotonic_s()
        drained = self.world.draining_since_s
        known = [
            record.instance
            for record in self.book.books.of_model(ask.model)
            if record.instance.digest == model.digest
            and not any(placement.node_id in drained for placement in record.instance.placements)
        ]
        serving = [instance for instance in known if instance.state in SERVING]
        if serving:
            return Warming(instance_id=serving[0].instance_id)
        self.requests.warm(ask.model, ask.trace_parent or current_traceparent(), now_s)
        if known:
            return Warming(instance_id=known[0].instance_id)
        planned = self.requests.planned(ask.model)
        self.wake.set()
        return Warming(instance_id=await planned)

    async def evict(self, ask: Evict) -> Evicting:
        """Serve ``EVICT_SUBJECT``.

        Raises:
            ModelNotFound: no model of that name is registered, and no instance of it is left.
        """
        left = any(entry.instance.model == ask.model for entry in self.book.rows())
        if ask.model not in self.world.models and not left:
            raise ModelNotFound(f"no model is named {ask.model}")
        evicted = self.requests.evict(ask.model)
        self.wake.set()
        return Evicting(instance_ids=await evicted)
