"""Archives of graphs that say which words of their parameters are addresses, and of what: they are
rebuilt in a process whose memory lies elsewhere (``cpp/pointers.h``).
"""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from ctypes import c_uint64
from dataclasses import dataclass

from pilotlight.native.device import DeviceArena
from pilotlight.native.library import MISUSED, NativeError, library

Layout = tuple[tuple[int, int], ...]

NEVER = 0xFFFF_FFFF
_HEADER, _GRAPH = struct.Struct("<8s4I6Q"), struct.Struct("<6Q4I")
_NODE, _KERNEL = struct.Struct("<2I3I3I2IQ6I"), struct.Struct("<2Q2I4i")
_TABLE, _ALLOCATION, _WORD = (
    struct.Struct("<8s2I4Q"),
    struct.Struct("<3Q4I"),
    struct.Struct("<2Q2I"),
)
_MAGIC, _UNIT = b"PLPOINT1", 16
_POINTERS_AT, _TOTAL_AT = 20, 48
"""Places of what an archive's header says of the table, and of the archive's length."""
KERNEL, MEMCPY, MEMSET = 0, 1, 2
"""Types of nodes that have parameters."""
_NAMES = {MEMCPY: "memcpy", MEMSET: "memset"}


@dataclass(frozen=True, slots=True)
class RecordedAllocation:
    """Memory that was there when graphs were captured."""

    address: int
    num_bytes: int
    taken: int = 0
    """Within which capture, from 1 on; 0: before all."""
    given: int = NEVER
    """Behind which."""
    kind: int = 0
    """The caller's."""
    contents: bytes | None = None
    """What must lie in it; None: whatever there is."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of parameters that is an address."""

    place: int
    """In the archive."""
    allocation: int
    inside: int
    """Bytes from the beginning of that allocation."""


@dataclass(frozen=True, slots=True)
class PointerTable:
    """What an archive says of its addresses."""

    allocations: tuple[RecordedAllocation, ...]
    captures: tuple[int, ...]
    """Tags of its graphs, in the order in which they were captured."""
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedNode:
    """A node with parameters: a kernel, or what copies or fills memory."""

    graph: int
    kernel: str
    """Its name, and how its parameters lie: the same in every process."""
    layout: Layout
    """Offsets and bytes of its parameters."""
    place: int
    """Of its parameters, in the archive."""
    parameters: bytes


def nodes_of(archive: bytes) -> Iterator[RecordedNode]:
    """The nodes of all graphs of an archive that have parameters, each graph's in order.

    Raises:
        NativeError: the archive does not hold together.
    """
    library().call("archive_check", archive, len(archive))
    header = _HEADER.unpack_from(archive)
    num_kernels, num_graphs, kernels, graphs = header[2], header[3], header[6], header[7]
    names: list[tuple[str, Layout]] = []
    for number in range(num_kernels):
        name, params, _, count, *_ = _KERNEL.unpack_from(archive, kernels + number * _KERNEL.size)
        text = archive[name : archive.index(0, name)].decode(errors="replace")
        pairs: tuple[int, ...] = struct.unpack_from(f"<{2 * count}I", archive, params)
        layout: Layout = tuple(zip(pairs[::2], pairs[1::2], strict=True))
        form = " ".join(f"{offset}+{num_bytes}" for offset, num_bytes in layout)
        names.append((f"{text} ({form})", layout))
    for graph in range(num_graphs):
        tag, nodes, _, _, parameters, _, num_nodes, _, _, _ = _GRAPH.unpack_from(
            archive, graphs + graph * _GRAPH.size
        )
        for number in range(num_nodes):
            kind, kernel, *_, params, num_bytes, _, _, _, _, _ = _NODE.unpack_from(
                archive, nodes + number * _NODE.size
            )
            if not num_bytes:
                continue
            name, layout = _form(names, kind, kernel, num_bytes)
            place = parameters + params
            yield RecordedNode(tag, name, layout, place, archive[place : place + num_bytes])


