"""One load: a lease on the host pool, its parts handed to the engine as they become ready, until
the stage stands.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from pilotlight.common.clock import moment_of
from pilotlight.common.errors import EngineFailed, PilotlightError, SourceChanged
from pilotlight.common.messages.engine import LoadStage, PlacePart, StageLoaded
from pilotlight.common.messages.graphs import Precomputed
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import (
    CallOffExtend,
    ExtendStage,
    StageGrown,
    VouchStage,
)
from pilotlight.common.messages.pool import PartReady
from pilotlight.common.telemetry import current_traceparent, span, with_parent
from pilotlight.common.waiting import cancel_all, pause, within
from pilotlight.dataplane.table import HEADER_BYTES, read_header
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import Epoch, InstanceId
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import Moment, PhaseName
from pilotlight.policy.remaining import remaining
from pilotlight.worker.artifacts import Artifacts
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.found import Found, may_grow
from pilotlight.worker.leasing import PartLease, PartSource, leasing

PART_DEADLINE_S = 300.0
"""Between two parts. A loader says itself when a source stalls; this is for a loader that hangs."""
LOADED_DEADLINE_S = 120.0
"""From the last part handed over to the stage's stand."""
FORMING_DEADLINE_S = 3600.0
"""The same for a stage of a pipeline that is to have fewer: it waits for the parts of others, which
yield to all other fetches, and each of which has a deadline of its own."""


_Told = TypeVar("_Told", StageLoaded, StageGrown)
"""What an engine says when the last part is in place."""


