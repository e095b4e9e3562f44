"""Verifications of models that this node was asked for: one after the other, after everything else
that reads.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import structlog

from pilotlight.common.errors import (
    DeadlineExceeded,
    InternalError,
    NotFound,
    PilotlightError,
    QueueFull,
    SourceUnavailable,
)
from pilotlight.common.ids import new_incarnation
from pilotlight.common.messages.verify import (
    MAX_DIFFERENCES,
    AskVerification,
    Verification,
    VerificationStatus,
    Verify,
)
from pilotlight.common.service import Background
from pilotlight.dataplane.fetch_tools import FetchTools
from pilotlight.dataplane.priority_semaphore import Recalled
from pilotlight.dataplane.readers import Reading
from pilotlight.dataplane.source_origin import OpenedLate
from pilotlight.dataplane.verify import ModelReading
from pilotlight.loader.manifests import StoredManifests
from pilotlight.policy.ids import NodeId

log = structlog.get_logger()

MAX_WAITING = 16
MAX_KEPT = 64
"""Verifications that can be asked about, the oldest of the ended are forgotten first."""
STEP_BYTES = 64 * 1024 * 1024
"""What is read with one permit, before others get one."""
_RANK = (2,)
"""After cold starts and prefetches."""
_ENDED = (VerificationStatus.DONE, VerificationStatus.FAILED)


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    verification_id: str
    asked: Verify
    status: VerificationStatus = VerificationStatus.WAITING
    reading: ModelReading | None = None
    filled_parts: int = 0
    differences: tuple[str, ...] = ()
    error: PilotlightError | None = None


class Verifications:
    """What was asked for, and what came of it."""

    def __init__(
        self, node_id: NodeId, tools: FetchTools, manifests: StoredManifests, background: Background
    ) -> None:
        self._node_id = node_id
        self._tools = tools
        self._manifests = manifests
        self._background = background
        self._one = asyncio.Lock()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    async def on_verify(self, asked: Verify) -> Verification:
        """Start one, or say how the one of this model is doing.

        Raises:
            QueueFull: too many wait.
        """
        alive = [job for job in self._jobs.values() if job.status not in _ENDED]
        for job in alive:
            if job.asked.model.digest == asked.model.digest:
                return self._told(job)
        if len(alive) > MAX_WAITING:
            raise QueueFull(
                f"{len(alive)} models are being verified on {self._node_id}, or wait for it"
            )
        job = _Job(verification_id=f"{self._node_id}.{new_incarnation()}", asked=asked)
        self._jobs[job.verification_id] = job
        ended = [known for known, kept in self._jobs.items() if kept.status in _ENDED]
        for old in ended[: max(0, len(self._jobs) - MAX_KEPT)]:
            del self._jobs[old]
        self._background.spawn(f"verify {asked.model.name}", self._run(job))
        return self._told(job)

    async def on_ask(self, asked: AskVerification) -> Verification:
        """How far it is.

        Raises:
            NotFound: it was not asked for, or this loader has started anew since.
        """
        job = self._jobs.get(asked.verification_id)
        if job is None:
            raise NotFound(
                f"{self._node_id} knows of no verification {asked.verification_id!r}: start another one"
            )
        return self._told(job)

    async def _run(self, job: _Job) -> None:
        model = job.asked.model
        try:
            async with asyncio.timeout(job.asked.deadline_s), self._one:
                job.status = VerificationStatus.RUNNING
                await self._verify(job)
            job.status = VerificationStatus.DONE
        except TimeoutError:
            job.error = DeadlineExceeded(
                f"verifying {model.name} took longer than {job.asked.deadline_s:g} s"
            )
        except PilotlightError as error:
            job.error = error
        except Exception as error:
            log.error(
                "verification died", action="verification_died", model=model.name, exc_info=error
            )
            job.error = InternalError(f"the verification died: {error!r}")
        if job.error is not None:
            job.status = VerificationStatus.FAILED
        tell = log.warning if job.error is not None or job.differences else log.info
        tell(
            "model verified" if job.error is None else "model not verified",
            action="model_verified",
            model=model.name,
            differences=len(job.differences),
            filled_parts=job.filled_parts,
            code=job.error.code if job.error else "",
        )

    async def _verify(self, job: _Job) -> None:
        model = job.asked.model
        manifest = await self._manifests.latest(model)
        reading = job.reading = ModelReading(manifest=manifest)
        threads = Reading(self._tools.readers, lambda: _RANK)
        source = OpenedLate(model, manifest, self._tools.open_source)
        lane = self._tools.lanes.of(source)
        try:
            while not reading.ended:
                recalled = asyncio.Event()
                try:
                    async with lane.permit(STEP_BYTES, lambda: _RANK, recalled) as progress:
                        step = partial(reading.run, source, STEP_BYTES)
                        await threads.run(
                            f"verifying {model.name}", step, progress, recalled=recalled
                        )
                except Recalled:
                    # It goes on where it was, but only once its thread has noticed.
                    await self._ended(threads)
        finally:
            self._background.spawn(f"close the source of {model.name}", _close(threads, source))
        # What was recorded meanwhile counts too.
        recorded = await self._manifests.latest(model)
        job.differences = tuple(reading.differences(recorded))
        for part, digests in reading.learned(recorded).items():
            await self._manifests.publish(model, part, digests)
            job.filled_parts += 1

    async def _ended(self, threads: Reading) -> None:
        try:
            async with asyncio.timeout(self._tools.readers.stall_timeout_s):
                await threads.settled()
        except TimeoutError as error:
            raise SourceUnavailable("the source stalled") from error

    def _told(self, job: _Job) -> Verification:
        reading = job.reading
        return Verification(
            verification_id=job.verification_id,
            node_id=self._node_id,
            model=job.asked.model.name,
            status=job.status,
            done_bytes=reading.done_bytes if reading else 0,
            total_bytes=reading.total_bytes if reading else 0,
            filled_parts=job.filled_parts,
            difference_count=len(job.differences),
            differences=job.differences[:MAX_DIFFERENCES],
            code=job.error.code if job.error else "",
            error=job.error.message if job.error else "",
        )


async def _close(threads: Reading, source: OpenedLate) -> None:
    await threads.settled()
    source.close()
