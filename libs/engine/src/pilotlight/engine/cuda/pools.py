"""torch's caching allocator on memory of the arena: for eager work, and for graphs."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from pilotlight.engine.device.arena_protocol import TorchMemory
from pilotlight.engine.faults import out_of_memory
from pilotlight.native.device import Device, Pool


class TorchPool:
    """A region of an arena as a ``torch.cuda.MemPool``. torch's default allocator knows nothing of
    it.
    """

    def __init__(self, pool: Pool, device: Device) -> None:
        self._pool = pool
        self._library_path = str(device.library.path)
        self._ordinal = device.ordinal
        self._torch: torch.cuda.MemPool | None = None
        self._allocator: torch.cuda.memory.CUDAPluggableAllocator | None = None

    @property
    def id(self) -> tuple[int, int]:
        """What ``torch.cuda.graph(..., pool=...)`` takes, within ``selected``."""
        return self._mem_pool().id

    @property
    def mapped_bytes(self) -> int:
        """Bytes of its addresses that have memory."""
        return self._pool.mapped_bytes

    @property
    def sequence(self) -> tuple[int, int]:
        """How many segments torch took so far, and a hash over their lengths and places."""
        return self._pool.sequence

    @property
    def memory(self) -> Pool:
        """Where torch's segments come from."""
        return self._pool

    @contextmanager
    def selected(self) -> Generator[None]:
        """Within it, segments that torch takes for this pool come from its region.

        One pool at a time.
        """
        with self._pool.selected():
            yield

    @contextmanager
    def use(self) -> Generator[None]:
        """Within it, what this thread allocates with torch comes from this pool."""
        with (
            self._pool.selected(),
            torch.cuda.use_mem_pool(self._mem_pool(), torch.device("cuda", self._ordinal)),
        ):
            yield

    def trim(self) -> None:
        """See ``TorchMemory.trim``.

        What lies in it stays where it is, and its memory comes back with the next ``trim``.
        """
        if self._allocator is None or not self._pool.is_open:
            return
        clear_cublas_workspaces()  # They were taken while the pool was in use.
        self._torch = None  # torch returns the segments in which nothing lies
        if self._pool.mapped_bytes:
            # Of those before it something lay in, too.
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Gives its memory back; a second time it does nothing.

        Raises:
            NativeError: tensors lie in it.
        """
        self.trim()
        self._pool.close()

    def _mem_pool(self) -> torch.cuda.MemPool:
        if self._allocator is None:
            self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
                self._library_path, "pilotlight_pool_malloc", "pilotlight_pool_free"
            )
        if self._torch is None:
            self._torch = torch.cuda.MemPool(self._allocator.allocator())
        return self._torch


def clear_cublas_workspaces() -> None:
    """Frees the workspace that cuBLAS keeps for each stream: it takes a new one, from the pool in
    use, when it needs one.

    There is no public way; torch's own compiler does the same around its captures.
    """
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage] - see above


def run_in(memory: TorchMemory, step: Callable[[], Tensor]) -> Tensor:
    """Runs a step that takes its memory there; once more, after ``trim``, if there is none: what
    fragments left over may do.

    While a pool is in use, torch frees nothing of what it keeps to make room in it.
    """
    try:
        with memory.use():
            return step()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Not while the error is handled: it holds the step's tensors.
    memory.trim()
    with memory.use():
        return step()