class StageLoader:
    """Carries out loads; what a stage's state is, is for ``Stages`` to say."""

    def __init__(
        self,
        core: WorkerCore,
        source: PartSource,
        pool_path: Path | None,
        artifacts: Artifacts | None = None,
    ) -> None:
        """Loads nothing yet.

        Args:
            core: the worker's.
            source: of parts.
            pool_path: where the node's pool lies.
            artifacts: what stages are restored from; None: from nothing.
        """
        self._core = core
        self._source = source
        self._artifacts = artifacts
        self._pool_path = str(pool_path) if pool_path is not None else ""
        self.begun: Callable[[InstanceId], None] = lambda _: None
        """Called when the engine has been told of a stage, of which parts follow."""
        self.renewed: Callable[[], None] = lambda: None
        """Called when a start has begun a new process of the engine."""

    def pool_epoch(self) -> Epoch:
        """The highest epoch in the host pool's header: what the node's loader has seen.

        0 while no pool is known.
        """
        return epoch_in_pool(self._pool_path) if self._pool_path else Epoch(0)

    async def load(
        self,
        hold: Hold,
        asked_s: float,
        loaded: asyncio.Future[StageLoaded],
        made_room: Callable[[], Awaitable[None]],
    ) -> StageLoaded:
        """Load a stage.

        The lease has ended when this returns.

        Args:
            hold: the stage.
            asked_s: when that was asked for.
            loaded: what the engine says of it, in whatever way.
            made_room: returns when nothing is lent that the stage needs.

        Raises:
            PilotlightError: a part cannot be had or placed, or the engine ended.
        """
        with (
            with_parent(hold.trace_parent),
            span("load", instance_id=hold.instance_id, model=hold.model.name),
        ):
            self._core.make_way()
            if not self._core.steps.prefetch:
                asked_s = await self._renew(hold, asked_s)
            async with self._leasing(hold, hold.model.spec.parts_of(hold.stage)) as granted:
                # Most are here already: a start has one turn of the loop until its engine is told.
                found = Found() if self._artifacts is None else self._artifacts.at_once(hold)
                finding: set[asyncio.Task[Found]] = set()
                try:
                    if found is None:
                        finding.add(asyncio.create_task(self._artifact(hold), name="artifact"))
                    if self._core.steps.prefetch:
                        asked_s = await self._renew(hold, asked_s)
                    await made_room()
                    for one in finding:
                        found = await one
                finally:
                    await cancel_all(finding)
                if granted.done():
                    granted.result()  # What is refused by now never comes to the engine.
                await self._begin(hold, granted, asked_s, found or Found())
                if self._core.steps.overlap:
                    self.begun(hold.instance_id)
                result = await self._fed(hold, granted, loaded)
                if hold.stage != hold.model.spec.whole:
                    vouch = VouchStage(instance_id=hold.instance_id)
                    await self._core.engine.vouch_stage(vouch)
                return result

    async def grow(
        self,
        hold: Hold,
        held: Stage,
        grown: asyncio.Future[StageGrown],
        made_room: Callable[[], Awaitable[None]],
    ) -> StageGrown:
        """Give a stage that is held a longer range; ``grown`` is what the engine says of it, in
        whatever way.

        Args:
            hold: the longer range.
            held: the range that is there, and serves.
            grown: set by the listener to the engine's events.
            made_room: as for ``load``.

        Raises:
            PilotlightError: a part cannot be had or placed, the engine refused, or it ended.
        """
        self._core.make_way()
        spec = hold.model.spec
        have = spec.parts_of(held)
        parts = tuple(part for part in spec.parts_of(hold.stage) if part not in have)
        shorter = bool(remaining([member.stage for member in hold.members]))
        with (
            with_parent(hold.trace_parent),
            span("grow", instance_id=hold.instance_id, model=hold.model.name),
        ):
            # The group serves without them: they yield to what cold starts wait for.
            async with self._leasing(hold, parts, FetchPriority.PREFETCH) as granted:
                extend = ExtendStage(
                    instance_id=hold.instance_id,
                    stage=hold.stage,
                    device_bytes=hold.device_bytes,
                    pool_path=(await granted).pool_path,
                    shorter=shorter,
                )
                await made_room()
                await self._core.engine.extend_stage(extend)
                within_s = FORMING_DEADLINE_S if shorter else LOADED_DEADLINE_S
                result = await self._fed(hold, granted, grown, within_s)
                if shorter:
                    vouch = VouchStage(instance_id=hold.instance_id)
                    await self._core.engine.vouch_stage(vouch)
                return result

    async def call_off(self, instance_id: InstanceId, error: PilotlightError) -> None:
        """Have the engine give up a growth that failed; one that is dead has done so."""
        with suppress(EngineFailed):
            await self._core.engine.call_off_extend(
                CallOffExtend(instance_id=instance_id, code=error.code, message=error.message)
            )

    def _leasing(
        self,
        hold: Hold,
        parts: tuple[int, ...],
        priority: FetchPriority = FetchPriority.COLD_START,
    ) -> AbstractAsyncContextManager[asyncio.Future[PartLease]]:
        asked = self._source.lease(
            self._core.worker_id,
            hold.instance_id,
            hold.model,
            parts,
            current_traceparent() or hold.trace_parent,
            priority,
        )
        return leasing(asked, f"lease of {hold.instance_id}")

    async def _fed(
        self,
        hold: Hold,
        granted: asyncio.Future[PartLease],
        told: asyncio.Future[_Told],
        within_s: float = LOADED_DEADLINE_S,
    ) -> _Told:
        """Hand the parts of a lease over, and wait for what the engine says at the end, or
        before.
        """
        feeding = asyncio.create_task(
            self._feed(hold, granted), name=f"parts of {hold.instance_id}"
        )
        try:
            # The engine may refuse a part while the next one is still on its way.
            await asyncio.wait({feeding, told}, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                feeding.result()
            result = await within(within_s, asyncio.shield(told), "placing the last part")
        finally:
            await cancel_all((feeding,))
        if not (await granted).intact:
            raise SourceChanged("the host pool changed while parts were copied from it")
        return result

    async def _artifact(self, hold: Hold) -> Found:
        return Found() if self._artifacts is None else await self._artifacts.of(hold)

    async def _renew(self, hold: Hold, asked_s: float) -> float:
        """Have a new process for a start that begins with one; since when the rest is waited for.

        Raises:
            EngineFailed: it does not start.
        """
        if self._core.engine.renews:
            await pause(0)  # Its parts are asked for first.
        start_s = self._core.clock.monotonic_s()
        if not await self._core.engine.renew():
            return asked_s
        end_s = self._core.clock.monotonic_s()
        self._core.phases.record(hold.instance_id, PhaseName.INIT, asked_s, start_s, detail="lease")
        self._core.phases.record(hold.instance_id, PhaseName.INIT, start_s, end_s, detail="process")
        self.renewed()
        return end_s

    async def _begin(
        self, hold: Hold, granted: asyncio.Future[PartLease], asked_s: float, found: Found
    ) -> None:
        """Have the engine make room, also while the lease is asked for.

        Parts say themselves where they are: before the grant nobody knows that the pool is the one
        of before.
        """
        sent = moment_of(self._core.clock)
        load = LoadStage(
            instance_id=hold.instance_id,
            model=hold.model,
            stage=hold.stage,
            device_bytes=hold.device_bytes,
            may_grow=may_grow(hold),
            artifact=found.manifest,
            graphs=found.graphs,
            precomputed=Precomputed(
                kernels=found.kernels,
                uses=found.uses,
                launch_lists=self._artifacts is not None and self._artifacts.launch_lists,
                ways=found.ways,
                ranges=found.ranges,
            ),
        )
        await self._core.engine.load_stage(load, sent)
        restored = found.manifest and hold.stage == hold.model.spec.whole
        name = PhaseName.RESTORE if restored else PhaseName.INIT
        self._core.phases.record(hold.instance_id, name, asked_s, sent.at_s, detail="lease")
        if not granted.done():
            granted.add_done_callback(partial(self._granted, hold.instance_id, name, sent.at_s))

    def _granted(
        self,
        instance_id: InstanceId,
        name: PhaseName,
        told_s: float,
        granted: asyncio.Future[PartLease],
    ) -> None:
        """A lease is granted, or is not, of which the engine was told before."""
        if not granted.cancelled() and granted.exception() is None:
            self._core.phases.record(instance_id, name, told_s, detail="lease")

    async def _feed(self, hold: Hold, granted: asyncio.Future[PartLease]) -> None:
        lease = await asyncio.shield(granted)
        self._pool_path = lease.pool_path
        frames = aiter(lease)
        kept: list[PartReady] = []
        while (
            ready := await within(PART_DEADLINE_S, anext(frames, None), "the next part")
        ) is not None:
            if self._core.steps.stream:
                await self._place(hold, lease, ready, ready.ready)
            else:
                kept.append(ready)
        all_here = moment_of(self._core.clock)
        for ready in kept:
            await self._place(hold, lease, ready, all_here)

    async def _place(
        self, hold: Hold, lease: PartLease, part: PartReady, ready: Moment | None
    ) -> None:
        place = PlacePart(
            instance_id=hold.instance_id,
            part=part.part,
            tensors=part.tensors,
            pool_path=lease.pool_path,
        )
        await self._core.engine.place_part(place, ready)


def epoch_in_pool(path: str) -> Epoch:
    """The highest epoch in a pool's header; 0 where there is no such pool (any more)."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            header = read_header(file.read(HEADER_BYTES))
    except OSError:
        return Epoch(0)
    return header.highest_epoch if header is not None else Epoch(0)
