"""Whose contents a restored graph needs (MEDUSA, section 4.3).

===========  =========================================  ========================================
class        a buffer that a graph's words point to     its contents
===========  =========================================  ========================================
given        taken before the capture, never freed,     parameters, KV, inputs: come otherwise
             and filled by the engine
temporary    taken in the capture, freed later          the graph writes before it reads
permanent    any other that is never freed              saved, as they are after the capture
===========  =========================================  ========================================

MEDUSA takes all that was there before the capture for given. A library's workspace of the warm-up
is none of that, so the engine says what it fills. What was taken before the capture and freed after
it belongs to nobody when the graph runs, and is refused.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pilotlight.policy.graphs.matching import Matching
from pilotlight.policy.graphs.trace import Trace, TraceRefused


class BufferClass(StrEnum):
    """Whether a buffer's contents are saved."""

    GIVEN = "given"
    TEMPORARY = "temporary"
    PERMANENT = "permanent"


@dataclass(frozen=True, slots=True)
class Buffers:
    """What one graph's words point to."""

    classes: Mapping[int, BufferClass]
    """By number of the allocation."""
    saved: Sequence[int]
    """Allocations whose contents go into the artifact."""
    saved_bytes: int


def buffers_of(trace: Trace, matching: Matching, graph: int, filled: Collection[int]) -> Buffers:
    """The buffers of one graph. What an earlier capture took and kept counts as permanent, too: of
    two graphs in one pool the second may read what the first was given.

    Args:
        trace: what was recorded.
        matching: the addresses in it.
        graph: which.
        filled: allocations whose contents the engine brings itself.

    Raises:
        TraceRefused: a buffer is freed though the graph outlives it (``orphan``), or the graph was
            not captured (``graph``).
    """
    trace.capture_of(graph)
    first = min(one.began for one in trace.captures)
    used = sorted(
        {
            pointer.allocation
            for number, pointers in matching.pointers.items()
            if trace.launches[number].graph == graph
            for pointer in pointers
        }
    )
    classes: dict[int, BufferClass] = {}
    for number in used:
        one = trace.allocations[number]
        if one.freed_at is not None and one.at < first:
            raise TraceRefused(
                "orphan", f"graph {graph} uses allocation {number}, which is freed after it"
            )
        if one.freed_at is not None:
            classes[number] = BufferClass.TEMPORARY
        else:
            given = number in filled
            classes[number] = BufferClass.GIVEN if given else BufferClass.PERMANENT
    saved = [number for number in used if classes[number] is BufferClass.PERMANENT]
    return Buffers(classes, saved, sum(trace.allocations[number].num_bytes for number in saved))
