"""Graphs of an archive, on a device."""

from dataclasses import dataclass
from typing import Protocol

import torch

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.graphs import GraphArchive


class GraphDevice(Protocol):
    """Graphs of one archive, on a device."""

    @property
    def tags(self) -> tuple[int, ...]:
        """Rows of all that it has."""
        ...

    def build(self, rows: int) -> None:
        """Makes one ready to be launched.

        Raises:
            NativeError: the driver refuses it.
        """
        ...

    def launch(self, rows: int) -> None:
        """Runs one that is ready, behind what this thread asked of the device before."""
        ...

    def close(self) -> None:
        """Gives all of them back."""
        ...


class ArchiveOnDevice:
    """A ``GraphDevice``, by the driver."""

    def __init__(self, memory: StageMemory, archive: bytes) -> None:
        """Reads the archive.

        Raises:
            AddressTaken: the arena lies elsewhere than the one that the graphs were made for.
            NativeError: the archive does not hold together.
        """
        arena = memory.arena
        assert isinstance(arena, CudaArena)
        self._device = arena.device
        self._archive = GraphArchive(arena.native, archive, arena.native_arena)
        self._uploads = torch.cuda.Stream(arena.device)

    @property
    def tags(self) -> tuple[int, ...]:
        """See ``GraphDevice``."""
        return self._archive.tags

    def build(self, rows: int) -> None:
        """See ``GraphDevice``."""
        self._archive.build(rows, self._uploads.cuda_stream)
        self._uploads.synchronize()

    def launch(self, rows: int) -> None:
        """See ``GraphDevice``."""
        self._archive.launch(rows, torch.cuda.current_stream(self._device).cuda_stream)

    def close(self) -> None:
        """See ``GraphDevice``."""
        torch.cuda.synchronize(self._device)
        self._archive.close()


@dataclass(frozen=True, slots=True)
class RestoredGraph:
    """A ``Replayable``."""

    device: GraphDevice
    rows: int

    def replay(self) -> None:
        """See ``Replayable``."""
        self.device.launch(self.rows)

    def reset(self) -> None:
        """All graphs of an archive go together."""
