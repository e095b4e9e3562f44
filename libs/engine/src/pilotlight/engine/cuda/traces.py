"""From recorded archives to MEDUSA's indirect index pointers: an archive says which memory was
there when its graphs were captured, and so is a trace; another process' archive of the same steps,
whose arena lies elsewhere, is its witness (``policy.graphs.matching``).

::

    archive ──> trace ──┐
                        ├─ match, settle, classes of buffers ──> words ──> archive with pointers
    witness ──> trace ──┘

An allocation is what the arena gives at once: a part's parameters, a layer's keys, its values, what
steps read and write, a segment of the graph pool. In one of these a tensor's place is the same in
every process.
"""

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import replace

from pilotlight.native.library import NativeError
from pilotlight.native.pointers import (
    NEVER,
    PointerTable,
    RecordedAllocation,
    RecordedNode,
    Word,
    nodes_of,
    pointers_of,
    with_pointers,
)
from pilotlight.policy.graphs.buffers import BufferClass, buffers_of
from pilotlight.policy.graphs.matching import Matching, match, require_certain
from pilotlight.policy.graphs.settling import settled
from pilotlight.policy.graphs.trace import (
    Allocation,
    Capture,
    Launch,
    Param,
    Trace,
    TraceRefused,
)

GIVEN, TEMPORARY, PERMANENT = range(3)
"""Kinds of recorded allocations: what the engine fills, what no graph expects anything of, what
graphs expect to find as it was."""
KINDS = {
    BufferClass.GIVEN: GIVEN,
    BufferClass.TEMPORARY: TEMPORARY,
    BufferClass.PERMANENT: PERMANENT,
}


def with_addresses(archive: bytes, witnesses: Sequence[bytes]) -> bytes:
    """The archive, saying of each word of its parameters that is an address what it points to.

    Args:
        archive: with its allocations.
        witnesses: the same of other processes.

    Raises:
        TraceRefused: by name: a word is in doubt, a witness did other work, a buffer is gone when
            the graph runs (``orphan``), or its contents are needed and were not kept
            (``permanent``).
        NativeError: an archive says nothing of allocations, or does not hold together.
    """
    table = pointers_of(archive)
    trace, places = trace_of(archive, table)
    graphs = {node.graph for node in nodes_of(archive)}
    others = [trace_of(one, pointers_of(one), graphs)[0] for one in witnesses]
    matching = settled(trace, others, match(trace, others))
    require_certain(matching)
    kinds = _kinds(trace, matching, table)
    words = sorted(
        (
            Word(places[number] + pointer.offset, pointer.allocation, pointer.inside)
            for number, pointers in matching.pointers.items()
            for pointer in pointers
        ),
        key=lambda word: word.place,
    )
    allocations = [
        replace(
            one,
            kind=kinds.get(number, one.kind),
            contents=one.contents if kinds.get(number) == PERMANENT else None,
        )
        for number, one in enumerate(table.allocations)
    ]
    return with_pointers(archive, PointerTable(tuple(allocations), table.captures, tuple(words)))


def _kinds(trace: Trace, matching: Matching, table: PointerTable) -> dict[int, int]:
    """Of the allocations that graphs use."""
    filled = [number for number, one in enumerate(table.allocations) if one.kind == GIVEN]
    found: dict[int, int] = {}
    for capture in trace.captures:
        buffers = buffers_of(trace, matching, capture.graph, filled)
        for number in buffers.classes:
            if table.allocations[number].given != NEVER:
                raise TraceRefused(
                    "orphan",
                    f"graph {capture.graph} uses allocation {number}, which was given back",
                )
        for number in buffers.saved:
            if table.allocations[number].contents is None:
                raise TraceRefused(
                    "permanent",
                    f"graph {capture.graph} needs what lies in allocation {number}, which was not kept",
                )
        found |= {number: KINDS[kind] for number, kind in buffers.classes.items()}
    return found


def trace_of(
    archive: bytes, table: PointerTable, graphs: Container[int] | None = None
) -> tuple[Trace, list[int]]:
    """What an archive's process did, and where the parameters of each launch lie in the archive.

    A segment that graphs expect nothing of counts as freed when all are captured.

    Args:
        archive: of graphs.
        table: its allocations, and the order of its captures.
        graphs: tags of those whose launches matter; None: all.

    Raises:
        NativeError: the archive does not hold together, or has other graphs than the table says.
    """
    nodes: dict[int, list[RecordedNode]] = defaultdict(list)
    for node in nodes_of(archive):
        if graphs is None or node.graph in graphs:
            nodes[node.graph].append(node)
    if not {*nodes} <= {*table.captures}:
        raise NativeError(-1, "an archive has other graphs than were captured")
    clock = _Clock(table.allocations)
    launches: list[Launch] = []
    captures: list[Capture] = []
    layouts: dict[str, tuple[Param, ...]] = {}
    places: list[int] = []
    clock.take(0)
    clock.give(0)
    for number, tag in enumerate(table.captures, 1):
        began = clock.tick()
        clock.take(number)
        for node in nodes[tag]:
            layouts.setdefault(node.kernel, tuple(Param(*each) for each in node.layout))
            launches.append(Launch(clock.tick(), node.kernel, node.parameters, tag))
            places.append(node.place)
        captures.append(Capture(tag, began, clock.tick()))
        clock.give(number)
    clock.end()
    allocations = [
        Allocation(clock.taken[number], one.address, one.num_bytes, clock.given.get(number))
        for number, one in enumerate(table.allocations)
    ]
    return (
        Trace(
            source="an archive of graphs",
            layouts=layouts,
            allocations=allocations,
            launches=launches,
            captures=captures,
        ),
        places,
    )


class _Clock:
    """Moments of a trace, from what happened between which captures."""

    def __init__(self, allocations: Sequence[RecordedAllocation]) -> None:
        self._allocations = allocations
        self._now = 0
        self.taken: dict[int, int] = {}
        self.given: dict[int, int] = {}

    def tick(self) -> int:
        self._now += 1
        return self._now

    def take(self, capture: int) -> None:
        for number, one in enumerate(self._allocations):
            if one.taken == capture:
                self.taken[number] = self.tick()

    def give(self, capture: int) -> None:
        for number, one in enumerate(self._allocations):
            if one.given == capture:
                self.given[number] = self.tick()

    def end(self) -> None:
        for number, one in enumerate(self._allocations):
            if number not in self.taken:
                raise NativeError(-1, f"allocation {number} was taken in no capture")
            if one.kind == TEMPORARY and number not in self.given:
                self.given[number] = self.tick()
