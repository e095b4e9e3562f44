"""What is recorded of a process that captures graphs: memory that it took and gave back, and
kernels that it launched, in one order.

::

    at:   0      1       2        3        4       5         6
          take   take  | take   launch   give   launch    take  |
                       began                                    ended
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

TRACE_FORMAT = 1
WORD_BYTES = 8
MAX_ADDRESS = 1 << 57
"""Of what a process can have: five levels of page tables."""


class TraceRefused(Exception):
    """A trace does not hold together, or shows what cannot be restored; ``what`` is a name."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.what = what


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that was taken. Its number is its place in the trace."""

    at: int
    address: int
    num_bytes: int
    freed_at: int | None = None
    """None: it is kept to the end."""

    @property
    def end(self) -> int:
        """The first address behind it. What is empty has one address of its own."""
        return self.address + max(1, self.num_bytes)

    def holds(self, address: int) -> bool:
        """Whether an address is in it."""
        return self.address <= address < self.end

    def lives(self, at: int) -> bool:
        """Whether it was there at that moment."""
        return self.at < at and (self.freed_at is None or at < self.freed_at)


@dataclass(frozen=True, slots=True)
class Param:
    """Where a parameter of a kernel lies: [offset, offset + num_bytes)."""

    offset: int
    num_bytes: int

    @property
    def words(self) -> range:
        """Offsets at which it may hold an address: those of its whole words."""
        first = -(-self.offset // WORD_BYTES) * WORD_BYTES
        return range(first, self.offset + self.num_bytes - WORD_BYTES + 1, WORD_BYTES)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's launch, which is a node of a graph if it was captured."""

    at: int
    kernel: str
    parameters: bytes
    """As the driver has them, padding included."""
    graph: int | None = None
    """The tag of the graph that captured it, such as a batch size."""

    def word(self, offset: int) -> int:
        """The eight bytes from there on."""
        return int.from_bytes(self.parameters[offset : offset + WORD_BYTES], "little")


@dataclass(frozen=True, slots=True)
class Capture:
    """One graph: what was launched in (began, ended) is a node of it."""

    graph: int
    began: int
    ended: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One process, from its first allocation on. Every ``at`` is different, and all rise."""

    format: int = TRACE_FORMAT
    source: str
    """What was recorded, and by what."""
    layouts: Mapping[str, Sequence[Param]]
    """Parameters by kernel."""
    allocations: Sequence[Allocation]
    launches: Sequence[Launch]
    captures: Sequence[Capture]

    def capture_of(self, graph: int) -> Capture:
        """When a graph was captured.

        Raises:
            TraceRefused: it was not.
        """
        for one in self.captures:
            if one.graph == graph:
                return one
        raise TraceRefused("graph", f"{graph} was not captured")


def check_trace(trace: Trace) -> None:
    """Whether a trace can have happened.

    Raises:
        TraceRefused: by the name of the rule that it breaks: ``format``, ``order``, ``allocation``,
            ``overlap``, ``kernel``, ``parameters`` or ``capture``.
    """
    if trace.format != TRACE_FORMAT:
        raise TraceRefused("format", f"{trace.format}, not {TRACE_FORMAT}")
    moments = [
        *(one.at for one in trace.allocations),
        *(one.freed_at for one in trace.allocations if one.freed_at is not None),
        *(one.at for one in trace.launches),
        *(at for one in trace.captures for at in (one.began, one.ended)),
    ]
    if len(set(moments)) != len(moments):
        raise TraceRefused("order", "two things happened at once")
    for things in (trace.allocations, trace.launches):
        if any(one.at >= after.at for one, after in pairwise(things)):
            raise TraceRefused("order", "the recorded order is not that of time")
    for number, one in enumerate(trace.allocations):
        if one.num_bytes < 0 or not 0 < one.address <= MAX_ADDRESS - max(1, one.num_bytes):
            raise TraceRefused("allocation", f"number {number} is nowhere")
        if one.freed_at is not None and one.freed_at <= one.at:
            raise TraceRefused("allocation", f"number {number} was freed before it was taken")
    _check_overlaps(trace)
    _check_launches(trace)


def _check_overlaps(trace: Trace) -> None:
    """No address belongs to two allocations at a time."""
    events: list[tuple[int, bool, int]] = []
    for number, one in enumerate(trace.allocations):
        events.append((one.at, True, number))
        if one.freed_at is not None:
            events.append((one.freed_at, False, number))
    starts: list[int] = []
    numbers: list[int] = []
    for _, taken, number in sorted(events):
        one = trace.allocations[number]
        place = bisect_left(starts, one.address)
        if not taken:
            del starts[place], numbers[place]
            continue
        before = trace.allocations[numbers[place - 1]] if place else None
        after = starts[place] if place < len(starts) else None
        if (before and before.end > one.address) or (after is not None and after < one.end):
            raise TraceRefused("overlap", f"number {number} lies in what others have")
        starts.insert(place, one.address)
        numbers.insert(place, number)


def _check_launches(trace: Trace) -> None:
    captures = {one.graph: one for one in trace.captures}
    spans = sorted((one.began, one.ended) for one in trace.captures)
    if len(captures) != len(spans) or any(began >= ended for began, ended in spans):
        raise TraceRefused("capture", "a graph was captured twice, or ended before it began")
    if any(one[1] > after[0] for one, after in pairwise(spans)):
        raise TraceRefused("capture", "two graphs were captured at once")
    for number, one in enumerate(trace.launches):
        if one.kernel not in trace.layouts:
            raise TraceRefused("kernel", f"launch {number} is of {one.kernel}, which has no layout")
        size = len(one.parameters)
        for param in trace.layouts[one.kernel]:
            if param.offset < 0 or param.num_bytes < 0 or param.offset + param.num_bytes > size:
                raise TraceRefused("parameters", f"those of launch {number} are too short")
        capture = captures.get(one.graph) if one.graph is not None else None
        within = [graph for graph in captures.values() if graph.began < one.at < graph.ended]
        if within != ([] if capture is None else [capture]) or (one.graph is not None) != bool(
            capture
        ):
            raise TraceRefused("capture", f"launch {number} is not of the graph that it names")
