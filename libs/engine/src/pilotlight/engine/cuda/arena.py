"""Device memory at fixed addresses: the arena of a CUDA device.

::

    0x600000000000
    [ slot 0 ................................... )[ slot 1 )...[ slot 15 )[ workspace )
    [ parameters )[ KV, as far as granted )[ steps )[ graph pool )          torch's own, for eager work

The slots' canonical layout gives every tensor of a model the same address in every process.
Parameters and KV are no allocations of torch's: tensors are made over addresses. torch takes what
it needs beside them from pools, and its default allocator is left alone.
"""

from collections.abc import Sequence

import structlog
import torch
from torch import Tensor

from pilotlight.engine.core.extents import Extent, ExtentSet
from pilotlight.engine.core.slots import SlotTable
from pilotlight.engine.cuda.dlpack import DLPACK_TYPES, dlpack_kind
from pilotlight.engine.cuda.lending import CudaLending
from pilotlight.engine.cuda.pools import TorchPool
from pilotlight.engine.cuda.stream import Streamer
from pilotlight.engine.device.arena_protocol import Scratch, Slot
from pilotlight.engine.errors import EngineError, EngineFailed, NoRoom
from pilotlight.native.device import LIBCUDA, Device, DeviceArena, DriverCalls, Pool
from pilotlight.native.library import AddressTaken, NativeError, NativeUnavailable, OutOfMemory
from pilotlight.native.started import NativeStart
from pilotlight.policy.model import SLOTS

log = structlog.get_logger()

SLOT_BYTES = 256 << 30
NUM_SLOTS = SLOTS
ADDRESSES = (0x6000_0000_0000, 0x5000_0000_0000, 0x4000_0000_0000, 0x3000_0000_0000)
"""Where arenas are: the first is the one that artifacts are made for, the others are for processes
where something else is there."""
WITNESS_ADDRESSES = (0x51A3_4640_0000, 0x41A3_4640_0000)
"""Where the arena of a process is that witnesses what another one records: the distance is no power
of two, as differences of other words often are."""
POOL_BYTES = 16 << 30
"""Addresses of a slot's graph pool."""
STEPS_BYTES = 1 << 30
"""Addresses for what captured steps of a slot's model read and write."""
CHUNK_BYTES = 512 << 20
"""Longest chunks. To map and unmap one costs nearly the same whatever its length; and what has been
KV is used again for parameters if it is no shorter than an eighth of this, as chunks of it are."""
POOL_CHUNK_BYTES = 32 << 20


