"""An arena that is one torch tensor: what the engine computes on a device does not depend on where its memory comes from."""

from math import prod

import torch
from torch import Tensor

from pilotlight.engine.core.extents import Extent, ExtentSet
from pilotlight.engine.device.arena_protocol import Slot
from pilotlight.engine.device.copying import HostCopier


class TorchArena:
    """See ``Arena``. All of its memory is taken at once."""

    granule_bytes = 4096
    pool_bytes = 0
    copier = HostCopier()  # torch copies to any device

    def __init__(self, device: torch.device, *, num_slots: int, slot_bytes: int) -> None:
        self.device = device
        self.slot_bytes = slot_bytes
        self.capacity_bytes = num_slots * slot_bytes
        self._memory = torch.empty(self.capacity_bytes, dtype=torch.uint8, device=device)
        self._free = list(range(num_slots))
        self._backed = ExtentSet()

    @property
    def backed_bytes(self) -> int:
        return self._backed.num_bytes

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def open_slot(self) -> Slot:
        return Slot(self, self._free.pop(0))

    def close_slot(self, number: int) -> None:
        first, stop = number * self.slot_bytes, (number + 1) * self.slot_bytes
        for extent in self._backed:
            inside = Extent(max(first, extent.start), min(stop, extent.stop))
            if inside.start < inside.stop:
                self.unback(inside)
        self._free.append(number)

    def back(self, extent: Extent, *, divisible: bool = False) -> None:
        self._backed.add(extent)

    def unback(self, extent: Extent) -> None:
        self._backed.remove(extent)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
