"""Host memory of the kinds that ``host_memory_gpu.py`` compares, and its slabs: registered with a
device, or imported from the descriptors that the driver gave.
"""

import ctypes
import mmap
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from ctypes import c_int, c_long, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from host_memory_driver import DEVICE, HOST_NUMA, Driver

MIB, GIB = 1 << 20, 1 << 30
HUGE_BYTES = 2 * MIB
FIXED, NO_RESERVE = 0x10, 0x4000
COLLAPSE = 25
"""``MADV_COLLAPSE``, of Linux 6.1: what lies there becomes huge pages, whatever the settings."""
HUGE_FIELDS = (
    "AnonHugePages",
    "ShmemPmdMapped",
    "FilePmdMapped",
    "Shared_Hugetlb",
    "Private_Hugetlb",
)
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = c_void_p
_C.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_C.munmap.argtypes = [c_void_p, c_size_t]
_C.madvise.argtypes = [c_void_p, c_size_t, c_int]
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
_SHARED = mmap.MAP_SHARED | FIXED


class Region:
    """A file of memory, mapped shared at a multiple of huge pages.

    The host pool's mapping lies where the kernel puts it; huge pages need such a place.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """The descriptor stays the caller's."""
        self.descriptor, self.num_bytes = descriptor, num_bytes
        self._room = num_bytes + HUGE_BYTES
        self._start = _mapped(None, self._room, 0, _PRIVATE, -1)
        self.address = -(-self._start // HUGE_BYTES) * HUGE_BYTES
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _mapped(self.address, num_bytes, protection, _SHARED, descriptor)

    def advise(self, advice: int) -> str:
        """Advice of ``madvise`` for all of it; what the system says to that."""
        if _C.madvise(self.address, self.num_bytes, advice):
            return os.strerror(ctypes.get_errno())
        return "taken"

    def fault_in(self) -> None:
        """Every page is there, and this process has it mapped."""
        ctypes.memset(self.address, 1, self.num_bytes)

    def huge_kib(self) -> dict[str, int]:
        """How much of it is mapped in huge pages, by the kernel's names."""
        with suppress(OSError):
            text = Path("/proc/self/smaps").read_text()
            return huge_kib(text, self.address, self.address + self.num_bytes)
        return {}

    def close(self) -> None:
        """Unmaps it."""
        _C.munmap(self._start, self._room)


def _mapped(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found = _C.mmap(address, num_bytes, protection, flags, fd, 0)
    if found is None or found == c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap: {os.strerror(error)}")
    return found


def huge_kib(smaps: str, start: int, stop: int) -> dict[str, int]:
    """The fields of huge pages that are not 0, of all mappings in [start, stop)."""
    found: dict[str, int] = defaultdict(int)
    within = False
    for line in smaps.splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            within = start <= int(first, 16) and int(last, 16) <= stop
        elif within and name[:-1] in HUGE_FIELDS and (kib := int(rest.split()[0])):
            found[name[:-1]] += kib
    return dict(found)


def mount_of(mounts: str, folder: str) -> str:
    """The kind and options of the file system that a folder is in, as ``/proc/mounts`` says."""
    rows = [line.split() for line in mounts.splitlines()]
    over = [row for row in rows if f"{folder}/".startswith(f"{row[1].rstrip('/')}/")]
    return " ".join(max(over, key=lambda row: len(row[1]))[2:4]) if over else ""


def system(folder: str) -> dict[str, str]:
    """What the system says of huge pages."""
    told = {"mount": mount_of(Path("/proc/mounts").read_text(), folder)}
    for name in ("enabled", "shmem_enabled"):
        with suppress(OSError):
            told[name] = (SETTINGS / name).read_text().strip()
    with suppress(OSError):
        told["nr_hugepages"] = HUGE_PAGES.read_text().strip()
    return told


@contextmanager
def made(kind: str, folder: str, num_bytes: int) -> Iterator[tuple[Region, dict[str, Any]]]:
    """A region of a kind, faulted in, and what the system said.

    Raises:
        OSError: there is no such memory.
    """
    with reserved_huge(num_bytes) if kind == "hugetlb" else nullcontext():
        if kind in ("memfd-huge", "hugetlb"):
            flags = os.MFD_HUGETLB | os.MFD_HUGE_2MB if kind == "hugetlb" else 0
            descriptor = os.memfd_create("host-memory", os.MFD_CLOEXEC | flags)
        else:
            room = os.statvfs(folder)
            if room.f_bavail * room.f_frsize < num_bytes:
                raise OSError(f"{folder} has {room.f_bavail * room.f_frsize} bytes left")
            with tempfile.TemporaryFile(dir=folder) as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, num_bytes)
        region = Region(descriptor, num_bytes)
        try:
            yield region, _faulted(region, huge=kind.endswith("-huge"))
        finally:
            region.close()
            os.close(descriptor)


def _faulted(region: Region, *, huge: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"asked_for_huge": region.advise(mmap.MADV_HUGEPAGE)} if huge else {}
    began_s = time.perf_counter()
    region.fault_in()
    said["fault_in_s"] = time.perf_counter() - began_s
    if huge:
        said["huge_kib_before_collapse"] = region.huge_kib()
        began_s = time.perf_counter()
        said["collapse"] = region.advise(COLLAPSE)
        said["collapse_s"] = time.perf_counter() - began_s
    return {**said, "huge_kib": region.huge_kib()}


@contextmanager
def reserved_huge(num_bytes: int) -> Iterator[None]:
    """The system has as many huge pages more, for as long as this lasts.

    Raises:
        OSError: it may not, or cannot.
    """
    before = int(HUGE_PAGES.read_text())
    wanted = before + -(-num_bytes // HUGE_BYTES)
    try:
        HUGE_PAGES.write_text(str(wanted))
        if (there := int(HUGE_PAGES.read_text())) < wanted:
            raise OSError(f"the system made {there - before} huge pages of {wanted - before}")
        yield
    finally:
        with suppress(OSError):
            HUGE_PAGES.write_text(str(before))


class Slabs(Protocol):
    """Memory that a device's process takes slab by slab."""

    def attach(self) -> list[float]:
        """Each slab, in order; the seconds of each."""
        ...

    def detach(self) -> list[float]:
        """Takes that back; the seconds of each."""
        ...


class Registered:
    """Slabs of a region that are registered."""

    def __init__(self, driver: Driver, address: int, num_bytes: int, slab_bytes: int) -> None:
        """Registers nothing yet."""
        self._driver, self._slab_bytes = driver, slab_bytes
        self._places = range(address, address + num_bytes, slab_bytes)
        self._attached: list[int] = []

    def attach(self) -> list[float]:
        """See ``Slabs``."""
        return timed(partial(self._take, place) for place in self._places)

    def _take(self, place: int) -> None:
        self._driver.register(place, self._slab_bytes)
        self._attached.append(place)

    def detach(self) -> list[float]:
        """See ``Slabs``."""
        places, self._attached = self._attached, []
        return timed(partial(self._driver.unregister, place) for place in places)


class Imported:
    """Slabs that the driver made, each imported from its descriptor."""

    def __init__(
        self,
        driver: Driver,
        descriptors: Sequence[int],
        slab_bytes: int,
        node: int,
        *,
        device: bool = True,
    ) -> None:
        """Imports nothing yet. ``device``: it may use them, besides the cores."""
        self._driver, self._descriptors, self._slab_bytes = driver, descriptors, slab_bytes
        self._node, self._device = node, device
        self._num_bytes = slab_bytes * len(descriptors)
        self.address = driver.reserve(self._num_bytes, HUGE_BYTES)
        self._attached: list[int] = []
        self.spent_s: dict[str, float] = defaultdict(float)

    def attach(self) -> list[float]:
        """See ``Slabs``."""
        return timed(partial(self._take, number) for number in range(len(self._descriptors)))

    def _take(self, number: int) -> None:
        driver, size = self._driver, self._slab_bytes
        place = self.address + number * size
        (imported_s,) = timed([lambda: self._map(place, self._descriptors[number])])
        device_s = 0.0
        if self._device:
            (device_s,) = timed([lambda: driver.allow(place, size, DEVICE, 0)])
        (host_s,) = timed([lambda: driver.allow(place, size, HOST_NUMA, self._node)])
        self.spent_s["import_and_map"] += imported_s
        self.spent_s["device_access"] += device_s
        self.spent_s["host_access"] += host_s

    def _map(self, place: int, descriptor: int) -> None:
        handle = self._driver.adopt(descriptor)
        try:
            self._driver.map(place, self._slab_bytes, handle)
        finally:
            # The mapping keeps the memory.
            self._driver.release(handle)
        self._attached.append(place)

    def detach(self) -> list[float]:
        """See ``Slabs``."""
        places, self._attached = self._attached, []
        return timed(partial(self._driver.unmap, place, self._slab_bytes) for place in places)

    def close(self) -> None:
        """Gives the addresses back."""
        self.detach()
        self._driver.free(self.address, self._num_bytes)


def timed(calls: Iterable[Callable[[], None]]) -> list[float]:
    """Seconds of each call."""
    found: list[float] = []
    for call in calls:
        began_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - began_s)
    return found


class DriverMade:
    """Memory of the host that the driver made, by its descriptors."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.create_s: list[float] = []
        self.export_s: list[float] = []

    def close(self) -> None:
        """Closes the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def made_by_driver(driver: Driver, num_bytes: int, slab_bytes: int, node: int) -> DriverMade:
    """Descriptors of so much memory, in slabs."""
    made = DriverMade()
    try:
        for _ in range(0, num_bytes, slab_bytes):
            began_s = time.perf_counter()
            handle = driver.create(slab_bytes, node)
            created_s = time.perf_counter()
            made.descriptors.append(driver.export(handle))
            made.create_s.append(created_s - began_s)
            made.export_s.append(time.perf_counter() - created_s)
            # The descriptor keeps the memory.
            driver.release(handle)
    except BaseException:
        made.close()
        raise
    return made
