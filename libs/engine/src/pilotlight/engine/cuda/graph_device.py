"""Graphs of an archive, on a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.graphs import GraphArchive
from pilotlight.native.library import OutOfMemory

log = structlog.get_logger()

LoadedKernels = Callable[[], Mapping[str, Sequence[int]]]
"""Gives kernels that this process has loaded, by name (``native.handles``)."""


class GraphDevice(Protocol):
    """Graphs of one archive, on a device."""

    @property
    def tags(self) -> tuple[int, ...]:
        """Sizes of all that it has (``StageSteps``)."""
        ...

    @property
    def spent_ms(self) -> Mapping[str, float]:
        """What making graphs took so far, by ``native.graphs.PARTS``."""
        ...

    def load(self, size: int) -> None:
        """Loads the kernels of one, for which the stage needs no memory yet.

        Raises:
            NativeError: the driver refuses one.
        """
        ...

    def check(self, size: int) -> int:
        """Looks at every address of one, once the stage has all of its memory; asks nothing of the
        driver.

        Returns:
            Words of parameters that are addresses of other slots, or of eager work.

        Raises:
            Nowhere: it has an address in the stage's slot where nothing is.
        """
        ...

    def build(self, size: int, between: Callable[[], None]) -> None:
        """Makes one ready to be launched, piece by piece: in each the driver does one thing, which
        keeps others waiting.

        Args:
            size: of the graph.
            between: called between two pieces.

        Raises:
            NativeError: the driver refuses it.
        """
        ...

    def launch(self, size: int) -> None:
        """Runs one that is ready, behind what this thread asked of the device before."""
        ...

    def check_list(self, size: int) -> None:
        """Looks whether one can be launched kernel by kernel; asks nothing of the driver.

        Raises:
            NativeError: not all of its kernels are loaded, or it has what no launch takes.
        """
        ...

    def launch_list(self, size: int) -> None:
        """Launches one kernel by kernel, behind what this thread asked of the device before. It
        need not be ready.

        Raises:
            NativeError: the driver refuses a launch.
        """
        ...

    def close(self) -> None:
        """Gives all of them back."""
        ...


class ArchiveOnDevice:
    """A ``GraphDevice``, by the driver."""

    def __init__(
        self, memory: StageMemory, archive: bytes, kernels: LoadedKernels | None = None
    ) -> None:
        """Reads the archive.

        Args:
            memory: the stage's.
            archive: the graphs.
            kernels: gives those that stand for the archive's images; None: none do.

        Raises:
            AddressTaken: the arena lies elsewhere than the one that the graphs were made for.
            NativeError: the archive does not hold together.
        """
        arena = memory.arena
        assert isinstance(arena, CudaArena)
        self._device = arena.device
        self._memory = memory
        # What the library has begun by itself has loaded the kernels of images.
        begun = None if kernels is not None or arena.started is None else arena.started
        opened = None if begun is None else begun.archive(archive)
        self._archive = GraphArchive(arena.native, archive, arena.native_arena, opened)
        if begun is not None and opened is not None:
            log.info("graphs were begun", action="graphs_begun", ready=begun.made)
        if kernels is not None:
            offered = self._archive.offer(kernels())
            log.info(
                "kernels offered",
                action="kernels_offered",
                taken=offered.taken,
                from_images=len(offered.missing),
                first_from_image=next(iter(offered.missing), ""),
            )
        self._uploads = torch.cuda.Stream(arena.device)
        self._known: list[tuple[int, int]] = []

    @property
    def tags(self) -> tuple[int, ...]:
        """See ``GraphDevice``."""
        return self._archive.tags

    @property
    def spent_ms(self) -> dict[str, float]:
        """See ``GraphDevice``."""
        return self._archive.spent_ms

    def load(self, size: int) -> None:
        """See ``GraphDevice``."""
        self._archive.load(size)

    def check(self, size: int) -> int:
        """See ``GraphDevice``."""
        # What has memory when the first one is made keeps it for as long as there are any.
        self._known = self._known or known_addresses(self._memory)
        return self._archive.check_addresses(self._known, *_slot_of(self._memory), size)

    def build(self, size: int, between: Callable[[], None]) -> None:
        """See ``GraphDevice``."""
        while self._archive.advance(size, self._uploads.cuda_stream):
            between()
        self._uploads.synchronize()

    def launch(self, size: int) -> None:
        """See ``GraphDevice``."""
        self._archive.launch(size, torch.cuda.current_stream(self._device).cuda_stream)

    def check_list(self, size: int) -> None:
        """See ``GraphDevice``."""
        self._archive.check_list(size)

    def launch_list(self, size: int) -> None:
        """See ``GraphDevice``."""
        self._archive.launch_list(size, torch.cuda.current_stream(self._device).cuda_stream)

    def close(self) -> None:
        """See ``GraphDevice``."""
        torch.cuda.synchronize(self._device)
        self._archive.close()


@dataclass(frozen=True, slots=True)
class RestoredGraph:
    """A ``Replayable``."""

    device: GraphDevice
    size: int
    launched: Callable[[], None]
    """Told of each launch."""

    def replay(self) -> None:
        """See ``Replayable``."""
        self.device.launch(self.size)
        self.launched()

    def reset(self) -> None:
        """All graphs of an archive go together."""


def built(device: GraphDevice, size: int, between: Callable[[], None]) -> bool:
    """A graph is ready; False where there is no memory for it.

    Args:
        device: has it.
        size: its own.
        between: see ``GraphDevice.build``.

    Raises:
        NativeError: the driver refuses it.
    """
    try:
        device.build(size, between)
    except OutOfMemory as error:
        log.warning("no memory for a graph", action="graph_left_out", size=size, why=str(error))
        return False
    return True


def known_addresses(memory: StageMemory) -> list[tuple[int, int]]:
    """Where a stage's steps may read and write, [start, stop) in order: in what has memory; in KV,
    which comes and goes, in the first block of a layer's keys and of its values.
    """
    arena, layout = memory.arena, memory.layout
    assert isinstance(arena, CudaArena)
    first, stop = _slot_of(memory)
    base = arena.address
    backed = arena.native_arena.backed
    kv = [
        extent
        for layer in range(memory.stage.start, memory.stage.stop)
        for extent in layout.kv(layer, 0, 1)
    ]
    known = [
        *((base + start, base + end) for start, end in backed(first - base, _kv_start(memory))),
        *((first + one.start, first + one.stop) for one in kv),
        *(
            (base + start, base + end)
            for start, end in backed(first - base + layout.steps.start, stop - base)
        ),
    ]
    return _joined(known)


def _kv_start(memory: StageMemory) -> int:
    """In the arena."""
    return memory.slot_number * memory.arena.slot_bytes + memory.layout.keys(0)


def _slot_of(memory: StageMemory) -> tuple[int, int]:
    arena = memory.arena
    assert isinstance(arena, CudaArena)
    first = arena.address + memory.slot_number * arena.slot_bytes
    return first, first + arena.slot_bytes


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without ranges that touch."""
    made: list[tuple[int, int]] = []
    for start, stop in ranges:
        if made and made[-1][1] == start:
            made[-1] = made[-1][0], stop
        else:
            made.append((start, stop))
    return made
