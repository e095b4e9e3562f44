"""Restored graphs that know what they point to, and not where it lies (MEDUSA, section 4): their
arena may be elsewhere, and what torch takes may fall out otherwise.

What the recording process took is taken again in the same order, wherever it comes to lie; then the
words of parameters that are addresses are written anew, and the rest is as with addresses
(``cuda.restored``)::

    fit ──────────> the stage's places moved together
    check, first ──> replay the segments ──> write the addresses ──> open the archive ──> look at all of them
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.fitting import Fitting, GraphsRefused, check_layout, places_of
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice, LoadedKernels
from pilotlight.engine.cuda.graphs import StageSteps
from pilotlight.engine.cuda.pools import TorchPool
from pilotlight.engine.cuda.traces import PERMANENT
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.device import Pool, SegmentEvent
from pilotlight.native.library import NativeError, OutOfMemory
from pilotlight.native.pointers import (
    PointerTable,
    RecordedAllocation,
    moved,
    pointers_of,
    tags_of,
)
from pilotlight.policy.materialized import GraphLayout


def stage_allocations(memory: StageMemory) -> list[RecordedAllocation]:
    """What the arena has given a whole model before any graph is captured, but for its graph pool;
    and what it gives eager work, because stale words may point there.

    In the same order in every process.
    """
    arena, layout = memory.arena, memory.layout
    slot = arena.address + memory.slot_number * arena.slot_bytes
    found = [
        RecordedAllocation(slot + extent.start, extent.num_bytes)
        for extent in map(layout.part, memory.parts)
    ]
    for layer in range(memory.stage.start, memory.stage.stop):
        keys, values = layout.keys(layer), layout.values(layer)
        found += [RecordedAllocation(slot + at, values - keys) for at in (keys, values)]
    found.append(RecordedAllocation(slot + layout.steps.start, layout.steps.num_bytes))
    assert isinstance(arena, CudaArena)
    num_bytes = arena.native_arena.num_bytes
    return [
        *found,
        RecordedAllocation(arena.address + num_bytes - arena.slot_bytes, arena.slot_bytes),
    ]


class Anywhere:
    """What ``RestoredGraphs`` takes to restore one stage's graphs wherever its memory lies."""

    def __init__(self, kernels: LoadedKernels | None = None) -> None:
        """Knows no stage yet.

        Args:
            kernels: see ``ArchiveOnDevice``.
        """
        self.kernels = kernels
        self._pool: Pool | None = None

    def fit(self, fitting: Fitting) -> Tensor | None:
        """A ``Fit``: everything that steps read and write lies where it was, seen from any of it.

        Raises:
            GraphsRefused: by the name of what differs.
        """
        memory, steps = fitting.memory, fitting.steps
        layout = moved_layout(fitting.layout, memory, steps)
        check_layout(layout, memory, steps, later=fitting.later)
        # torch takes the segment of the logits, which is the pool's first, if it has not.
        steps.logits()
        assert isinstance(fitting.scratch.graphs, TorchPool)
        self._pool = fitting.scratch.graphs.memory
        return None

    def open(self, memory: StageMemory, archive: bytes) -> "MovedArchive":
        """See ``RestoredGraphs``, ``open_archive``.

        Raises:
            NativeError: the archive does not hold together, or says nothing of its addresses.
        """
        return MovedArchive(memory, archive, self)

    @property
    def pool(self) -> Pool:
        """Of the stage's graphs; it fits."""
        assert self._pool is not None
        return self._pool


def moved_layout(layout: GraphLayout, memory: StageMemory, steps: StageSteps) -> GraphLayout:
    """A layout as it is where all of its places lie as far from where they were."""
    recorded, here = layout.addresses, places_of(steps)
    distances = {here[name] - at for name, at in recorded.items() if name in here}
    if len(distances) == 1:
        (distance,) = distances
        places = tuple(replace(one, address=one.address + distance) for one in layout.places)
        return replace(layout, slot=memory.slot_number, places=places)
    return layout


def alive_segments(events: Sequence[SegmentEvent]) -> list[SegmentEvent]:
    """The segments that were taken and not given back, in order."""
    alive: dict[int, SegmentEvent] = {}
    for event in events:
        alive.pop(event.address, None)
        if event.taken:
            alive[event.address] = event
    return list(alive.values())


