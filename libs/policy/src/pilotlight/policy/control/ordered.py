"""A sorted sequence that shares what did not change with the one that it was made from."""

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, cast


class Comparable(Protocol):
    """What has an order: a name, or a tuple that begins with a number."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether it comes first."""
        ...


Item = TypeVar("Item", bound=Comparable)

RUN = 128
"""Items that are copied together, about: a square root of some ten thousand."""


class Ordered(Generic[Item]):
    """Immutable; no item is there twice. A change copies the runs that it touches."""

    __slots__ = ("_length", "_runs")

    def __init__(self, items: Iterable[Item] = ()) -> None:
        """Of items in any order."""
        listed = sorted(items)
        self._runs: tuple[tuple[Item, ...], ...] = tuple(_cut(listed))
        self._length = len(listed)

    def changed(self, gone: Collection[Item], come: Collection[Item]) -> "Ordered[Item]":
        """Without items that are there, and with others that are not."""
        if len(gone) + len(come) > self._length // 8:
            return Ordered({*self}.difference(gone).union(come))
        runs, short = list(self._runs), False
        for at, items in _by_run(runs, gone):
            runs[at] = _without(runs[at], items)
            short |= not runs[at]
        if short:
            runs = [run for run in runs if run]
        long = False
        for at, items in _by_run(runs, come):
            runs[at] = _with(runs[at], items)
            long |= len(runs[at]) > 2 * RUN
        if long:
            runs = [piece for run in runs for piece in _cut(run)]
        made: Ordered[Item] = Ordered()
        made._length = self._length + len(come) - len(gone)
        if len(runs) > 4 * (made._length // RUN + 1):  # Many have become short.
            runs = [*_cut(tuple(chain.from_iterable(runs)))]
        made._runs = tuple(runs)
        return made

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._runs)

    def __reversed__(self) -> Iterator[Item]:
        return (item for run in reversed(self._runs) for item in reversed(run))

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ordered):
            return NotImplemented
        return list(self) == list(cast("Ordered[Item]", other))

    def __repr__(self) -> str:
        return f"Ordered({list(self)})"


def _by_run(
    runs: Sequence[tuple[Item, ...]], items: Collection[Item]
) -> list[tuple[int, list[Item]]]:
    """The place of each run to which some items belong, and these."""
    found: list[tuple[int, list[Item]]] = []
    at = -1
    for item in sorted(items):
        if at < 0 or (at < len(runs) - 1 and runs[at][-1] < item):
            at = min(bisect.bisect_left(runs, item, key=_last), len(runs) - 1)
            found.append((at, []))
        found[-1][1].append(item)
    return found


def _without(run: tuple[Item, ...], items: list[Item]) -> tuple[Item, ...]:
    if len(items) > 1:
        left = frozenset(items)
        return tuple(item for item in run if item not in left)
    place = bisect.bisect_left(run, items[0])
    return run[:place] + run[place + 1 :]


def _with(run: tuple[Item, ...], items: list[Item]) -> tuple[Item, ...]:
    if len(items) > 1:
        return tuple(sorted((*run, *items)))
    place = bisect.bisect_left(run, items[0])
    return (*run[:place], *items, *run[place:])


def _last(run: tuple[Item, ...]) -> Item:
    return run[-1]


def _cut(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Runs of some sorted items."""
    if len(items) <= 2 * RUN:
        yield from (tuple(items),) if items else ()
        return
    for first in range(0, len(items), RUN):
        yield tuple(items[first : first + RUN])
