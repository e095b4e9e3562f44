"""Requests of operators to the leader: warm a model, evict a model. Each is kept until it is
done.
"""

import asyncio
from dataclasses import dataclass, field
from itertools import chain

from pilotlight.common.errors import PilotlightError
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.request import Demand

WARM_FOR_S = 600.0
"""A request to warm a model ends after this time, whether the model is ready or not."""


@dataclass(slots=True)
class _Warm:
    since_s: float
    trace_parent: str


@dataclass(slots=True)
class OperatorRequests:
    """The open requests of one term."""

    _warm: dict[ModelName, _Warm] = field(default_factory=dict[ModelName, _Warm])
    _planned: dict[ModelName, list[asyncio.Future[InstanceId]]] = field(
        default_factory=dict[ModelName, list[asyncio.Future[InstanceId]]]
    )
    _evict: dict[ModelName, list[asyncio.Future[tuple[InstanceId, ...]]]] = field(
        default_factory=dict[ModelName, list[asyncio.Future[tuple[InstanceId, ...]]]]
    )

    _closed: PilotlightError | None = None

    def warm(self, model: ModelName, trace_parent: str, now_s: float) -> None:
        """Count one request as waiting for the model, until it is ready."""
        self._warm.setdefault(model, _Warm(now_s, trace_parent))

    def warmed(self, model: ModelName) -> None:
        """The model is ready, evicted, or cannot be had: its request to warm it is over."""
        self._warm.pop(model, None)

    def planned(self, model: ModelName) -> asyncio.Future[InstanceId]:
        """The instance of the model's next start, or the error that prevents it.

        Raises:
            PilotlightError: the term is over.
        """
        self._check()
        future: asyncio.Future[InstanceId] = asyncio.get_running_loop().create_future()
        self._planned.setdefault(model, []).append(future)
        return future

    def settle_planned(
        self, model: ModelName, instance_id: InstanceId | None, error: PilotlightError | None
    ) -> None:
        """Answer the requests that wait for the model's next start."""
        for future in self._planned.pop(model, []):
            if future.done():
                continue
            if instance_id is not None:
                future.set_result(instance_id)
            elif error is not None:
                future.set_exception(error)

    def evict(self, model: ModelName) -> asyncio.Future[tuple[InstanceId, ...]]:
        """Have every instance of a model drained; the result names those instances.

        Raises:
            PilotlightError: the term is over.
        """
        self._check()
        future: asyncio.Future[tuple[InstanceId, ...]] = asyncio.get_running_loop().create_future()
        self._evict.setdefault(model, []).append(future)
        self.warmed(model)
        return future

    def evictions(self) -> tuple[ModelName, ...]:
        """Models that are to be evicted."""
        return tuple(self._evict)

    def settle_evicted(self, model: ModelName, instance_ids: tuple[InstanceId, ...]) -> None:
        """Answer the requests to evict the model."""
        for future in self._evict.pop(model, []):
            if not future.done():
                future.set_result(instance_ids)

    def close(self, error: PilotlightError) -> None:
        """The term is over: every request that waits fails at once, and its client asks the next
        leader.
        """
        self._closed = error
        for future in (*chain(*self._planned.values()), *chain(*self._evict.values())):
            if not future.done():
                future.set_exception(error)
        self._planned.clear()
        self._evict.clear()

    def demand(self, held: tuple[Demand, ...], now_s: float) -> tuple[Demand, ...]:
        """The gateways' demand, and one waiting request for each model that is to be warm and has
        no demand; as of ``now_s``.
        """
        self._warm = {
            model: one for model, one in self._warm.items() if now_s - one.since_s < WARM_FOR_S
        }
        if not self._warm:
            return held
        waiting = {one.model for one in held}
        asked = tuple(
            Demand(
                model=model,
                waiting=1,
                oldest_age_s=now_s - one.since_s,
                deadline_in_s=one.since_s + WARM_FOR_S - now_s,
                trace_parent=one.trace_parent,
            )
            for model, one in self._warm.items()
            if model not in waiting
        )
        return (*held, *asked)

    def since_s(self) -> dict[ModelName, float]:
        """When the open request to warm a model came, of all models with one."""
        return {model: one.since_s for model, one in self._warm.items()}

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed
