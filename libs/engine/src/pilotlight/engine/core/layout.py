"""The canonical layout of a model in its slot of an arena: the same for every stage, worker and
process.

::

    slot   [ part 0 )[ part 1 )...[ part n + 1 )[ keys 0 )[ values 0 )[ keys 1 )...[ values n - 1 )   rest [ steps )[ graph pool )
             embedding  layer 0     head          each for the most blocks that the slot could hold

Every offset follows from the model, the dtype and the slot's size alone. A stage backs only what is
its own with memory: a range that grows backs more, and nothing moves.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from types import MappingProxyType

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.errors import NoRoom

GRANULE_BYTES = 4096
"""Memory is backed in pages, on a CPU: no two owners share one."""
TENSOR_ALIGN_BYTES = 64
"""A tensor begins on a cache line, which vector instructions like best."""

Shapes = Mapping[str, tuple[int, ...]]


class SlotLayout:
    """Offsets in a slot, in bytes from its beginning."""

    def __init__(
        self,
        parts: Sequence[Shapes],
        num_layers: int,
        kv_row_bytes: int,
        item_bytes: int,
        slot_bytes: int,
        joined: Collection[str] = (),
        *,
        other_bytes: Mapping[str, int] = MappingProxyType({}),
        granule_bytes: int = GRANULE_BYTES,
        pool_bytes: int = 0,
        steps_bytes: int = 0,
    ) -> None:
        """Lays a model out.

        Args:
            parts: every part's tensors, in execution order.
            num_layers: decoder layers.
            kv_row_bytes: one token's keys in one layer; its values take as much.
            item_bytes: one element of a tensor, ...
            slot_bytes: length of the slot.
            joined: names of tensors that begin where the one before them ends.
            other_bytes: ... and of those where it is another, by their names.
            granule_bytes: what memory is backed in.
            pool_bytes: length of the graph pool, the slot's last addresses.
            steps_bytes: length of what captured steps read and write, before the graph pool.

        Raises:
            NoRoom: the slot does not hold the parameters and one block.
        """
        self._tensors: list[dict[str, int]] = []
        self._parts: list[Extent] = []
        self._block_bytes = BLOCK_TOKENS * kv_row_bytes
        self._granule_bytes = granule_bytes
        self.steps = Extent(slot_bytes - pool_bytes - steps_bytes, slot_bytes - pool_bytes)
        """Addresses of what captured steps read and write."""
        offset = 0
        for shapes in parts:
            start, places = offset, dict[str, int]()
            for name, shape in shapes.items():
                if name not in joined:
                    offset = _up(offset, TENSOR_ALIGN_BYTES)
                places[name] = offset
                offset += prod(shape) * other_bytes.get(name, item_bytes)
            offset = _up(offset, granule_bytes)
            self._tensors.append(places)
            self._parts.append(Extent(start, offset))
        self._kv_start = offset
        half_bytes = (
            (self.steps.start - offset) // (2 * num_layers) // granule_bytes * granule_bytes
        )
        self.max_blocks = max(0, half_bytes) // self._block_bytes
        """The most blocks for which every layer has addresses."""
        if not self.max_blocks:
            raise NoRoom(
                f"a slot of {slot_bytes} bytes does not hold {offset} bytes of parameters and one KV block"
            )
        self._half_bytes = half_bytes

    def part(self, part: int) -> Extent:
        """A part's bytes, whole granules."""
        return self._parts[part]

    def tensors(self, part: int) -> Mapping[str, int]:
        """Where each tensor of a part begins."""
        return self._tensors[part]

    def keys(self, layer: int) -> int:
        """Where a layer's keys begin, block by block."""
        return self._kv_start + 2 * layer * self._half_bytes

    def values(self, layer: int) -> int:
        """Where a layer's values begin, block by block."""
        return self.keys(layer) + self._half_bytes

    def blocks_in(self, num_bytes: int, num_layers: int, counted_bytes: int) -> int:
        """The most blocks whose keys and values, in ``num_layers`` layers, take no more than
        ``num_bytes`` bytes.

        Args:
            num_bytes: what there is; none, if negative.
            num_layers: of the stage.
            counted_bytes: each layer's keys, and its values, are counted in multiples of it.
        """
        half_bytes = max(0, num_bytes) // (2 * num_layers) // counted_bytes * counted_bytes
        return half_bytes // self._block_bytes

    def kv_bytes(self, num_blocks: int, num_layers: int, counted_bytes: int) -> int:
        """What the keys and values of ``num_blocks`` blocks take; see ``blocks_in``."""
        return 2 * num_layers * _up(num_blocks * self._block_bytes, counted_bytes)

    def kv(self, layer: int, first_block: int, stop_block: int) -> tuple[Extent, Extent]:
        """The whole granules that blocks [first, stop) need of a layer's keys and values, beyond
        those of the blocks before them.
        """
        first, stop = (
            _up(block * self._block_bytes, self._granule_bytes)
            for block in (first_block, stop_block)
        )
        keys, values = self.keys(layer), self.values(layer)
        return Extent(keys + first, keys + stop), Extent(values + first, values + stop)


def _up(offset: int, step: int) -> int:
    return -(-offset // step) * step