class Replay:
    """The recorded allocations, made again in one process."""

    def __init__(self, memory: StageMemory, table: PointerTable, pool: Pool, lasting: Pool) -> None:
        """Makes them.

        Args:
            memory: the stage's, a whole model.
            table: what was recorded.
            pool: of the stage's graphs; all models use its memory.
            lasting: gives memory that nobody else uses.

        Raises:
            GraphsRefused: ``sequence``: this process took other memory before; ``pool``: there is
                none.
        """
        self._pool, self._lasting = pool, lasting
        self._taken: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self.bases: list[int] = []
        """Where each of them begins; 0: it is gone again."""
        given = stage_allocations(memory)
        recorded = table.allocations
        if [one.num_bytes for one in recorded[: len(given)]] != [one.num_bytes for one in given]:
            raise GraphsRefused("sequence", "the stage has other memory than was recorded")
        self.bases = [one.address for one in given]
        try:
            self._segments(recorded[len(given) :], len(table.captures))
            self._permanent(recorded)
        except OutOfMemory as error:
            self.close()
            raise GraphsRefused("pool", f"the device has no memory for graphs: {error}") from error
        except NativeError as error:
            self.close()
            raise GraphsRefused("sequence", str(error)) from error

    def _segments(self, recorded: Sequence[RecordedAllocation], captures: int) -> None:
        first = len(self.bases)
        # Those before all captures torch has taken here, too: where it leaves logits.
        alive = alive_segments(self._pool.events)
        for number, one in enumerate(recorded):
            if one.taken:
                break
            if number >= len(alive) or alive[number].num_bytes != one.num_bytes:
                raise NativeError(-1, f"segment {number} is another one here")
            self.bases.append(alive[number].address)
        for capture in range(1, captures + 1):
            for number, one in enumerate(recorded):
                if one.taken == capture:
                    self._taken[first + number] = self._pool.take(one.num_bytes)
                    self.bases.append(self._taken[first + number])
            for number, one in enumerate(recorded):
                if one.given == capture and first + number in self._taken:
                    self._pool.give(self._taken.pop(first + number))
                    self.bases[first + number] = 0

    def _permanent(self, recorded: Sequence[RecordedAllocation]) -> None:
        """What graphs expect to find has a place that no other model's graphs write to."""
        for number, one in enumerate(recorded):
            if one.kind == PERMANENT:
                self._kept[number] = self.bases[number] = self._lasting.take(one.num_bytes)

    @property
    def contents(self) -> list[int]:
        """Numbers of the allocations whose contents are to be brought."""
        return list(self._kept)

    def close(self) -> None:
        """Gives back what it took, when the device is through with it; a second time it does
        nothing.
        """
        for pool, held in ((self._pool, self._taken), (self._lasting, self._kept)):
            for address in held.values():
                pool.give(address)
            held.clear()


class MovedArchive:
    """A ``GraphDevice``, by the driver: of an archive with pointers."""

    def __init__(self, memory: StageMemory, archive: bytes, way: Anywhere) -> None:
        """Reads the archive.

        Raises:
            NativeError: it does not hold together, or says nothing of its addresses.
        """
        self._way = way
        self._table = pointers_of(archive)
        self._memory, self._bytes = memory, archive
        self._replay: Replay | None = None
        self._device: ArchiveOnDevice | None = None

    @property
    def tags(self) -> tuple[int, ...]:
        """See ``GraphDevice``."""
        return tags_of(self._bytes)

    @property
    def spent_ms(self) -> dict[str, float]:
        """See ``GraphDevice``."""
        return self._device.spent_ms if self._device is not None else {}

    def load(self, size: int) -> None:
        """See ``GraphDevice``: kernels come with the first graph, behind its addresses."""

    def check(self, size: int) -> int:
        """See ``GraphDevice``; the first time, the memory is taken and the addresses written.

        Raises:
            GraphsRefused: there is no such memory.
        """
        return self._opened().check(size)

    def build(self, size: int, between: Callable[[], None]) -> None:
        """See ``GraphDevice``."""
        self._opened().build(size, between)

    def launch(self, size: int) -> None:
        """See ``GraphDevice``."""
        self._opened().launch(size)

    def check_list(self, size: int) -> None:
        """See ``GraphDevice``."""
        self._opened().check_list(size)

    def launch_list(self, size: int) -> None:
        """See ``GraphDevice``."""
        self._opened().launch_list(size)

    def close(self) -> None:
        """See ``GraphDevice``."""
        if self._device is not None:
            self._device.close()
        if self._replay is not None:
            self._replay.close()

    def _opened(self) -> ArchiveOnDevice:
        if self._device is not None:
            return self._device
        memory, arena = self._memory, self._memory.arena
        assert isinstance(arena, CudaArena)
        pools = self._way.pool, arena.workspace.memory
        self._replay = Replay(memory, self._table, *pools)
        for number in self._replay.contents:
            contents = self._table.allocations[number].contents or b""
            at = self._replay.bases[number] - arena.address
            place = arena.tensor(at, (len(contents),), torch.uint8)
            place.copy_(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
        archive = moved(self._bytes, self._replay.bases, arena.native_arena)
        self._device = ArchiveOnDevice(memory, archive, self._way.kernels)
        return self._device
