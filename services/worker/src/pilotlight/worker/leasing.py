"""Leases on parts in the host pool, which are asked for while other things are done."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from pilotlight.common.messages.pool import PartReady
from pilotlight.common.waiting import cancel_all
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import InstanceId, WorkerId
from pilotlight.policy.model import Model


class PartLease(AbstractAsyncContextManager["PartLease"], Protocol):
    """Parts that stay in the host pool until this is left.

    ``dataplane.pool_client.PoolLease`` is the real one.
    """

    pool_path: str

    @property
    def intact(self) -> bool:
        """Whether no part may have been dropped since it was ready."""
        ...

    def __aiter__(self) -> AsyncIterator[PartReady]:
        """Each part as it becomes ready; ends after the last."""
        ...


class PartSource(Protocol):
    """Where a worker leases parts. ``dataplane.pool_client.PoolClient`` is the real one."""

    def lease(
        self,
        worker_id: WorkerId,
        instance_id: InstanceId,
        model: Model,
        parts: tuple[int, ...],
        trace_parent: str = "",
        priority: FetchPriority = FetchPriority.COLD_START,
    ) -> Coroutine[Any, Any, PartLease]:
        """Returns when the lease is granted; it may be asked for before that is awaited.

        Args:
            worker_id: For whom the parts stay.
            instance_id: For what.
            model: Its parts.
            parts: Which of them, by index.
            trace_parent: Of the cold start's trace; empty: there is none.
            priority: How much it matters that they come soon.

        Raises:
            PilotlightError: there is no loader, or it refused.
        """
        ...


@asynccontextmanager
async def leasing(
    asked: Coroutine[Any, Any, PartLease], name: str
) -> AsyncGenerator[asyncio.Future[PartLease]]:
    """Have a lease that is asked for, until this is left; what is granted, or why nothing is.

    Args:
        asked: what ``PartSource.lease`` gave.
        name: of the task that has it.
    """
    granted: asyncio.Future[PartLease] = asyncio.get_running_loop().create_future()
    holding = asyncio.create_task(_held(asked, granted), name=name)
    try:
        yield granted
    finally:
        await cancel_all((holding,))
        asked.close()  # It may not have begun.
        if not granted.cancel():
            granted.exception()  # Nobody may have waited for it.


async def _held(asked: Coroutine[Any, Any, PartLease], granted: asyncio.Future[PartLease]) -> None:
    """Holds a lease from its grant until this is cancelled."""
    try:
        lease = await asked
    except Exception as error:  # noqa: BLE001 - for whoever waits for the grant
        granted.set_exception(error)
        return
    async with lease:
        granted.set_result(lease)
        await asyncio.get_running_loop().create_future()


class EveryPart:
    """``PartSource`` of a simulated worker without a loader: every part is ready, and has no
    bytes.
    """

    async def lease(
        self,
        worker_id: WorkerId,
        instance_id: InstanceId,
        model: Model,
        parts: tuple[int, ...],
        trace_parent: str = "",
        priority: FetchPriority = FetchPriority.COLD_START,
    ) -> PartLease:
        return _EveryPartLease(parts)


class _EveryPartLease:
    pool_path = ""
    intact = True

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = parts

    async def __aenter__(self) -> "_EveryPartLease":
        return self

    async def __aexit__(self, *exception: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[PartReady]:
        for part in self._parts:
            yield PartReady(part=part, tensors=())
