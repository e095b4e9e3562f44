"""How CUDA devices of one host copy from each other's arenas: a ``Lending``.

::

    process A, device 0                              process B, device 1
    arena [ ..[ part )..[ part ).. )                 arena [ ..[ part ).. )
               | the chunk's handle, by a descriptor          ^ copied on a stream of its own
    device 0  [ chunk ) <------- mapped aside ------- [ window )
"""

import os
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda.peers import PeerMemory, PeerWindow
from pilotlight.engine.device.lending import SUM_ROW_BYTES, Lent
from pilotlight.engine.errors import EngineError, EngineFailed
from pilotlight.engine.faults import out_of_memory
from pilotlight.native.device import Device

_WORD_BYTES = 8


class Exporting(Protocol):
    """What is asked of an arena for it (``CudaArena``)."""

    native: Device

    @property
    def device(self) -> torch.device: ...
    def export(self, offset: int) -> tuple[int, Extent]: ...
    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


class CudaLending:
    """Of one arena, for one thread."""

    def __init__(self, arena: Exporting) -> None:
        """Nothing is lent yet.

        Args:
            arena: the device's.
        """
        self._arena = arena
        self._peers = PeerMemory(arena.native, arena.device)

    @cached_property
    def _copying(self) -> "torch.cuda.Stream | None":
        """What is copied and summed up goes here: one after the other, beside batches."""
        return _stream(self._arena.device)

    @cached_property
    def _looking(self) -> "torch.cuda.Stream | None":
        """What is asked of it waits for no copy."""
        return _stream(self._arena.device)

    def export(self, extent: Extent) -> list[Lent]:
        """See ``Lending.export``."""
        lent: list[Lent] = []
        start = extent.start
        try:
            while start < extent.stop:
                descriptor, chunk = self._arena.export(start)
                stop = min(chunk.stop, extent.stop)
                wanted = Extent(start - chunk.start, stop - chunk.start)
                lent.append(Lent(descriptor, chunk.num_bytes, wanted))
                start = stop
        except EngineError:
            for one in lent:
                os.close(one.descriptor)
            raise
        return lent

    def sum(self, extent: Extent) -> "CudaSum":
        """See ``Lending.sum``."""
        with _on(self._copying), _refusing():
            return CudaSum(self._bytes(extent), self._copying, self._looking)

    def borrow(self, lent: Sequence[Lent], extent: Extent) -> "CudaBorrowed":
        """See ``Lending.borrow``."""
        num_bytes = sum(one.wanted.num_bytes for one in lent)
        if num_bytes != extent.num_bytes or any(
            not 0 <= one.wanted.start < one.wanted.stop <= one.num_bytes for one in lent
        ):
            raise EngineFailed(f"{num_bytes} bytes are lent for {extent.num_bytes}")
        windows: list[PeerWindow] = []
        try:
            # Those that were mapped before one fails are among them.
            windows.extend(self._peers.map(one.descriptor, one.num_bytes) for one in lent)
            with _on(self._copying), _refusing():
                return CudaBorrowed(windows, self._copy(windows, lent, extent))
        except EngineError:
            if self._copying is not None:
                self._copying.synchronize()
            for window in windows:
                window.close()
            raise

    def _copy(
        self, windows: Sequence[PeerWindow], lent: Sequence[Lent], extent: Extent
    ) -> "CudaSum":
        there, start = self._bytes(extent), 0
        for window, one in zip(windows, lent, strict=True):
            stop = start + one.wanted.num_bytes
            there[start:stop].copy_(window.view(one.wanted), non_blocking=True)
            start = stop
        return CudaSum(there, self._copying, self._looking)

    def peek(self, tensors: Sequence[Tensor], num_bytes: int) -> bytes:
        """See ``Lending.peek``."""
        with torch.inference_mode(), _on(self._looking), _refusing():
            rows = [tensor.view(-1).view(torch.uint8)[-num_bytes:] for tensor in tensors]
            return torch.cat(rows).cpu().numpy().tobytes() if rows else b""

    def _bytes(self, extent: Extent) -> Tensor:
        return self._arena.tensor(extent.start, (extent.num_bytes,), torch.uint8)


class CudaSum:
    """See ``Sum``."""

    def __init__(
        self, row: Tensor, stream: "torch.cuda.Stream | None", looking: "torch.cuda.Stream | None"
    ) -> None:
        """Begins on the stream that is current.

        Args:
            row: bytes.
            stream: the current one.
            looking: where its value is asked for.
        """
        self._looking = looking
        self._sum = sum_of(row)
        self._done = None if stream is None else stream.record_event()

    @property
    def ready(self) -> bool:
        """See ``Sum.ready``."""
        return self._done is None or self._done.query()

    @property
    def value(self) -> int:
        """See ``Sum.value``."""
        self.wait()
        with _on(self._looking):
            return int(self._sum.item())

    def wait(self) -> None:
        """Until it is ready."""
        if self._done is not None:
            self._done.synchronize()


class CudaBorrowed:
    """See ``Borrowed``."""

    def __init__(self, windows: Sequence[PeerWindow], total: CudaSum) -> None:
        self._windows = windows
        self._sum = total

    @property
    def ready(self) -> bool:
        """See ``Sum.ready``."""
        return self._sum.ready

    @property
    def value(self) -> int:
        """See ``Sum.value``."""
        return self._sum.value

    def close(self) -> None:
        """See ``Borrowed.close``."""
        self._sum.wait()
        windows, self._windows = self._windows, ()
        for window in windows:
            window.close()


@torch.inference_mode()
def sum_of(row: Tensor) -> Tensor:
    """Sums bytes up as 64-bit words, each row of them weighted by an odd number of its own.

    Args:
        row: whole rows of ``SUM_ROW_BYTES``.
    """
    rows = row.view(torch.int64).view(-1, SUM_ROW_BYTES // _WORD_BYTES).sum(dim=1)
    weights = torch.arange(len(rows), dtype=torch.int64, device=row.device).mul_(2).add_(1)
    return rows.mul_(weights).sum()


@contextmanager
def _refusing() -> Generator[None]:
    """Within it, a device without memory for what torch takes beside is one that does not lend."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise EngineFailed(f"the device has no memory to lend or borrow: {error}") from error


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[None]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    return torch.cuda.Stream(device) if device.type == "cuda" else None
