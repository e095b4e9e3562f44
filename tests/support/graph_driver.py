"""The fake driver, as one who captures graphs calls it."""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

from fake_cuda import fake_cuda

from pilotlight.native.device import Device, DeviceArena

CLUSTER, SHARED = 4, 8


class NodeParams(ctypes.Structure):
    _fields_ = [
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("params", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]


@dataclass
class Driver:
    """The fake, as one who captures graphs calls it."""

    fake: ctypes.CDLL

    def done(self, name: str, *arguments: object) -> None:
        assert getattr(self.fake, name)(*arguments) == 0, name

    def load(self, image: bytes, name: str) -> int:
        """A function, as its library has it."""
        module, function = c_void_p(), c_void_p()
        self.done("cuModuleLoadData", ctypes.byref(module), c_char_p(image))
        self.done("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function.value or 0

    def allow_shared(self, function: int, num_bytes: int) -> None:
        self.done("cuFuncSetAttribute", c_void_p(function), SHARED, num_bytes)

    def graph(self) -> int:
        made = c_void_p()
        self.done("cuGraphCreate", ctypes.byref(made), 0)
        return made.value or 0

    def kernel(
        self,
        graph: int,
        function: int,
        params: bytes,
        *,
        threads: int = 128,
        grid: tuple[int, int, int] = (4, 1, 1),
        before: Sequence[int] = (),
        packed: bool = False,
        shared: int = 0,
        edge: bytes = b"",
    ) -> int:
        """Adds a kernel's node; its parameters have eight bytes each."""
        held = ctypes.create_string_buffer(params, len(params))
        place, size = ctypes.addressof(held), ctypes.c_size_t(len(params))
        each = (c_void_p * (len(params) // 8))(*range(place, place + len(params), 8))
        whole = (c_void_p * 5)(1, place, 2, ctypes.addressof(size), None)
        given = NodeParams(function, grid, (threads, 1, 1), shared)
        given.params = None if packed else ctypes.addressof(each)
        given.extra = ctypes.addressof(whole) if packed else None
        made, nodes = c_void_p(), (c_void_p * max(1, len(before)))(*before)
        number = ctypes.c_size_t(len(before))
        if edge:
            any_node = struct.pack("<4i", 0, 0, 0, 0) + bytes(given)
            arguments = nodes, c_char_p(edge * len(before)), number, c_char_p(any_node)
            self.done("cuGraphAddNode_v2", ctypes.byref(made), c_void_p(graph), *arguments)
        else:
            arguments = nodes, number, ctypes.byref(given)
            self.done("cuGraphAddKernelNode_v2", ctypes.byref(made), c_void_p(graph), *arguments)
        return made.value or 0

    def empty(self, graph: int, before: Sequence[int] = ()) -> int:
        """Adds a node that only waits."""
        return self._plain("cuGraphAddEmptyNode", graph, before)

    def depend(self, graph: int, source: int, follower: int) -> None:
        """Adds an edge between nodes that are there."""
        self.fake.fake_depend(c_void_p(graph), c_void_p(source), c_void_p(follower))

    def copy(self, graph: int, to: int, source: int, num_bytes: int, before: Sequence[int]) -> int:
        """Adds a copy of one row, from device to device."""
        given = bytearray(200)
        for place, value in ((48, source), (136, to), (176, num_bytes), (184, 1), (192, 1)):
            struct.pack_into("<Q", given, place, value)
        for place in (32, 120):
            struct.pack_into("<I", given, place, 2)
        return self._plain("cuGraphAddMemcpyNode", graph, before, c_char_p(bytes(given)), None)

    def set(
        self,
        graph: int,
        to: int,
        value: int,
        element: int,
        width: int,
        before: Sequence[int],
        *,
        height: int = 1,
        pitch: int = 0,
    ) -> int:
        """Adds memory that is set."""
        given = struct.pack("<2Q2I2Q", to, pitch, value, element, width, height)
        return self._plain("cuGraphAddMemsetNode", graph, before, c_char_p(given), None)

    def _plain(self, name: str, graph: int, before: Sequence[int], *arguments: object) -> int:
        made, nodes = c_void_p(), (c_void_p * max(1, len(before)))(*before)
        given = c_void_p(graph), nodes, ctypes.c_size_t(len(before)), *arguments
        self.done(name, ctypes.byref(made), *given)
        return made.value or 0

    def attribute(self, node: int, number: int, value: bytes) -> None:
        """Sets an attribute of a kernel's node."""
        whole = c_char_p(value.ljust(64, b"\0"))
        self.done("cuGraphKernelNodeSetAttribute", c_void_p(node), number, whole)

    @property
    def ran(self) -> bytes:
        """What ran since this was last asked, node after node: everything that each was given."""
        num_bytes = c_uint64()
        told = self.fake.fake_ran
        told.restype = c_void_p
        return ctypes.string_at(told(ctypes.byref(num_bytes)), num_bytes.value)

    @property
    def last_stream(self) -> int:
        """That the last launch without a graph was for."""
        self.fake.fake_last_stream.restype = c_void_p
        return self.fake.fake_last_stream() or 0

    def cluster(self, node: int, size: int) -> None:
        self.attribute(node, CLUSTER, struct.pack("<3I", size, 1, 1))

    def replay(self, graph: int) -> None:
        made = c_void_p()
        self.done("cuGraphInstantiateWithFlags", ctypes.byref(made), c_void_p(graph), c_uint64(0))
        self.done("cuGraphLaunch", made, None)


@contextmanager
def device_of_the_fake(
    address: int, num_bytes: int
) -> Iterator[tuple[Driver, Device, DeviceArena]]:
    """The fake, forgetful before and after, with an arena there that has memory behind its first
    half.
    """
    fake = fake_cuda()
    fake.reset()
    device = Device(0, fake.path)
    arena = DeviceArena(device, num_bytes, address)
    arena.back(0, num_bytes // 2, num_bytes // 2)
    yield Driver(ctypes.CDLL(fake.path)), device, arena
    fake.reset()
    arena.close()
