"""One load: a lease on the host pool, its parts handed to the engine as they become ready, until the stage stands."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import structlog

from pilotlight.common.errors import InternalError, PilotlightError, SourceUnavailable, error_of
from pilotlight.common.messages.engine import LoadStage, PlacePart, StageLoaded
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pool import FromLoader, Lease, LeaseDone, LeaseFailed, LeaseGranted, PartReady
from pilotlight.common.telemetry import span, with_parent
from pilotlight.common.waiting import Backoff, pause, within
from pilotlight.policy.types import PhaseName
from pilotlight.worker.core import WorkerCore

log = structlog.get_logger()

LEASE_SILENCE_S = 300.0
"""Between two frames of a lease. A loader says itself when a source stalls; this is for a loader that hangs."""
LOADED_DEADLINE_S = 120.0
"""From the last part handed over to the stage's stand."""
LEASE_TRIES = 5
"""A loader that was restarted takes its workers' leases anew."""


class PartSource(Protocol):
    """Where a worker leases parts from."""

    def lease(self, order: Lease) -> AsyncGenerator[FromLoader]:
        """Keep parts in the pool and say when each is ready; the lease lasts until the generator is closed.

        Raises:
            SourceUnavailable: the loader cannot be reached, or went away.
        """
        ...


class EveryPart:
    """``PartSource`` of a simulated worker without a loader: every part is ready, and has no bytes."""

    async def lease(self, order: Lease) -> AsyncGenerator[FromLoader]:
        yield LeaseGranted(pool_path="", pool_bytes=0)
        for part in order.parts:
            yield PartReady(part=part, tensors=())
        yield LeaseDone(phases=())


class StageLoader:
    """Carries out loads; what a stage's state is, is for ``Stages`` to say."""

    def __init__(self, core: WorkerCore, source: PartSource) -> None:
        self._core = core
        self._source = source
        self._rng = random.Random()

    async def load(self, hold: Hold, asked_s: float, loaded: asyncio.Future[StageLoaded]) -> StageLoaded:
        """Load a stage; ``loaded`` is what the engine says of it, in whatever way. The lease has ended when this returns.

        Raises:
            PilotlightError: a part cannot be had or placed, or the engine ended.
        """
        with with_parent(hold.trace_parent), span("load", instance_id=hold.instance_id, model=hold.model.name):
            progress = _Progress(asked_s)
            backoff = Backoff(first_s=0.1, limit_s=2.0)
            for attempt in range(LEASE_TRIES):
                try:
                    return await self._with_lease(hold, progress, loaded)
                except SourceUnavailable as error:
                    if attempt == LEASE_TRIES - 1 or loaded.done():
                        raise
                    log.warning("lease lost; asking anew", action="lease_retry", instance_id=hold.instance_id, error=error.message)
                    await pause(backoff.delay_s(attempt, self._rng))
        raise InternalError("a load neither ended nor failed")

    async def _with_lease(self, hold: Hold, progress: "_Progress", loaded: asyncio.Future[StageLoaded]) -> StageLoaded:
        order = Lease(
            worker_id=self._core.worker_id,
            instance_id=hold.instance_id,
            model=hold.model,
            parts=hold.model.spec.parts_of(hold.stage),
            trace_parent=hold.trace_parent,
        )
        async with aclosing(self._source.lease(order)) as frames:
            feeding = asyncio.create_task(self._feed(hold, progress, frames), name=f"parts of {hold.instance_id}")
            try:
                await asyncio.wait({feeding, loaded}, return_when=asyncio.FIRST_COMPLETED)
                if not loaded.done():
                    feeding.result()
                return await within(LOADED_DEADLINE_S, asyncio.shield(loaded), "placing the last part")
            finally:
                # The generator must not run any more when it is closed.
                feeding.cancel()
                await asyncio.wait({feeding})

    async def _feed(self, hold: Hold, progress: "_Progress", frames: AsyncGenerator[FromLoader]) -> None:
        """Hand parts on until the lease says that all of them were."""
        while not isinstance(frame := await within(LEASE_SILENCE_S, anext(frames, None), "the next part"), LeaseDone):
            match frame:
                case LeaseGranted():
                    await self._begin(hold, progress, frame)
                case PartReady() if frame.part not in progress.handed:
                    place = PlacePart(instance_id=hold.instance_id, part=frame.part, tensors=frame.tensors)
                    await self._core.engine.place_part(place)
                    progress.handed.add(frame.part)
                case LeaseFailed():
                    raise _final(error_of(frame.code, frame.message))
                case None:
                    raise SourceUnavailable("the loader closed the lease before every part was ready")
                case _:
                    pass  # Offered again after a new lease: in place already.

    async def _begin(self, hold: Hold, progress: "_Progress", granted: LeaseGranted) -> None:
        if progress.begun:
            return
        load = LoadStage(
            instance_id=hold.instance_id,
            model=hold.model,
            stage=hold.stage,
            device_bytes=hold.device_bytes,
            pool_path=granted.pool_path,
            pool_bytes=granted.pool_bytes,
        )
        await self._core.engine.load_stage(load)
        progress.begun = True
        now_s = self._core.clock.monotonic_s()
        self._core.phases.record(
            hold.instance_id, self._core.phases.phase(PhaseName.INIT, progress.asked_s, now_s, "lease and stage set-up")
        )


class _Progress:
    """How far a load has come, over all its leases."""

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s
        self.begun = False
        self.handed: set[int] = set()


class PartUnavailable(PilotlightError):
    """The loader says that a part cannot be had; asking it again at once is of no use."""


def _final(error: PilotlightError) -> PilotlightError:
    return error
