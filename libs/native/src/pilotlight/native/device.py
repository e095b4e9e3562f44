"""A device, its memory at fixed addresses, and pools of it for torch's allocator."""

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass, fields
from typing import NamedTuple

from pilotlight.native.library import MISUSED, Library, NativeError, library, out

LIBCUDA = "libcuda.so.1"
MOST_EVENTS = 4096
"""As many segments of a pool are known that were taken or given back."""


@dataclass(frozen=True, slots=True)
class DriverCalls:
    """What an arena has asked of the driver so far."""

    created: int
    """Pieces of memory."""
    mapped: int
    unmapped: int
    access_set: int
    released: int
    waited: int
    """For the device to have done what was asked of it before."""
    copied: int
    """Windows over what stays of chunks that are cut."""
    create_ns: int
    """What those of them took that something waited for."""
    map_ns: int
    unmap_ns: int
    access_ns: int
    release_ns: int
    wait_ns: int
    copy_ns: int
    behind_ns: int
    """What the arena's thread took for the rest of them, while others went on."""
    moved_bytes: int
    """Copied to new memory, because other parts of their chunk were taken away."""


class Device:
    """A CUDA device, by the context that torch uses, too."""

    def __init__(self, ordinal: int, driver: str = LIBCUDA) -> None:
        """Opens the driver and the device, and makes its context current in this thread.

        Raises:
            NativeUnavailable: there is no library.
            NoDriver: there is no driver, or it does not start.
            NativeError: there is no such device.
        """
        self.library: Library = library()
        self.ordinal = ordinal
        self.library.call("driver_open", driver.encode())
        pointer, context = out(c_void_p)
        self.library.call("device_open", ordinal, pointer)
        self.context = context()

    def memory(self) -> tuple[int, int]:
        """Free and all bytes of the device's memory."""
        (free, free_bytes), (total, total_bytes) = out(c_uint64), out(c_uint64)
        self.library.call("device_memory", self.context, free, total)
        return free_bytes(), total_bytes()


