"""Builds of artifacts by a worker that has time.

::

    no demand for a while ──ask──> lease room ──claim──> build ──finish──> listed
            ^                          │                   │ a load or a request comes: the child is killed, the build goes back
            └──────────────────────────┴───────────────────┘

The builder is a component of its own: an engine child beside the worker's, in device memory that it
leases from the cache (``build_room``). Demand goes first, always: the kill does not wait for the
build.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import structlog
from blake3 import blake3

from pilotlight.common.bus import Subscription
from pilotlight.common.errors import Conflict, NoRoom, PilotlightError, TransientError
from pilotlight.common.messages.artifacts import (
    BUILD_WANTED_SUBJECT,
    CLAIM_BUILD_SUBJECT,
    END_BUILD_SUBJECT,
    FINISH_BUILD_SUBJECT,
    REPORT_BUILD_SUBJECT,
    ArtifactPublished,
    BuildClaimed,
    BuildHeard,
    BuildWanted,
    ClaimBuild,
    ClaimedBuild,
    EndBuild,
    FinishBuild,
    ReportBuild,
)
from pilotlight.common.messages.graphs import GraphWays
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.common.waiting import Backoff, Wake, cancel_all, pause
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import Environment
from pilotlight.worker.artifacts import Artifacts
from pilotlight.worker.build_progress import Progress
from pilotlight.worker.build_session import BuildSession, MakeEngine
from pilotlight.worker.build_steps import Built, build
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.engines.client import EngineClient
from pilotlight.worker.held_table import HeldTable
from pilotlight.worker.leasing import PartSource
from pilotlight.worker.lending import Lending

log = structlog.get_logger()

ASK_S = 5.0
"""Deadline of each request to the materializer."""
LOOK_S = 30.0
"""About how often a worker without demand asks whether there is something to build."""
KEPT_LOOK_S = 3.0
"""The same for one that has built what nobody took."""
BACKOFF = Backoff(first_s=0.2, limit_s=3.0)


class Builds:
    """A component: builds while there is no demand."""

    def __init__(
        self,
        core: WorkerCore,
        held: Callable[[], HeldTable],
        lending: Lending,
        source: PartSource,
        make_engine: MakeEngine,
        artifacts: Artifacts,
        store: ObjectStore,
        idle_s: float,
        *,
        graphs: bool = False,
        ways: GraphWays | None = None,
        ranges: bool = False,
    ) -> None:
        """Builds nothing yet.

        Args:
            core: the worker's.
            held: its stages.
            lending: its device's memory, of which builds lease some.
            source: of parts.
            make_engine: makes an engine for one step of a build, not started.
            artifacts: hears of what was built.
            store: takes what was built.
            idle_s: without demand, before a build is looked for.
            graphs: artifacts for GPUs are to have some.
            ways: how those are recorded and restored.
            ranges: they are to have those of the usual ranges of layers, too.
        """
        self._ranges = ranges
        self._ways = (ways or GraphWays()) if graphs else None
        self._core = core
        self._held = held
        self._lending = lending
        self._room = lending.build
        self._source = source
        self._make_engine = make_engine
        self._artifacts = artifacts
        self._store = store
        self._idle_s = idle_s
        self._looking: asyncio.Task[None] | None = None
        self._building: asyncio.Task[Built] | None = None
        self._engine: EngineClient | None = None
        self._demand_s = core.clock.monotonic_s()
        """When there was demand last."""
        self._yielded = False
        self._short_bytes = 0
        """What a build takes for which the device had no room; 0: none waits for that."""
        self._kept: tuple[Digest, Built] | None = None
        """What was built for a fingerprint, and could not be listed: the next claim of it has
        nothing left to build."""
        self._subscription: Subscription | None = None
        self._wake = Wake()
        self._rng = random.Random()

    async def start(self) -> None:
        """Look for builds from now on."""
        if self._looking is None:
            self._core.make_way = self.make_way
            self._subscription = await self._core.bus.subscribe(
                BUILD_WANTED_SUBJECT, BuildWanted, self._on_wanted
            )
            name = f"builds of {self._core.worker_id}"
            self._looking = self._core.background.spawn(name, self._look())

    async def stop(self) -> None:
        """End a build that runs, and look for no more."""
        looking, self._looking = self._looking, None
        if self._subscription is not None:
            await self._subscription.end()
            self._subscription = None
        if looking is not None:
            await cancel_all((looking,))

    def make_way(self) -> None:
        """There is demand: end the build."""
        self._demand_s = self._core.clock.monotonic_s()
        self._room.make_way()
        if self._building is not None and not self._building.done():
            self._yielded = True
            self._building.cancel()
            if self._engine is not None:
                # An orderly end could take seconds.
                self._core.background.spawn(
                    "end of a build", self._engine.kill("the build makes way")
                )

    @property
    def _idle(self) -> bool:
        """Nothing loads or runs, and has not for a while."""
        held = self._held()
        quiet_s = self._core.clock.monotonic_s() - self._demand_s
        return (
            self._core.engine.alive
            and quiet_s >= self._idle_s
            and not self._core.table.running
            and not any(one.state is HeldState.LOADING for one in held)
        )

    async def _on_wanted(self, wanted: BuildWanted) -> None:
        self._wake.set()

    async def _look(self) -> None:
        next_s = 0.0
        while True:
            asked = await self._wake.wait(min(self._idle_s, LOOK_S))
            self._wake.clear()
            if asked:
                next_s = 0.0
            now_s = self._core.clock.monotonic_s()
            environment = self._core.environment
            if environment is None or not self._idle:
                continue
            fits = 0 < self._short_bytes <= self._lending.buildable_bytes
            if now_s < next_s and not fits:
                continue
            look_s = LOOK_S if self._kept is None else KEPT_LOOK_S
            next_s = now_s + look_s * self._rng.uniform(0.8, 1.2)
            with suppress(PilotlightError):
                if await self._one(environment):
                    next_s = 0.0

    async def _one(self, environment: Environment) -> bool:
        """Make one build, if there is one and it has room; whether to look again at once.

        Raises:
            PilotlightError: the materializer does not answer.
        """
        found = await self._claim(environment, 0)
        needed = found.needed_bytes
        if found.build is not None:  # Of a release that knows of no leases.
            needed = needed_bytes(found.build.model, environment)
        is_short = needed > self._lending.buildable_bytes
        self._short_bytes = needed if is_short else 0
        if not needed or (is_short and found.build is None):
            return False
        try:
            await self._room.lease(needed)
        except NoRoom as error:
            log.info("a build waits for room", action="build_waits", error=error.message)
            if found.build is not None:
                await self._end(found.build, yielded=True, code=error.code, message=error.message)
            return not self._idle
        try:
            build = found.build
            if build is None and self._idle:
                build = (await self._claim(environment, needed)).build
            return build is not None and await self._build(build)
        finally:
            self._room.give_back()

    async def _claim(self, environment: Environment, leased_bytes: int) -> BuildClaimed:
        request = ClaimBuild(
            worker_id=self._core.worker_id,
            environment=environment,
            room_bytes=self._lending.buildable_bytes,
            leased_bytes=leased_bytes,
        )
        return await self._core.bus.request(
            CLAIM_BUILD_SUBJECT, request, BuildClaimed, deadline_s=ASK_S
        )

    async def _build(self, claimed: ClaimedBuild) -> bool:
        """Whether to look for the next one at once: there may be more."""
        progress = Progress(self._core.clock.monotonic_s() + claimed.lease_s)
        log.info("build begins", action="build_begun", model=claimed.model.name)
        self._yielded = False
        self._building = asyncio.create_task(
            self._built(claimed, progress), name=f"build {claimed.model.name}"
        )
        renewing = asyncio.create_task(self._renew(claimed, progress), name="lease of a build")
        outcome, code, message = "built", "", ""
        try:
            if not self._idle:
                self.make_way()
            built = await self._building
            # What is left to be done takes no memory.
            await self._kill()
            self._room.give_back()
            await self._publish(claimed, built, progress)
            self._kept = None
            self._artifacts.forget(claimed.fingerprint.digest)
        except asyncio.CancelledError:
            if not self._building.cancelled() or not self._yielded:
                # Not the build was called off, but this.
                await self._kill()
                await cancel_all((self._building,))
                self._room.give_back()
                await self._end(claimed, yielded=True)
                raise
            outcome = "yielded"
        except PilotlightError as error:
            later = self._keeps(claimed) and isinstance(error, TransientError | Conflict)
            if self._keeps(claimed) and not later:
                self._kept = None
            # A build that finds no room, also in the host pool, was no try.
            waits = later or isinstance(error, NoRoom)
            outcome = "yielded" if self._yielded or waits else error.code
            if not self._yielded:
                code, message = error.code, error.message
        finally:
            await self._kill()
            await cancel_all((renewing, self._building))
            self._building = None
            self._room.give_back()
        self._core.metrics.builds.labels(outcome=outcome).inc()
        log.info("build ended", action="build_ended", outcome=outcome, error=message)
        if outcome != "built":
            await self._end(claimed, yielded=outcome == "yielded", code=code, message=message)
        return self._yielded or code != NoRoom.code

    async def _built(self, claimed: ClaimedBuild, progress: Progress) -> Built:
        if self._kept is not None and self._keeps(claimed):
            return self._kept[1]
        room_bytes = needed_bytes(claimed.model, claimed.fingerprint.environment)
        session = partial(self._session, room_bytes)
        made = await build(claimed, session, progress.tell, self._ways, ranges=self._ranges)
        self._kept = claimed.fingerprint.digest, made
        return made

    def _keeps(self, claimed: ClaimedBuild) -> bool:
        return self._kept is not None and self._kept[0] == claimed.fingerprint.digest

    def _session(
        self,
        room_bytes: int,
        *,
        record_images: bool = False,
        note_kernels: bool = False,
        witness: bool = False,
    ) -> BuildSession:
        self._engine = self._make_engine(
            device_bytes=room_bytes,
            record_images=record_images,
            note_kernels=note_kernels,
            witness=witness,
        )
        return BuildSession(self._engine, self._source, self._core.worker_id, self._core.clock)

    async def _kill(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.kill("the build makes way")
            await engine.stop()

    async def _renew(self, claimed: ClaimedBuild, progress: Progress) -> None:
        """Keep the lease, and tell how far it is, until it is not ours any more."""
        while True:
            await progress.changed.wait(claimed.lease_s / 4)
            progress.changed.clear()
            report = ReportBuild(
                fingerprint=claimed.fingerprint.digest,
                worker_id=self._core.worker_id,
                attempt=claimed.attempt,
                step=progress.step,
                share=progress.share,
            )
            # Unheard is not lost: the lease says when.
            with suppress(PilotlightError):
                heard = await self._core.bus.request(
                    REPORT_BUILD_SUBJECT, report, BuildHeard, deadline_s=ASK_S
                )
                if heard.yours:
                    progress.leased_until_s = self._core.clock.monotonic_s() + claimed.lease_s
                elif self._building is not None:
                    self._yielded = True
                    self._building.cancel()
                    return

    async def _publish(self, claimed: ClaimedBuild, built: Built, progress: Progress) -> None:
        """Announce the objects, write them, have them listed: tried for as long as the lease lasts.

        Raises:
            Conflict: the build is another worker's by now.
            PilotlightError: it is not listed; what was written goes.
        """
        manifest = built.manifest
        digest = Digest(blake3(manifest).hexdigest())
        announced = ReportBuild(
            fingerprint=claimed.fingerprint.digest,
            worker_id=self._core.worker_id,
            attempt=claimed.attempt,
            step=progress.step,
            share=progress.share,
            blobs=(*built.archives, digest),
        )
        finished = FinishBuild(
            fingerprint=claimed.fingerprint.digest,
            worker_id=self._core.worker_id,
            attempt=claimed.attempt,
            manifest_digest=digest,
            size_bytes=len(manifest),
        )
        for attempt in count():
            try:
                heard = await self._core.bus.request(
                    REPORT_BUILD_SUBJECT, announced, BuildHeard, deadline_s=ASK_S
                )
                if not heard.yours:
                    raise Conflict("the build is another worker's by now")
                progress.leased_until_s = self._core.clock.monotonic_s() + claimed.lease_s
                for name, data in {**built.archives, digest: manifest}.items():
                    await self._store.put_if_absent(artifact_key(name), data)
                await self._core.bus.request(
                    FINISH_BUILD_SUBJECT, finished, ArtifactPublished, deadline_s=ASK_S
                )
                return
            except TransientError:
                if self._core.clock.monotonic_s() >= progress.leased_until_s:
                    raise
                await pause(BACKOFF.delay_s(attempt, self._rng))

    async def _end(
        self, claimed: ClaimedBuild, *, yielded: bool, code: str = "", message: str = ""
    ) -> None:
        ended = EndBuild(
            fingerprint=claimed.fingerprint.digest,
            worker_id=self._core.worker_id,
            attempt=claimed.attempt,
            yielded=yielded,
            code=code,
            message=message,
        )
        # If nobody hears it, the lease ends by itself.
        with suppress(PilotlightError):
            await self._core.bus.request(END_BUILD_SUBJECT, ended, BuildHeard, deadline_s=ASK_S)
