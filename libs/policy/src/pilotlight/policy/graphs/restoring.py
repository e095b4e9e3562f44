"""In which order the graphs of a stage come back, and what a step does whose graph is not there yet
(design 8: the needed size first, the rest by recorded use).

One thread restores, one graph at a time: the driver lets no second one help. Everything here is a
value; the thread asks ``next_graph`` and says what it began and ended.

::

    restore(needed) ──> needed first ──> by use, the most used first ──> all ready
                           ^ a size that a step asks for goes before all that nobody asked for,
                             and what a request will need before what nobody is known to need
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum, auto

PROMPTS = 1 << 20
"""Graphs are known by one number: those of decode steps by their rows, those of one prompt alone by
its rows beyond this."""


class Run(Enum):
    """How a step runs."""

    REPLAY = auto()
    """Its graph is ready."""
    LAUNCH_LIST = auto()
    """Its kernels are loaded: they are launched one by one, while the graph is being built."""
    WAIT = auto()
    """Its graph comes next, or is being built."""
    EAGER = auto()
    """The artifact has no such graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """How far a stage's graphs are."""

    sizes: tuple[int, ...]
    """Of each graph in the artifact, rising: rows, or ``prompt_size``."""
    uses: Mapping[int, int] = field(default_factory=dict[int, int])
    """How often each was replayed, as recorded when the model ran before."""
    asked: tuple[int, ...] = ()
    """Those that steps wait for, in the order in which they came."""
    expected: tuple[int, ...] = ()
    """Those that requests which have come will need, in that order."""
    building: int | None = None
    ready: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    """Those that the driver refused: steps of them run eagerly."""

    @property
    def done(self) -> bool:
        """Nothing is left to be restored."""
        return self.building is None and next_graph(self) is None


def prompt_size(rows: int) -> int:
    """What the graph of one prompt of so many rows is known by."""
    return PROMPTS + rows


def used(
    before: Mapping[int, int], now: Mapping[int, int], *, again: bool = False
) -> dict[int, int]:
    """How often each size is used, as a stage is to know it that is restored next: what a stage
    used counts twice as much as what was used before that.

    Args:
        before: as it was known.
        now: what a stage used.
        again: some of what it used is in ``before``.
    """
    weight = 1 if again else 2
    return {
        size: before.get(size, 0) // weight + now.get(size, 0) for size in sorted({*before, *now})
    }


def size_of(restoring: Restoring, rows: int) -> int | None:
    """The least graph of the same kind that holds as much; None: there is none."""
    there = (size for size in restoring.sizes if size >= rows)
    return next((size for size in there if (size > PROMPTS) == (rows > PROMPTS)), None)


def next_graph(restoring: Restoring) -> int | None:
    """What the thread restores next; None: it has nothing to do, or is at something.

    1. What a step asked for, the earliest before.
    2. What a request that has come will need, the earliest before.
    3. The others by their use, the most used first; of equal use the smaller one, which a stage
       with few requests needs.
    """
    if restoring.building is not None:
        return None
    for size in (*restoring.asked, *restoring.expected):  # 1, 2
        if _is_open(restoring, size):
            return size
    left = [size for size in restoring.sizes if _is_open(restoring, size)]
    return min(left, key=lambda size: (-restoring.uses.get(size, 0), size), default=None)  # 3


def rests(restoring: Restoring, proved: Set[int]) -> bool:
    """Whether the others can wait: all that steps and requests are known to need is there, and some
    of it has not run yet. Graphs that are made meanwhile keep copies and first steps waiting.
    """
    following = next_graph(restoring)
    needed = {*restoring.asked, *restoring.expected}
    return following not in needed and bool((needed & restoring.ready) - proved)


def ask(restoring: Restoring, rows: int, kernels_loaded: bool) -> tuple[Run, Restoring]:
    """A step comes: how it runs, and what follows for the order.

    Args:
        restoring: how far the graphs are.
        rows: of the step, or ``prompt_size``.
        kernels_loaded: all kernels of its graph have their functions.
    """
    size = size_of(restoring, rows)
    if size is None or size in restoring.refused:
        return Run.EAGER, restoring
    if size in restoring.ready:
        return Run.REPLAY, restoring
    if size not in restoring.asked:
        restoring = replace(restoring, asked=(*restoring.asked, size))
    return (Run.LAUNCH_LIST if kernels_loaded else Run.WAIT), restoring


def expect(restoring: Restoring, size: int) -> Restoring:
    """A request has come that will need a graph, if there is one; also of one that is ready: it is
    yet to be proved.
    """
    known = size in restoring.sizes and size not in restoring.refused
    if not known or size in restoring.expected:
        return restoring
    return replace(restoring, expected=(*restoring.expected, size))


def began(restoring: Restoring, size: int) -> Restoring:
    """The thread has begun with a graph."""
    return replace(restoring, building=size)


def ended(restoring: Restoring, size: int, restored: bool) -> Restoring:
    """The thread is through with a graph.

    Args:
        restoring: how far the graphs are.
        size: the one that it was at.
        restored: the driver took it.
    """
    return replace(
        restoring,
        building=None,
        asked=tuple(one for one in restoring.asked if one != size),
        ready=restoring.ready | ({size} if restored else set()),
        refused=restoring.refused | (set() if restored else {size}),
    )


def _is_open(restoring: Restoring, size: int) -> bool:
    there = size in restoring.sizes
    return there and size not in restoring.ready and size not in restoring.refused
