"""Works on batches, one at a time, with what clients leave of this gateway."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import NotFound, PilotlightError
from pilotlight.common.service import Background
from pilotlight.common.store import ObjectStore
from pilotlight.common.waiting import Wake, cancel_all, pause
from pilotlight.gateway.batches.files import FileStore, file_key
from pilotlight.gateway.batches.lines import (
    FileInvalid,
    LineRunner,
    failed_line,
    file_of_lines,
    read_lines,
    unsent,
)
from pilotlight.gateway.batches.repository import (
    LEASE,
    BatchRepository,
    LeaseLost,
    Line,
    Work,
)
from pilotlight.gateway.schema.batches import (
    BatchLine,
    BatchStatus,
    File,
    FileError,
    FileErrors,
)
from pilotlight.policy.batches import BatchLoad, lines_to_start

log = structlog.get_logger()

LOOK_S = 5.0
"""How often it is looked for batches that another gateway accepted, or left."""
RENEW_S = LEASE.total_seconds() / 6
AGAIN_S = 0.2
"""How often it is looked whether clients leave room for more lines."""
SWEEP_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """What batches are worked on with."""

    repository: BatchRepository
    files: FileStore
    store: ObjectStore
    lines: LineRunner
    load: Callable[[int], BatchLoad]
    """What this gateway does, given how many lines are under way."""
    clock: Clock
    background: Background
    keep: timedelta
    """How long files are kept."""


class BatchRunner:
    """A component."""

    def __init__(self, parts: BatchParts) -> None:
        self._parts = parts
        self._wake = Wake()
        self._swept_s = -SWEEP_S
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look for batches."""
        self._task = self._parts.background.spawn("batches", self._run_for_ever())

    async def stop(self) -> None:
        """Leave the batch that is worked on to the next gateway."""
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None

    def wake(self) -> None:
        """There may be a new one, or one that is to be cancelled."""
        self._wake.set()

    async def _run_for_ever(self) -> None:
        while True:
            try:
                while (work := await self._parts.repository.claim()) is not None:
                    await self._work_on(work)
                await self._sweep()
            except PilotlightError as error:
                log.warning(
                    "batches wait", action="batches_wait", code=error.code, error=error.message
                )
            await self._wake.wait(LOOK_S)

    async def _work_on(self, work: Work) -> None:
        """One batch, to its end, or until it is another gateway's or cannot go on now."""
        repository = self._parts.repository
        task = asyncio.create_task(self._advance(work), name=f"batch {work.batch_id}")
        try:
            while not (await asyncio.wait((task,), timeout=RENEW_S))[0]:
                seen = await repository.renew(work.batch_id)
                over = seen.expired and not work.expired
                if over or (seen.status == "cancelling" and work.status != seen.status):
                    await cancel_all((task,))
                    work = seen
                    task = asyncio.create_task(self._advance(work), name=f"batch {work.batch_id}")
            await task
        except LeaseLost:
            log.info("batch is not ours any more", action="batch_left", batch_id=work.batch_id)
        except asyncio.CancelledError:
            await cancel_all((task,))
            # Without a database its lease ends by itself.
            with suppress(PilotlightError):
                await repository.release(work.batch_id)
            raise
        finally:
            await cancel_all((task,))

    async def _advance(self, work: Work) -> None:
        """Does what is left of a batch."""
        parts, request = self._parts, work.request
        try:
            content = await parts.store.get(file_key(request.input_file_id))
            lines = await read_lines(content, request.endpoint)
        except NotFound:
            gone = FileError(code="file_missing", message="the input file was deleted")
            await parts.repository.fail(work.batch_id, FileErrors(data=[gone]))
            return
        except FileInvalid as invalid:
            await parts.repository.fail(work.batch_id, invalid.errors)
            return
        if work.status == "validating":
            work = await parts.repository.begin(work.batch_id, len(lines))
        status: BatchStatus = "completed"
        if work.status == "cancelling":
            status = "cancelled"
        elif work.expired:
            status = "expired"
        else:
            await self._run_lines(work, lines)
        await self._end(work, status, lines)

    async def _run_lines(self, work: Work, lines: list[BatchLine]) -> None:
        known = await self._parts.repository.known(work.batch_id)
        left = iter([(number, line) for number, line in enumerate(lines) if number not in known])
        running: set[asyncio.Task[None]] = set()
        more = True
        try:
            while more or running:
                load = self._parts.load(len(running))
                for _ in range(lines_to_start(load) if more else 0):
                    if (following := next(left, None)) is None:
                        more = False
                        break
                    number, line = following
                    running.add(
                        asyncio.create_task(
                            self._run_line(work, number, line),
                            name=f"batch {work.batch_id} line {number}",
                        )
                    )
                if not running:
                    if more:
                        await pause(AGAIN_S)
                    continue
                done, running = await asyncio.wait(
                    running, timeout=AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            await cancel_all(running)

    async def _run_line(self, work: Work, number: int, line: BatchLine) -> None:
        try:
            result = await self._parts.lines.run(work.key_id, number, line)
        except Exception:
            # As for a request over HTTP: one line's bug is not the batch's.
            log.exception("line failed", action="batch_line_failed", batch_id=work.batch_id)
            result = failed_line(number, line)
        await self._parts.repository.keep(work.batch_id, result)

    async def _end(self, work: Work, status: BatchStatus, lines: list[BatchLine]) -> None:
        """Puts the results into files: objects first, so that their rows never name what is not
        there. Their ids follow from the batch: a second try writes the same.
        """
        found = await self._parts.repository.results(work.batch_id)
        known = {line.number for line in found}
        why = "batch_cancelled" if status == "cancelled" else "batch_expired"
        said = "the batch was cancelled before this line was answered"
        if status != "cancelled":
            said = "the batch's time was over before this line was answered"
        rest = [
            unsent(number, line, why, said)
            for number, line in enumerate(lines)
            if number not in known
        ]
        failures = [line for line in found if not line.succeeded] + rest
        output = await self._file(work, "output", [line for line in found if line.succeeded])
        await self._parts.repository.end(
            work, status, output, await self._file(work, "error", failures)
        )
        log.info(
            "batch has ended",
            action="batch_ended",
            batch_id=work.batch_id,
            status=status,
            lines=len(lines),
            failures=len(failures),
        )

    async def _file(self, work: Work, kind: str, lines: list[Line]) -> File | None:
        if not lines:
            return None
        file_id = f"file-{work.batch_id.removeprefix('batch_')}-{kind}"
        content = file_of_lines(lines)
        await self._parts.store.put_if_absent(file_key(file_id), content)
        return File(
            id=file_id,
            bytes=len(content),
            created_at=int(self._parts.clock.wall().timestamp()),
            filename=f"{work.batch_id}_{kind}.jsonl",
            purpose="batch_output",
        )

    async def _sweep(self) -> None:
        """Files go when they are too old, some now and then."""
        now_s = self._parts.clock.monotonic_s()
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        gone = await self._parts.files.sweep(self._parts.clock.wall() - self._parts.keep)
        if gone:
            log.info("old files deleted", action="files_swept", files=gone)
