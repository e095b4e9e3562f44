"""Calls of NVIDIA's driver that the bench of host memory needs beside the native library's: memory
of the host registered, made and imported; copies; a small kernel that is waited for.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

from pilotlight.native.device import LIBCUDA

DEVICE, HOST_NUMA = 1, 3
"""Types of ``CUmemLocation``."""
PINNED, DESCRIPTOR, READ_WRITE = 1, 1, 3
PORTABLE, NON_BLOCKING = 1, 1
HOST_NODE = 134
"""``CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID``; the host's node that is nearest to a device."""
COPY_BYTES = 16 << 20
KERNEL = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry count_up(.param .u64 place)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<3>;
    ld.param.u64 %rd1, [place];
    cvta.to.global.u64 %rd2, %rd1;
    ld.global.u32 %r1, [%rd2];
    add.s32 %r2, %r1, 1;
    st.global.u32 [%rd2], %r2;
    ret;
}
\0"""


class Refused(Exception):
    """The driver refuses a call."""


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_uint64),
    )


class Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", Location), ("flags", c_int))


class Driver:
    """The driver's functions, with a device's context or without any."""

    def __init__(self, path: str = LIBCUDA, context: int = 0) -> None:
        """``context``: of a device, for ``enter``; 0: this process has none."""
        self._library = ctypes.CDLL(path)
        self._context = context
        self.call("cuInit", c_uint(0))
        self.enter()

    def enter(self) -> None:
        """The calling thread has the context, if there is one."""
        if self._context:
            self.call("cuCtxSetCurrent", c_void_p(self._context))

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function.

        Raises:
            Refused: with the driver's code, or because it has no such function.
        """
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError as error:
            raise Refused(f"the driver has no {name}") from error
        if code := function(*arguments):
            raise Refused(f"{name} gives {code}")

    def _made(self, kind: type[c_uint64 | c_size_t | c_int], name: str, *arguments: object) -> int:
        """What a function writes to its first argument."""
        made = kind()
        self.call(name, byref(made), *arguments)
        return made.value

    def register(self, address: int, num_bytes: int) -> None:
        """Memory of the host becomes one that the device reads directly."""
        self.call("cuMemHostRegister_v2", c_void_p(address), c_size_t(num_bytes), c_uint(PORTABLE))

    def unregister(self, address: int) -> None:
        """Takes ``register`` back."""
        self.call("cuMemHostUnregister", c_void_p(address))

    def host_node(self) -> int:
        """Of the host's memory that is nearest to the device; -1 where the host has no nodes."""
        device = self._made(c_int, "cuDeviceGet", c_int(0))
        return self._made(c_int, "cuDeviceGetAttribute", c_int(HOST_NODE), c_int(device))

    def granule(self, node: int) -> int:
        """Bytes that memory of a host's node is made in."""
        given = byref(_host_memory(node))
        return self._made(c_size_t, "cuMemGetAllocationGranularity", given, c_int(0))

    def create(self, num_bytes: int, node: int) -> int:
        """Memory of the host, made by the driver; its handle."""
        given = byref(_host_memory(node))
        return self._made(c_uint64, "cuMemCreate", c_size_t(num_bytes), given, c_uint64(0))

    def export(self, handle: int) -> int:
        """A descriptor of such memory."""
        return self._made(
            c_int, "cuMemExportToShareableHandle", c_uint64(handle), c_int(DESCRIPTOR), c_uint64(0)
        )

    def adopt(self, descriptor: int) -> int:
        """A handle of what a descriptor stands for, which stays the caller's."""
        given = c_void_p(descriptor), c_int(DESCRIPTOR)
        return self._made(c_uint64, "cuMemImportFromShareableHandle", *given)

    def release(self, handle: int) -> None:
        """The memory goes when nothing is mapped to it any more, and no one else has it."""
        self.call("cuMemRelease", c_uint64(handle))

    def reserve(self, num_bytes: int, align_bytes: int) -> int:
        """Addresses; where they begin."""
        given = c_size_t(num_bytes), c_size_t(align_bytes), c_uint64(0), c_uint64(0)
        return self._made(c_uint64, "cuMemAddressReserve", *given)

    def free(self, address: int, num_bytes: int) -> None:
        """Takes ``reserve`` back."""
        self.call("cuMemAddressFree", c_uint64(address), c_size_t(num_bytes))

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Memory lies behind reserved addresses, and nobody may use it yet."""
        given = c_size_t(num_bytes), c_size_t(0), c_uint64(handle), c_uint64(0)
        self.call("cuMemMap", c_uint64(address), *given)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes ``map`` back."""
        self.call("cuMemUnmap", c_uint64(address), c_size_t(num_bytes))

    def allow(self, address: int, num_bytes: int, kind: int, number: int) -> None:
        """A device, or the cores of a host's node, may read and write what is mapped."""
        access = Access(Location(kind, number), READ_WRITE)
        self.call(
            "cuMemSetAccess", c_uint64(address), c_size_t(num_bytes), byref(access), c_size_t(1)
        )

    def stream(self) -> c_void_p:
        """A stream that waits for no other."""
        made = c_void_p()
        self.call("cuStreamCreateWithPriority", byref(made), c_uint(NON_BLOCKING), c_int(0))
        return made

    def copy(self, source: int, num_bytes: int, target: int, target_bytes: int) -> None:
        """Copies to the device, again and again to the same memory there, and waits."""
        stream = self.stream()
        try:
            for at in range(0, num_bytes, COPY_BYTES):
                count = min(COPY_BYTES, num_bytes - at)
                place = c_uint64(target + at % target_bytes)
                given = c_void_p(source + at), c_size_t(count), stream
                self.call("cuMemcpyHtoDAsync_v2", place, *given)
            self.call("cuStreamSynchronize", stream)
        finally:
            self.call("cuStreamDestroy_v2", stream)


def _host_memory(node: int) -> Properties:
    return Properties(PINNED, DESCRIPTOR, Location(HOST_NUMA, node), None, 0)


class Launches:
    """A small kernel on a stream of its own, and the wait for it: what a step asks of the driver.

    Where the driver compiles no kernel, a word is set instead, and ``by`` says so.
    """

    def __init__(self, driver: Driver, word: int) -> None:
        """``word``: an address on the device, that it counts up."""
        self._driver, self._word, self._stream = driver, c_uint64(word), driver.stream()
        self._function, self.by = c_void_p(), "kernel"
        self._parameters = (c_void_p * 1)(ctypes.addressof(self._word))
        module = c_void_p()
        try:
            driver.call("cuModuleLoadData", byref(module), ctypes.c_char_p(KERNEL))
            driver.call("cuModuleGetFunction", byref(self._function), module, b"count_up")
        except Refused as error:
            self.by = f"memset: {error}"

    def once(self) -> None:
        """Launches, and waits."""
        if self._function:
            sizes = [c_uint(1)] * 6
            given = *sizes, c_uint(0), self._stream, self._parameters, None
            self._driver.call("cuLaunchKernel", self._function, *given)
        else:
            self._driver.call("cuMemsetD32Async", self._word, c_uint(1), c_size_t(1), self._stream)
        self._driver.call("cuStreamSynchronize", self._stream)
