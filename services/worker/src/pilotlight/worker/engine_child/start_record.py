"""Keeps, for the next process, what this one had in the end: see ``pilotlight.native.plan``.

Written when a stage was restored and its canary has given what was recorded, in the engine's idle
time; what is written is executable input, and was checked when it came (``worker.artifacts``).

::

    FOLDER / start.json            the plan; start.trying.json while a process is not up yet
           / graphs-DIGEST         the archive that it names
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda.arena import CHUNK_BYTES, POOL_CHUNK_BYTES, CudaArena
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.device import LIBCUDA
from pilotlight.native.plan import (
    PLAN,
    NativePlan,
    PlannedGraphs,
    kept_plan,
)
from pilotlight.worker.engine_child.stages import StageLoads

log = structlog.get_logger()

ARCHIVE = "graphs-"


class StartRecord:
    """Of one engine."""

    def __init__(self, folder: Path, arena: CudaArena, layout: Callable[[], str]) -> None:
        """Nothing is written yet.

        Args:
            folder: of this worker alone.
            arena: the engine's.
            layout: gives ``started.layout_hash``.
        """
        self._folder, self._arena, self._layout = folder, arena, layout
        self._tried = True
        self._failed = False

    def write(self, loads: StageLoads) -> bool:
        """Does the next thing that is to be done; whether there was one."""
        if self._failed or not self._arena.canonical:
            return False
        try:
            return self._keep() or self._plan(loads)
        except OSError as error:
            self._failed = True
            log.warning("no plan for the next start", action="start_not_kept", error=str(error))
            return False

    def _keep(self) -> bool:
        """The plan that this process had is as good for the next one, once it is carried out."""
        started = self._arena.started
        over = started is not None and "graphs" in started.took_ms
        if not self._tried or not over:
            return False
        self._tried = False
        kept_plan(self._folder)
        return True

    def _plan(self, loads: StageLoads) -> bool:
        instance_id = loads.restoring.proved
        if instance_id is None:
            return False
        loads.restoring.proved = None
        found = loads.graphs.take_archive(instance_id)
        if found is None or not found.data:
            return False
        plan = NativePlan(
            layout=self._layout(),
            library=str(self._arena.native.library.path),
            driver=LIBCUDA,
            address=self._arena.address,
            num_bytes=self._arena.native_arena.num_bytes,
            ranges=_ranges(found.memory, found.pool_bytes),
            graphs=PlannedGraphs(
                path=str(self._folder / f"{ARCHIVE}{found.blob.digest}"),
                size_bytes=found.blob.size_bytes,
                digest=found.blob.digest,
                sizes=found.sizes,
            ),
        )
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        assert plan.graphs is not None
        archive = Path(plan.graphs.path)
        if not archive.exists():
            _replace(archive, found.data)
        _replace(self._folder / PLAN, plan.as_json())
        for other in self._folder.glob(f"{ARCHIVE}*"):
            if other != archive:
                other.unlink(missing_ok=True)
        log.info("the next start is planned", action="start_planned", sizes=len(found.sizes))
        return True


def _ranges(memory: StageMemory, pool_bytes: int) -> tuple[tuple[int, int, int], ...]:
    """What of a stage has memory from its beginning to its end, as it is asked for: its parameters,
    what its steps read and write, and what graphs do.
    """
    runs: list[Extent] = []
    for part in memory.parts:
        extent = memory.extent(part)
        if runs and runs[-1].stop == extent.start:
            extent = Extent(runs.pop().start, extent.stop)
        runs.append(extent)
    arena = memory.arena
    pool_stop = (memory.slot_number + 1) * arena.slot_bytes
    steps, pool = pool_stop - arena.pool_bytes - arena.steps_bytes, pool_stop - arena.pool_bytes
    chunks = -(-pool_bytes // POOL_CHUNK_BYTES)
    return (
        *((one.start, one.stop, CHUNK_BYTES) for one in runs),
        (steps, steps + memory.steps_bytes, CHUNK_BYTES),
        (pool, pool + chunks * POOL_CHUNK_BYTES, POOL_CHUNK_BYTES),
    )


def _replace(path: Path, data: bytes) -> None:
    """Writes a file of this user's alone, whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).rename(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