def _form(
    kernels: Sequence[tuple[str, Layout]], kind: int, kernel: int, num_bytes: int
) -> tuple[str, Layout]:
    """What a node runs, and how its parameters lie."""
    return kernels[kernel] if kind == KERNEL else (_NAMES[kind], ((0, num_bytes),))


def tags_of(archive: bytes) -> tuple[int, ...]:
    """Of an archive's graphs. It holds together."""
    header = _HEADER.unpack_from(archive)
    return tuple(
        _GRAPH.unpack_from(archive, header[7] + number * _GRAPH.size)[0]
        for number in range(header[3])
    )


def with_pointers(archive: bytes, table: PointerTable) -> bytes:
    """The archive with a table of its addresses, in the place of the one that it may have.

    Raises:
        NativeError: the two do not fit.
    """
    at = struct.unpack_from("<I", archive, _POINTERS_AT)[0] * _UNIT
    made = bytearray(archive[:at] if at else archive)

    def put(data: bytes) -> int:
        made.extend(bytes(-len(made) % _UNIT))
        made.extend(data)
        return len(made) - len(data)

    start = put(bytes(_TABLE.size))
    contents = [0 if one.contents is None else put(one.contents) for one in table.allocations]
    allocations = [
        _ALLOCATION.pack(one.address, one.num_bytes, place, one.taken, one.given, one.kind, 0)
        for one, place in zip(table.allocations, contents, strict=True)
    ]
    words = [_WORD.pack(one.place, one.inside, one.allocation, 0) for one in table.words]
    places = (
        put(b"".join(allocations)),
        put(struct.pack(f"<{len(table.captures)}Q", *table.captures)),
        put(b"".join(words)),
    )
    counts = len(table.allocations), len(table.captures), len(table.words)
    _TABLE.pack_into(made, start, _MAGIC, *counts, *places)
    struct.pack_into("<I", made, _POINTERS_AT, start // _UNIT)
    struct.pack_into("<Q", made, _TOTAL_AT, len(made))
    finished = bytes(made)
    check_pointers(finished)
    return finished


def check_pointers(archive: bytes) -> None:
    """Looks whether an archive says what its addresses are, and whether that holds together.

    Raises:
        NativeError: no.
    """
    library().call("pointers_check", archive, len(archive))


def pointers_of(archive: bytes) -> PointerTable:
    """What an archive says of its addresses.

    Raises:
        NativeError: nothing, or it does not hold together.
    """
    check_pointers(archive)
    start = struct.unpack_from("<I", archive, _POINTERS_AT)[0] * _UNIT
    _, num_allocations, num_captures, num_words, *places = _TABLE.unpack_from(archive, start)
    allocations: list[RecordedAllocation] = []
    for number in range(num_allocations):
        address, num_bytes, contents, taken, given, kind, _ = _ALLOCATION.unpack_from(
            archive, places[0] + number * _ALLOCATION.size
        )
        kept = archive[contents : contents + num_bytes] if contents else None
        allocations.append(RecordedAllocation(address, num_bytes, taken, given, kind, kept))
    captures = struct.unpack_from(f"<{num_captures}Q", archive, places[1])
    words = [
        _WORD.unpack_from(archive, places[2] + number * _WORD.size)[:3]
        for number in range(num_words)
    ]
    return PointerTable(
        tuple(allocations),
        captures,
        tuple(Word(place, allocation, inside) for place, inside, allocation in words),
    )


def moved(archive: bytes, bases: Sequence[int], arena: DeviceArena) -> bytes:
    """The archive for an arena that lies elsewhere: its addresses written anew, everything else as
    it is.

    Args:
        archive: one with pointers.
        bases: where each of its allocations begins here; 0: it was not made.
        arena: in which they all lie.

    Raises:
        NativeError: the table does not hold together, an allocation lies outside of the arena, or
            one that is needed was not made.
    """
    if any(not 0 <= base < 1 << 64 for base in bases):
        raise NativeError(MISUSED, "an allocation begins nowhere")
    made = ctypes.create_string_buffer(len(archive))
    places = (c_uint64 * len(bases))(*bases)
    where = arena.address, arena.num_bytes
    library().call("pointers_move", archive, len(archive), places, len(bases), *where, made)
    return made.raw