class DeviceArena:
    """An address range of a device, and memory behind parts of it.

    All places are bytes from its beginning, whole granules.
    """

    def __init__(self, device: Device, num_bytes: int, address: int = 0, pointer: int = 0) -> None:
        """Reserves the addresses.

        Args:
            device: whose memory lies behind them.
            num_bytes: whole granules.
            address: there and nowhere else; anywhere, if 0.
            pointer: to the library's own arena, which has them already.

        Raises:
            AddressTaken: something else is there.
            NativeError: the driver has no such addresses.
        """
        self._library = device.library
        place, arena = out(c_void_p)
        if not pointer:
            wanted = device.ordinal, address, num_bytes
            self._library.call("arena_open", device.context, *wanted, place)
        self.pointer = pointer or arena()
        self.num_bytes = num_bytes
        self.address = self._library.get("arena_address", self.pointer)
        self.granule_bytes = self._library.get("arena_granule", self.pointer)

    @property
    def physical_bytes(self) -> int:
        """Device memory behind it; what lies at several places counts once, and idle memory does
        not.
        """
        return self._library.get("arena_physical_bytes", self.pointer)

    @property
    def idle_bytes(self) -> int:
        """Device memory that is kept for what needs some next; nothing uses it."""
        return self._library.get("arena_idle_bytes", self.pointer)

    @property
    def driver_calls(self) -> DriverCalls:
        """What it has asked of the driver so far."""
        counts = (c_uint64 * len(fields(DriverCalls)))()
        self._library.get("arena_counts", self.pointer, counts)
        return DriverCalls(*counts)

    def back(self, start: int, stop: int, chunk_bytes: int) -> None:
        """Puts memory behind [start, stop), all or nothing: idle memory first, then new, in chunks
        of ``chunk_bytes`` and what is left.

        Raises:
            OutOfMemory: the device has no such memory, and not enough is idle.
            NativeError: it is backed already, at least in part.
        """
        self.back_all([(start, stop)], chunk_bytes)

    def back_all(self, ranges: Sequence[tuple[int, int]], chunk_bytes: int) -> None:
        """The same behind each of several ranges, all or nothing. No chunk lies in two of them, and
        what lies side by side gets its access in one call of the driver.

        Args:
            ranges: in order, none beginning before the one before it ends.
            chunk_bytes: of the longest chunks.

        Raises:
            OutOfMemory: the device has no such memory, and not enough is idle.
            NativeError: some of it is backed already, or they are not in order.
        """
        bounds = _bounds(ranges)
        self._library.call("arena_back", self.pointer, bounds, len(ranges), chunk_bytes)

    def unback(self, *ranges: tuple[int, int]) -> None:
        """Takes the memory behind each [start, stop) away, when the device has done what was asked
        of it before.

        What stays of a chunk is moved to memory of its own, and keeps its place. Whole chunks
        become idle, as far as that is kept: any ``back`` may have them at once.

        Args:
            ranges: in order, none beginning before the one before it ends.

        Raises:
            NativeError: they are not all backed, or cut through a chunk that is shared; or the
                driver refuses. Nothing has changed then, unless a full device had to give the
                memory first that is refused afterwards: ``backed`` tells.
        """
        self._library.call("arena_unback", self.pointer, _bounds(ranges), len(ranges))

    def keep(self, most_idle_bytes: int) -> None:
        """Keeps so many idle bytes at most from now on; none, unless told.

        A thread gives the driver what is beyond them, and unmaps where idle memory lay.
        """
        self._library.get("arena_keep", self.pointer, most_idle_bytes)

    def settle(self, idle_bytes: int) -> None:
        """Does what is left to the thread, and gives idle memory back to the driver down to so
        many bytes.

        Raises:
            NativeError: the driver refuses.
        """
        self._library.call("arena_settle", self.pointer, idle_bytes)

    def backed(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Which bytes of [start, stop) have memory, by the driver's answers, in order."""
        found: list[tuple[int, int]] = []
        (first, place), (last, end) = out(c_uint64), out(c_uint64)
        while start < stop:
            self._library.get("arena_next", self.pointer, start, first, last)
            if place() >= min(end(), stop):
                break
            found.append((place(), min(end(), stop)))
            start = end()
        return found

    def share(self, start: int, stop: int, source: int) -> None:
        """Puts the memory that lies behind as many bytes from ``source`` on behind [start, stop),
        too.

        Raises:
            NativeError: those are not whole chunks, or [start, stop) is backed already.
        """
        self._library.call("arena_share", self.pointer, start, stop, source)

    def export(self, place: int) -> tuple[int, int, int]:
        """A file descriptor of the chunk behind a place, for another process, and the chunk's
        [start, stop).

        The caller closes it.

        Raises:
            NativeError: nothing is behind it.
        """
        (number, fd), (first, start), (last, stop) = out(c_int), out(c_uint64), out(c_uint64)
        self._library.call("arena_export", self.pointer, place, number, first, last)
        return fd(), start(), stop()

    def adopt(self, start: int, num_bytes: int, fd: int) -> None:
        """Puts a chunk that another process exported behind a place.

        The descriptor stays the caller's.

        Raises:
            NativeError: it is none, or of another length, or something is there already.
        """
        self._library.call("arena_import", self.pointer, start, num_bytes, fd)

    def capsule(
        self,
        place: int,
        shape: tuple[int, ...],
        type_code: int,
        type_bits: int,
        device_type: int,
        ordinal: int,
    ) -> object:
        """A tensor over what lies at a place, as ``torch.from_dlpack`` takes it.

        Args:
            place: of its first byte.
            shape: of the tensor, which is row-major.
            type_code: DLPack's, of an element: integer, float, bfloat and so on.
            type_bits: of an element.
            device_type: DLPack's: CPU or CUDA.
            ordinal: of the device; 0 for a CPU.
        """
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        tensor = self._library.get(
            "dlpack",
            self.address + place,
            device_type,
            ordinal,
            type_code,
            type_bits,
            len(shape),
            sizes,
        )
        if not tensor:
            raise MemoryError("no memory for a tensor's description")
        return _new_capsule(tensor, b"dltensor", None)

    def close(self, *, done: bool = False) -> None:
        """Gives memory and addresses back. Nothing may use them any more.

        Args:
            done: the device does not, either; else it is waited for, and with it what other
                threads have under way there: a capture ends by that.
        """
        if self.pointer:
            self._library.get("arena_close", self.pointer, int(done))
            self.pointer = 0


def _bounds(ranges: Sequence[tuple[int, int]]) -> "ctypes.Array[c_uint64]":
    bounds = [bound for each in ranges for bound in each]
    return (c_uint64 * len(bounds))(*bounds)


class SegmentEvent(NamedTuple):
    """A segment of a pool was taken, or given back."""

    taken: bool
    address: int
    num_bytes: int


class Pool:
    """A region of an arena that torch's allocator takes segments from.

    The same calls give the same addresses in every process. Pools of one group share their memory:
    what lies in one is gone when another is used.
    """

    def __init__(
        self,
        device: Device,
        arena: DeviceArena,
        start: int,
        stop: int,
        chunk_bytes: int,
        group_of: "Pool | None" = None,
    ) -> None:
        """Makes a pool without any memory yet.

        Args:
            device: the arena's.
            arena: where it lies.
            start: its first byte in the arena.
            stop: the byte after its last; it is as long as whole chunks.
            chunk_bytes: what memory comes and goes in, whole granules.
            group_of: a pool of the same arena and chunks, whose memory it shares; None: its own.

        Raises:
            NativeError: these are not whole chunks.
        """
        self._library = device.library
        pointer, number = out(c_int)
        group = group_of.number if group_of is not None else -1
        self._library.call("pool_open", arena.pointer, start, stop, chunk_bytes, group, pointer)
        self.number = number()

    @property
    def is_open(self) -> bool:
        """It was not closed yet."""
        return self.number >= 0

    @contextmanager
    def selected(self) -> Generator[None]:
        """Within it, what torch asks for comes from this pool. One at a time in a process."""
        before = self._library.get("pool_select", self.number)
        try:
            yield
        finally:
            self._library.get("pool_select", before)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of it that have memory."""
        return self._state()[0]

    @property
    def sequence(self) -> tuple[int, int]:
        """How many segments it has given, and a hash over their lengths and places: equal in two
        processes that did the same.
        """
        return self._state()[1:]

    @property
    def events(self) -> tuple[SegmentEvent, ...]:
        """Every segment that it has given or got back, in order.

        Raises:
            NativeError: there were more than are kept.
        """
        pointer, count = out(c_uint64)
        found = (c_uint64 * (3 * MOST_EVENTS))()
        self._library.call("pool_events", self.number, found, MOST_EVENTS, pointer)
        if count() > MOST_EVENTS:
            raise NativeError(MISUSED, f"of {count()} segments not all are known any more")
        rows = (tuple(found[3 * row : 3 * row + 3]) for row in range(count()))
        return tuple(SegmentEvent(bool(taken), at, num_bytes) for taken, at, num_bytes in rows)

    def take(self, num_bytes: int) -> int:
        """A segment, as torch would have it; its address. For any thread.

        Raises:
            NativeError: there are no addresses for it, or no memory (``OutOfMemory``).
        """
        pointer, address = out(c_uint64)
        self._library.call("pool_take", self.number, num_bytes, pointer)
        return address()

    def give(self, address: int) -> None:
        """Gives a segment back that was taken, when the device is through with it."""
        self._library.get("pool_free", address, 0, 0, None)

    def _state(self) -> tuple[int, int, int]:
        (mapped, mapped_bytes), (count, allocations), (digest, sequence_hash) = (
            out(c_uint64),
            out(c_uint64),
            out(c_uint64),
        )
        self._library.call("pool_state", self.number, mapped, count, digest)
        return mapped_bytes(), allocations(), sequence_hash()

    def close(self) -> None:
        """Gives its memory back; a second time it does nothing.

        Raises:
            NativeError: segments lie in it.
        """
        if self.is_open:
            self._library.call("pool_close", self.number)
            self.number = -1


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]

__all__ = ["LIBCUDA", "Device", "DeviceArena", "DriverCalls", "NativeError", "Pool", "SegmentEvent"]
