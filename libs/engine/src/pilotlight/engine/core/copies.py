"""Which KV blocks of which layers are copied to another place, while batches go on writing."""

from collections.abc import Iterable, Set


class BlockCopies:
    """The books of one copy of layers' KV blocks.

    A block is copied when it is asked for: requests for blocks and batches travel in one order, so
    an answer holds what all batches before it wrote. A block that is written later is to be copied
    again::

        asked    layer 2 [ 0 1 2 3 )        layer 3 [ 0 1 2 3 )
        written                     3                           3
        to do    layer 2          [ 3 )     layer 2 [ 3 )  layer 3 [ 3 )
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._copied: dict[int, set[int]] = {layer: set() for layer in layers}

    def __contains__(self, layer: int) -> bool:
        """Whether the layer's blocks are copied."""
        return layer in self._copied

    def wrote(self, blocks: Iterable[int]) -> None:
        """Batches change the contents of blocks, in every layer."""
        changed = set(blocks)
        for copied in self._copied.values():
            copied -= changed

    def missing(self, layer: int, filled: Set[int]) -> tuple[int, ...]:
        """The blocks of a layer that are filled and not copied, or changed since, in order."""
        return tuple(sorted(filled - self._copied[layer]))

    def take(self, layer: int, blocks: Iterable[int]) -> None:
        """Blocks of a layer are asked for."""
        self._copied[layer].update(blocks)

    def next_of(self, filled: Set[int], at_most: int) -> tuple[int, tuple[int, ...]] | None:
        """The first layer with blocks to copy, and ``at_most`` of them; None when all are
        copied.
        """
        for layer in self._copied:
            if missing := self.missing(layer, filled):
                return layer, missing[:at_most]
        return None
