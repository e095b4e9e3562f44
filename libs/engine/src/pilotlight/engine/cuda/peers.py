"""Device memory that two engines of one host have mapped, each for its own device: a
``DeviceMemory``.

::

    process A, device 0                                    process B, device 1
    addresses [ window )                                   addresses [ window )
                  |                                                      |
    device 0  [ handle ) <--- the same memory, by its descriptor --------'      read and written over NVLink

Copies have a stream of their own: they wait for nothing that the engine has its device do
meanwhile.
"""

import torch
from torch import Tensor

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda.dlpack import dlpack_kind
from pilotlight.engine.errors import EngineFailed
from pilotlight.engine.faults import out_of_memory
from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.library import NativeError

_DLPACK_UINT, _BITS = 1, 8

LEFT_BYTES = 1 << 30
"""Of a device's free memory, for batches: what is shared beyond that would end them."""


class PeerMemory:
    """What an engine can do with memory of its device, and with that of others."""

    def __init__(self, native: Device, device: torch.device) -> None:
        """Nothing is mapped yet.

        Args:
            native: the device by its driver.
            device: the same, by torch.
        """
        self._native = native
        self._device = device

    def share(self, num_bytes: int) -> "tuple[PeerWindow, int]":
        """See ``DeviceMemory.share``; whole granules."""
        arena: DeviceArena | None = None
        free_bytes, _ = self._native.memory()
        if free_bytes - num_bytes < LEFT_BYTES:
            raise EngineFailed(
                f"{free_bytes} bytes are free on {self._device}: steps need the rest"
            )
        try:
            arena = DeviceArena(self._native, num_bytes)
            arena.back(0, num_bytes, num_bytes)
            descriptor, _, _ = arena.export(0)
        except NativeError as error:
            raise self._refused(arena, num_bytes, error) from error
        return PeerWindow(arena, num_bytes, self._device), descriptor

    def map(self, descriptor: int, num_bytes: int) -> "PeerWindow":
        """See ``DeviceMemory.map``; whole granules."""
        arena: DeviceArena | None = None
        try:
            arena = DeviceArena(self._native, num_bytes)
            arena.adopt(0, num_bytes, descriptor)
        except NativeError as error:
            raise self._refused(arena, num_bytes, error) from error
        return PeerWindow(arena, num_bytes, self._device)

    def _refused(
        self, arena: DeviceArena | None, num_bytes: int, error: NativeError
    ) -> EngineFailed:
        if arena is not None:
            arena.close(done=True)
        return EngineFailed(f"{num_bytes} bytes cannot be shared on {self._device}: {error}")


class PeerWindow:
    """A ``Window``."""

    def __init__(self, arena: DeviceArena, num_bytes: int, device: torch.device) -> None:
        self._arena = arena
        kind, ordinal = dlpack_kind(device)
        self._all = torch.from_dlpack(
            arena.capsule(0, (num_bytes,), _DLPACK_UINT, _BITS, kind, ordinal)
        )
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def write(self, offset: int, payload: Tensor) -> None:
        """See ``Window.write``."""
        there = self._all[offset : offset + payload.nbytes]
        if self._stream is None:
            there.copy_(payload)
            return
        with torch.cuda.stream(self._stream):
            there.copy_(payload, non_blocking=True)
        self._stream.synchronize()

    def read(self, offset: int, num_bytes: int) -> Tensor:
        """See ``Window.read``."""
        there = self._all[offset : offset + num_bytes]
        if self._stream is None:
            return there.clone()
        # The tensor is used on the stream that is current here: its memory is not given to another
        # one before that has done with it.
        user = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            try:
                own = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                own = torch.empty(num_bytes, dtype=torch.uint8)
            own.copy_(there, non_blocking=True)
        if own.is_cuda:
            own.record_stream(user)
        self._stream.synchronize()
        return own

    def view(self, extent: Extent) -> Tensor:
        """Bytes of it where they lie, until it is closed."""
        return self._all[extent.start : extent.stop]

    def close(self) -> None:
        """See ``Window.close``; each copy was waited for."""
        self._arena.close(done=True)