class CudaArena:
    """Owns the address range of one device and knows which of its bytes are backed. See ``Arena``.

    Taking memory away waits until the device has done what was asked of it before. The memory
    stays with the arena, for what needs some next (``most_idle_bytes``).
    """

    pool_bytes = POOL_BYTES
    steps_bytes = STEPS_BYTES
    kv_chunk_bytes = CHUNK_BYTES
    whole_granules = True

    def __init__(
        self,
        ordinal: int = 0,
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
        capacity_bytes: int | None = None,
        addresses: tuple[int, ...] = ADDRESSES,
        driver: str = LIBCUDA,
        device: torch.device | None = None,
        started: NativeStart | None = None,
    ) -> None:
        """Takes the addresses, at the first of the places where nothing else is.

        Args:
            ordinal: which device.
            num_slots: how many models fit side by side.
            slot_bytes: addresses of each; whole granules.
            capacity_bytes: the most bytes that are backed at once; what is free on the device now,
                if not given.
            addresses: places to try, in order.
            driver: the driver's library.
            device: where tensors say they are; the CUDA device, if not given.
            started: what the library has begun by itself; its arena is this one, if there is any.

        Raises:
            NoRoom: something else is at each of the places.
            EngineFailed: there is no native library, no driver, or no such device.
        """
        self.device = device or torch.device("cuda", ordinal)
        self.slot_bytes = slot_bytes
        try:
            self.native = Device(ordinal, driver)
            num_bytes = (num_slots + 1) * slot_bytes
            taken = None if started is None else _taken(self.native, num_bytes, started)
            self.native_arena = taken or _reserve(self.native, num_bytes, addresses)
            self.capacity_bytes = capacity_bytes or self.native.memory()[0]
        except (NativeUnavailable, NativeError) as error:
            raise EngineFailed(f"no arena on device {ordinal}: {error}") from error
        self.granule_bytes = self.native_arena.granule_bytes
        self.canonical = self.native_arena.address == addresses[0]
        """It lies where artifacts expect it; otherwise nothing that holds addresses can be restored
        here."""
        self._slots = SlotTable(num_slots)
        self._backed = ExtentSet()
        self._left_bytes = 0
        first, stop = num_slots * slot_bytes, (num_slots + 1) * slot_bytes
        self.workspace = TorchPool(
            Pool(self.native, self.native_arena, first, stop - POOL_BYTES, POOL_CHUNK_BYTES),
            self.native,
        )
        """For torch's allocations in eager work of all models."""
        self._graph_memory = Pool(
            self.native, self.native_arena, stop - POOL_BYTES, stop, POOL_CHUNK_BYTES
        )
        """Gives no memory itself: the graph pools that come and go belong to its group."""
        self.started = started if taken else None
        """See ``native.started``: graphs for these addresses."""
        self._streamer: Streamer | None = None
        self.lending = CudaLending(self)
        """See ``Arena.lending``."""

    @property
    def copier(self) -> Streamer:
        """What brings parameters there; its thread starts with the first use."""
        if self._streamer is None:
            self._streamer = Streamer(self.native, self.device)
        return self._streamer

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.native_arena.address

    @property
    def backed_bytes(self) -> int:
        """Bytes of all slots that have memory behind them, without graph pools."""
        return self._backed.num_bytes

    @property
    def physical_bytes(self) -> int:
        """Device memory that it holds, workspace and graph pools included."""
        return self.native_arena.physical_bytes

    @property
    def idle_bytes(self) -> int:
        """Device memory that it keeps for what needs some next; no part of ``physical_bytes``."""
        return self.native_arena.idle_bytes

    @property
    def most_idle_bytes(self) -> int:
        """How much of that it may keep: with what is backed, no more than the capacity, so that
        torch, the driver and what is left to another process have theirs.
        """
        return max(0, self.capacity_bytes - self.backed_bytes - self._left_bytes)

    @property
    def spare_bytes(self) -> int:
        """See ``Arena.spare_bytes``."""
        still = self.capacity_bytes - self.backed_bytes - self.idle_bytes
        return self.native.memory()[0] - max(0, still)

    @property
    def driver_calls(self) -> DriverCalls:
        """What it has asked of the driver so far."""
        return self.native_arena.driver_calls

    @property
    def free_slots(self) -> int:
        """How many more models could be opened."""
        return self._slots.free

    def open_slot(self, home: int | None = None) -> Slot:
        """See ``Arena.open_slot``."""
        return Slot(self, self._slots.take(home))

    def close_slot(self, number: int) -> None:
        """Makes a slot free again; its memory goes back to the device.

        Its graph pool is closed before.
        """
        self.unback(*self._backed.within(number * self.slot_bytes, (number + 1) * self.slot_bytes))
        self._slots.give_back(number)

    def back(self, *extents: Extent) -> None:
        """See ``Arena.back``."""
        num_bytes = sum(extent.num_bytes for extent in extents)
        if self.backed_bytes + num_bytes > self.capacity_bytes:
            raise NoRoom(
                f"the device refuses {num_bytes} bytes: {self.backed_bytes} of {self.capacity_bytes} are in use already"
            )
        before, held = tuple(self._backed), sorted(one for one in extents if one.num_bytes)
        try:
            for extent in held:
                self._backed.add(extent)
            if held:
                self._map(held)
        except EngineError:
            self._backed = ExtentSet(before)
            raise
        finally:
            self.native_arena.keep(self.most_idle_bytes)

    def _map(self, extents: Sequence[Extent]) -> None:
        """One call for all of them: the fewer times a device's tables change, the less."""
        try:
            try:
                self.native_arena.back_all(extents, CHUNK_BYTES)
            except OutOfMemory:
                # torch may keep for itself what is missing, from large batches or tensors that were
                # converted on the device.
                self.trim()
                self.native_arena.back_all(extents, CHUNK_BYTES)
        except NativeError as error:
            num_bytes = sum(extent.num_bytes for extent in extents)
            refused = f"the device refuses {num_bytes} bytes: {error}"
            raise (NoRoom if isinstance(error, OutOfMemory) else EngineFailed)(refused) from error

    def unback(self, *extents: Extent) -> None:
        """See ``Arena.unback``."""
        before, held = tuple(self._backed), [extent for extent in extents if extent.num_bytes]
        try:
            for extent in held:
                self._backed.remove(extent)
        except EngineFailed:
            self._backed = ExtentSet(before)
            raise
        if not held:
            return
        self.native_arena.keep(self.most_idle_bytes)
        try:
            self.native_arena.unback(*sorted(held))
        except NativeError as error:
            self._backed = ExtentSet(
                Extent(start, stop)
                for extent in before
                for start, stop in self.native_arena.backed(*extent)
            )
            num_bytes = sum(extent.num_bytes for extent in held)
            raise EngineFailed(
                f"the device does not take {num_bytes} bytes back: {error}"
            ) from error

    def trim(self) -> None:
        """See ``Arena.trim``."""
        self.workspace.trim()
        torch.cuda.empty_cache()
        self.native_arena.settle(0)

    def leave(self, num_bytes: int) -> None:
        """See ``Arena.leave``."""
        self._left_bytes = num_bytes
        self.native_arena.keep(self.most_idle_bytes)
        if num_bytes:
            try:
                self.trim()
            except NativeError as error:
                raise EngineFailed(f"the device does not take memory back: {error}") from error

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``Arena.tensor``."""
        code, bits = DLPACK_TYPES[dtype]
        kind, ordinal = dlpack_kind(self.device)
        return torch.from_dlpack(
            self.native_arena.capsule(offset, shape, code, bits, kind, ordinal)
        )

    def export(self, offset: int) -> tuple[int, Extent]:
        """A file descriptor of the memory behind a byte, for another process, and which bytes that
        is.

        The caller closes it.

        Raises:
            EngineFailed: there is none.
        """
        try:
            fd, start, stop = self.native_arena.export(offset)
        except NativeError as error:
            raise EngineFailed(f"nothing to export at {offset}: {error}") from error
        return fd, Extent(start, stop)

    def adopt(self, extent: Extent, fd: int) -> None:
        """Puts memory that another process exported behind as many bytes here, in place of
        ``back``.

        The descriptor stays the caller's.

        Raises:
            EngineFailed: some of them are backed already, or the descriptor is of other memory.
        """
        self._backed.add(extent)
        try:
            self.native_arena.adopt(extent.start, extent.num_bytes, fd)
        except NativeError as error:
            self._backed.remove(extent)
            raise EngineFailed(f"the device does not map exported memory: {error}") from error

    def scratch(self, number: int) -> Scratch:
        """See ``Arena.scratch``."""
        return Scratch(self.workspace, self.graph_pool(number))

    def graph_pool(self, number: int) -> TorchPool:
        """The pool for a slot's graphs.

        All graph pools share their memory: models run one at a time.
        """
        stop = (number + 1) * self.slot_bytes
        return TorchPool(
            Pool(
                self.native,
                self.native_arena,
                stop - POOL_BYTES,
                stop,
                POOL_CHUNK_BYTES,
                self._graph_memory,
            ),
            self.native,
        )

    def close(self) -> None:
        """Gives everything back, and the addresses. No tensor over it may be used any more."""
        if self._streamer is not None:
            self._streamer.close()
        self.workspace.close()
        self._graph_memory.close()
        self.native_arena.close()


def _taken(device: Device, num_bytes: int, started: NativeStart) -> DeviceArena | None:
    """The arena that the library has opened by itself; None: it is no such one."""
    if started.plan.num_bytes != num_bytes:
        return None
    try:
        return started.arena(device)
    except NativeError as error:
        log.warning("no arena was begun", action="start_not_taken", why=str(error))
        return None


def _reserve(device: Device, num_bytes: int, addresses: tuple[int, ...]) -> DeviceArena:
    for address in addresses:
        try:
            return DeviceArena(device, num_bytes, address)
        except AddressTaken:
            continue
    raise NoRoom(
        f"something else is at each of {', '.join(map(hex, addresses))}, where {num_bytes} bytes of addresses were wanted"
    )
