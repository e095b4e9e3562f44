"""Memory behind the KV of a stage's layers, in chunks that come and go whole.

::

    layer 0   [ granted )[ lent ..... )[ lent ..... )
    layer 1   [ granted )[ lent ..... )[ lent ..... )      ahead: no use before all layers have it
    layer 2   [ granted )[ lent ..... )
                         ^ a border   ^ num_blocks

A layer's keys and its values are chunks of their own. A device maps and unmaps a chunk at nearly
the same price whatever its length, and to take a part of one it has to copy the rest. So chunks are
long, quiet growth goes layer by layer, and what is given back ends on a border where it can. What
all layers get at once is asked for at once. Chunks are as long in one model as in another, and in
its next start as in its last one: what one gives back fits the next, and memory that only nearly
fits would have to be released and made anew.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.core.layout import SlotLayout
from pilotlight.engine.device.arena_protocol import Slot
from pilotlight.engine.errors import EngineError

LEAST_CHUNK_BYTES = 64 << 20
"""Chunks of a layer's keys end at multiples of this, then of twice as much and so on, none longer
than half of what is before it: to end on a border costs no more than a third of all."""
SAVED_BYTES = 1 << 30
"""As much is copied at once where chunks are cut: a device that is nearly full has room for it."""


class KvBacking:
    """Owns the memory of a slot's KV, for some of the model's layers."""

    def __init__(
        self, slot: Slot, layout: SlotLayout, granule_bytes: int, chunk_bytes: int
    ) -> None:
        """Backs nothing yet.

        Args:
            slot: the model's.
            layout: of the slot.
            granule_bytes: what memory comes and goes in.
            chunk_bytes: longest chunk; 0 where chunks cost nothing (``Arena.kv_chunk_bytes``).
        """
        self._slot = slot
        self._layout = layout
        self._granule_bytes = granule_bytes
        self._chunk_bytes = chunk_bytes
        self._borders: dict[int, list[int]] = {}
        """Of each layer, the blocks where its chunks end."""

    @property
    def num_blocks(self) -> int:
        """Blocks that every layer has memory for."""
        return min((self._stop(layer) for layer in self._borders), default=0)

    def add(self, layers: Iterable[int]) -> None:
        """More layers have KV from now on, as many blocks as the others.

        Raises:
            NoRoom: there is no such memory; nothing has changed then.
        """
        self._drop_ahead()
        num_blocks, new = self.num_blocks, list(layers)
        self._borders |= {layer: [] for layer in new}
        try:
            self._grow(new, self._cut(0, num_blocks))
        except EngineError:
            for layer in new:
                del self._borders[layer]
            raise

    def remove(self, layers: Iterable[int]) -> None:
        """Some layers have no KV any more; their memory goes."""
        gone = list(layers)
        self._slot.unback(*self._extents((layer, 0, self._stop(layer)) for layer in gone))
        for layer in gone:
            del self._borders[layer]

    def resize(self, num_blocks: int) -> None:
        """Every layer has memory for ``num_blocks`` blocks, and none for more.

        Raises:
            NoRoom: there is no such memory; nothing has changed then.
        """
        self._drop_ahead()
        if num_blocks > self.num_blocks:
            self._grow(list(self._borders), self._cut(self.num_blocks, num_blocks))
        elif num_blocks < self.num_blocks:
            self._shrink(num_blocks)

    def grow_towards(self, even_blocks: int, target_blocks: int) -> None:
        """Takes as much memory as ``even_blocks`` blocks in every layer would, layer by layer.

        Repeated with more and more, it ends with ``target_blocks`` everywhere.

        Raises:
            NoRoom: there is no such memory; nothing has changed then.
        """
        if max(map(self._stop, self._borders), default=0) > target_blocks:
            self._drop_ahead()
        spare = self._bytes(even_blocks) * len(self._borders)
        spare -= sum(self._bytes(self._stop(layer)) for layer in self._borders)
        grown: list[int] = []
        try:
            while (start := self.num_blocks) < target_blocks:
                farthest = max(map(self._stop, self._borders))
                border = farthest if farthest > start else self._cut(start, target_blocks)[0]
                spare -= self._bytes(border) - self._bytes(start)
                if spare < 0:
                    break
                layer = next(layer for layer in self._borders if self._stop(layer) == start)
                self._grow([layer], [border])
                grown.append(layer)
        except EngineError:
            for layer in reversed(grown):
                stop = self._borders[layer].pop()
                self._slot.unback(*self._layout.kv(layer, self._stop(layer), stop))
            raise

    def rounded(self, num_blocks: int, least_blocks: int) -> int:
        """How many blocks to shrink to, at most ``num_blocks``: those before a border that all
        layers have, if that is not below ``least_blocks``.
        """
        if not self._chunk_bytes or num_blocks >= self.num_blocks:
            return num_blocks
        common = set[int].intersection(*(set(borders) for borders in self._borders.values()))
        border = max((border for border in common if border <= num_blocks), default=0)
        return border if border >= max(1, least_blocks) else num_blocks

    def _stop(self, layer: int) -> int:
        return self._borders[layer][-1] if self._borders[layer] else 0

    def _bytes(self, num_blocks: int) -> int:
        """What the keys and values of one layer take."""
        return self._layout.kv_bytes(num_blocks, 1, self._granule_bytes)

    def _extents(self, blocks: Iterable[tuple[int, int, int]]) -> list[Extent]:
        """Of blocks [first, stop) of layers."""
        return [extent for each in blocks for extent in self._layout.kv(*each)]

    def _cut(self, start: int, stop: int) -> list[int]:
        """Where the chunks end that bring a layer from ``start`` blocks to ``stop``: on borders
        that are the same whatever is asked for, but for the last one.
        """
        marks: list[int] = []
        while start < stop:
            start = min(stop, self._next_border(start)) if self._chunk_bytes else stop
            marks.append(start)
        return marks

    def _next_border(self, block: int) -> int:
        """The block where a long chunk ends that begins with ``block``."""
        place = self._bytes(block) // 2
        length = LEAST_CHUNK_BYTES
        while 2 * length <= min(place // 2, self._chunk_bytes):
            length *= 2
        border_bytes = (place // length + 1) * length
        return self._layout.blocks_in(2 * border_bytes, 1, self._granule_bytes)

    def _grow(self, layers: Sequence[int], borders: Sequence[int]) -> None:
        """Layers that have equally many blocks get chunks that end there."""
        self._slot.back(
            *self._extents(
                (layer, first, stop)
                for layer in layers
                for first, stop in pairwise([self._stop(layer), *borders])
            )
        )
        for layer in layers:
            self._borders[layer].extend(borders)

    def _shrink(self, num_blocks: int) -> None:
        """Whole chunks go at once; where chunks are cut, some layers at a time."""
        groups: list[list[Extent]] = [[]]
        saved_bytes = 0
        # Those that end there first.
        for layer in sorted(
            self._borders, key=lambda layer: num_blocks not in self._borders[layer]
        ):
            before = max((mark for mark in self._borders[layer] if mark <= num_blocks), default=0)
            if self._chunk_bytes:
                saved_bytes += self._bytes(num_blocks) - self._bytes(before)
            if saved_bytes > SAVED_BYTES and groups[-1]:
                groups.append([])
                saved_bytes = self._bytes(num_blocks) - self._bytes(before)
            groups[-1] += self._layout.kv(layer, num_blocks, self._stop(layer))
        for index, group in enumerate(groups):
            try:
                self._slot.unback(*group)
            except EngineError:
                # Every layer has the blocks or none has: with fewer, the device would be told of
                # places without memory.
                for extent in (extent for undone in groups[:index] for extent in undone):
                    self._slot.back(extent)
                raise
        for layer, borders in self._borders.items():
            kept = [mark for mark in borders if mark < num_blocks]
            self._borders[layer] = [*kept, num_blocks] if num_blocks else []

    def _drop_ahead(self) -> None:
        """Takes back what some layers have and others do not."""
        num_blocks = self.num_blocks
        ahead = [layer for layer in self._borders if self._stop(layer) > num_blocks]
        self._slot.unback(*self._extents((layer, num_blocks, self._stop(layer)) for layer in ahead))
        for layer in ahead:
            self._borders[layer] = [mark for mark in self._borders[layer] if mark <= num_blocks]
