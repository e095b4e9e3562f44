"""A sorted sequence that shares what did not change with the one that it was made from."""

import bisect
from collections.abc import Collection, Iterable, Iterator
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
        self._runs = tuple(_cut(listed))
        self._length = len(listed)

    def changed(self, gone: Collection[Item], come: Collection[Item]) -> "Ordered[Item]":
        """Without items that are there, and with others that are not."""
        if len(gone) + len(come) > self._length // 8:
            return Ordered({*self}.difference(gone).union(come))
        runs: list[tuple[Item, ...] | list[Item]] = list(self._runs)
        for item in gone:
            at, run = _own(runs, item)
            del run[bisect.bisect_left(run, item)]
            if not run:
                del runs[at]
        for item in come:
            bisect.insort(_own(runs, item)[1], item)
        made: Ordered[Item] = Ordered()
        made._length = self._length + len(come) - len(gone)
        if len(runs) > 4 * (made._length // RUN + 1):  # Many have become short.
            runs = [*_cut(list(chain.from_iterable(runs)))]
        made._runs = tuple(
            piece for run in runs for piece in (_cut(run) if isinstance(run, list) else (run,))
        )
        return made

    def at_least(self, item: Item) -> int:
        """How many are not less than an item."""
        count = 0
        for run in reversed(self._runs):
            if run[0] < item:
                return count + len(run) - bisect.bisect_left(run, item)
            count += len(run)
        return count

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


def _own(runs: "list[tuple[Item, ...] | list[Item]]", item: Item) -> tuple[int, list[Item]]:
    """The run in which an item is, or belongs, copied before it is written to; and its place."""
    if not runs:
        runs.append([])
        at = 0
    else:
        at = min(bisect.bisect_left(runs, item, key=_last), len(runs) - 1)
    run = runs[at]
    if not isinstance(run, list):
        run = runs[at] = list(run)
    return at, run


def _last(run: "tuple[Item, ...] | list[Item]") -> Any:
    return run[-1]


def _cut(items: list[Item]) -> Iterator[tuple[Item, ...]]:
    """Runs of some sorted items."""
    if len(items) <= 2 * RUN:
        yield from (tuple(items),) if items else ()
        return
    for first in range(0, len(items), RUN):
        yield tuple(items[first : first + RUN])
