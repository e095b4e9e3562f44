"""A host pool with models of whole slabs, and a driver that is a fake, for what is pinned."""

import mmap
import threading
from typing import Any

import numpy as np

from pilotlight.common.clock import ManualClock
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.pool_slabs import PoolSlabs
from pilotlight.engine.cuda.stream import PinnedSlabs
from pilotlight.engine.errors import EngineFailed
from pilotlight.policy.ids import Digest
from pilotlight.worker.engine_child.pins import Pins

UNIT_BYTES = 64 * 1024
SLAB_BYTES = 2 * UNIT_BYTES
POOL_BYTES = 64 * UNIT_BYTES
FIRST = 2 * 1024 * 1024 // SLAB_BYTES
"""The slab in which the data begins."""
OURS, COLD, HOT, LATE = (Digest(f"{number:064x}") for number in range(1, 5))
JOIN_S = 5.0


class Driver:
    """The streamer of a device: notes which slabs it pins, one at a time where it is not let."""

    def __init__(self) -> None:
        self.base = 0
        self.pinned: list[int] = []
        self.taken_back: list[int] = []
        self.refuses = False
        self.asked, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.may = threading.Semaphore(1 << 20)

    def slabs(self, pool: memoryview, slab_bytes: int) -> PinnedSlabs:
        self.base = self._address(pool)
        return PinnedSlabs(self, pool, slab_bytes)  # type: ignore[arg-type] - of a streamer it needs these alone

    def pin(self, buffer: memoryview) -> None:
        if self.refuses:
            raise EngineFailed("no")
        self.asked.release()
        assert self.may.acquire(timeout=JOIN_S)
        self.pinned.append((self._address(buffer) - self.base) // SLAB_BYTES)
        self.done.release()

    def unpin(self, buffer: memoryview) -> None:
        self.taken_back.append((self._address(buffer) - self.base) // SLAB_BYTES)

    def _address(self, buffer: memoryview) -> int:
        return np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]


def fill(
    host: HostPool, clock: ManualClock, model: Digest, slabs: int, *, ready: bool = True
) -> PartImage:
    """A part that takes whole slabs."""
    clock.advance(1)
    image = host.reserve(model, 0, slabs * SLAB_BYTES, 2)
    half = image.image_bytes // 2
    host.enter_chunk(image, (0, half), model)
    if ready:
        host.enter_chunk(image, (half, image.image_bytes), model)
    return image


def mapped(host: HostPool) -> memoryview:
    """As an engine's process maps the pool."""
    with host.path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def make(driver: Driver, **options: Any) -> Pins:
    return Pins(driver.slabs, SLAB_BYTES, held_of=PoolSlabs.of, **options)


def numbers(host: HostPool, image: PartImage) -> list[int]:
    start = host.file_offset(image)
    return list(range(start // SLAB_BYTES, -(-(start + image.image_bytes) // SLAB_BYTES)))
