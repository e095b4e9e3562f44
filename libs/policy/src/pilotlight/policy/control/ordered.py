"""A sorted sequence that shares what did not change with the one that it was made from."""

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=str | tuple[Any, ...])

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
        runs = list(self._runs)
        for at, items in [*_by_run(runs, gone)]:
            left = frozenset(items)
            runs[at] = tuple(item for item in runs[at] if item not in left)
        runs = [run for run in runs if run]
        for at, items in [*_by_run(runs, come)]:
            runs[at] = tuple(sorted((*runs[at], *items)))
        if any(len(run) > 2 * RUN for run in runs):
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
        return list[Any](self) == list[Any](other)

    __hash__ = None

    def __repr__(self) -> str:
        return f"Ordered({list(self)})"


def _by_run(
    runs: Sequence[tuple[Item, ...]], items: Iterable[Item]
) -> Iterator[tuple[int, list[Item]]]:
    """The place of each run to which some items belong, and these."""
    at, found = -1, list[Item]()
    for item in sorted(items):
        if at < 0 or (at < len(runs) - 1 and runs[at][-1] < item):
            if found:
                yield at, found
            at = min(bisect.bisect_left(runs, item, key=_last), len(runs) - 1)
            found = []
        found.append(item)
    if found:
        yield at, found


def _last(run: tuple[Item, ...]) -> Item:
    return run[-1]


def _cut(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Runs of some sorted items."""
    if len(items) <= 2 * RUN:
        yield from (tuple(items),) if items else ()
        return
    for first in range(0, len(items), RUN):
        yield tuple(items[first : first + RUN])
