"""A stage's share of its model's slot: the parameters and the KV of its layers; of all other
layers, nothing but addresses.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.core.layout import SlotLayout
from pilotlight.engine.device.arena_protocol import Arena, Scratch
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.kv_backing import KvBacking
from pilotlight.engine.errors import EngineError, NoRoom
from pilotlight.engine.models.decoder import Decoder
from pilotlight.policy.model import Dtype, Stage

STEP_ALIGN_BYTES = 256
"""As torch's allocator on a device: kernels are compiled for 16 at least."""


class StageMemory:
    """Takes a slot for a stage, backs its parts at once, and its KV as far as it is told."""

    def __init__(
        self, arena: Arena, decoder: Decoder, stage: Stage, dtype: Dtype, slot: int | None = None
    ) -> None:
        """Takes a slot.

        Args:
            arena: the device's.
            decoder: the stage's model.
            stage: its layers.
            dtype: in which it runs.
            slot: the model's own (``Model.slot``), taken where it is free; None: any.

        Raises:
            NoRoom: no slot is free, the model is larger than one, or the device has no such memory.
        """
        self.arena, self.decoder, self.dtype = arena, decoder, dtype
        self.stage = stage
        """The layers that have memory; a stage that is to grow runs fewer of them."""
        self.copier = arena.copier
        self.layout = layout_of(arena, decoder, stage, dtype)
        self._steps_stop = self._steps_backed = self.layout.steps.start
        self._slot = arena.open_slot(slot)
        self._kv = KvBacking(self._slot, self.layout, arena.granule_bytes, arena.kv_chunk_bytes)
        self._kv.add(range(stage.start, stage.stop))
        try:
            self._slot.back(*self._runs(self.parts))
        except EngineError:
            self.close()
            raise

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts that have memory, in execution order."""
        return self.decoder.spec.parts_of(self.stage)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all tensors of the stage's parts, without what lies between them."""
        return parameter_bytes(self.decoder, self.stage, self.dtype)

    def extend(self, stage: Stage) -> None:
        """Backs the parts of a longer range, and as many KV blocks in each new layer as the others
        have.

        The parts lie in the slot of the model: no tensor moves.

        Raises:
            NoRoom: there is no such memory; nothing has changed then.
        """
        parts, layers = self._beyond(stage, self.stage)
        self._slot.back(*parts)
        try:
            self._kv.add(layers)
        except EngineError:
            self._slot.unback(*parts)
            raise
        self.stage = stage

    def retract(self, stage: Stage) -> None:
        """Takes back an ``extend``: the memory of all layers but those of the shorter range
        goes.
        """
        parts, layers = self._beyond(self.stage, stage)
        self._slot.unback(*parts)
        self._kv.remove(layers)
        self.stage = stage

    def _beyond(self, longer: Stage, shorter: Stage) -> tuple[list[Extent], list[int]]:
        """What the longer of two ranges has more than the shorter one: parts, and layers."""
        spec = self.decoder.spec
        held = spec.parts_of(shorter)
        parts = self._runs(part for part in spec.parts_of(longer) if part not in held)
        return parts, [
            *range(longer.start, shorter.start),
            *range(shorter.stop, longer.stop),
        ]

    def _runs(self, parts: Iterable[int]) -> list[Extent]:
        """Where parts lie, in order, as few extents as can be: each is asked for in one piece."""
        runs: list[Extent] = []
        for part in parts:
            extent = self.layout.part(part)
            if runs and runs[-1].stop == extent.start:
                extent = Extent(runs.pop().start, extent.stop)
            runs.append(extent)
        return runs

    def tensors(self, part: int) -> dict[str, Tensor]:
        """A part's tensors, by their names within it, in their places."""
        shapes = self.decoder.shapes(part)
        return {
            name: self._tensor(offset, name, shapes[name])
            for name, offset in self.layout.tensors(part).items()
        }

    def extent(self, part: int) -> Extent:
        """A part's bytes, counted from the arena's beginning."""
        return self._slot.placed(self.layout.part(part))

    def form(self, part: int) -> bytes:
        """A hash over how a part lies in its bytes: equal where the bytes of one stage's are those
        of another's.
        """
        shapes, extent = self.decoder.shapes(part), self.layout.part(part)
        tensors = [
            (name, offset - extent.start, shapes[name], self.decoder.dtype_of(name, self.dtype))
            for name, offset in sorted(self.layout.tensors(part).items())
        ]
        return blake2b(repr((part, extent.num_bytes, tensors)).encode(), digest_size=16).digest()

    def packs(self, part: int) -> dict[str, Tensor]:
        """A part's packs (see ``Decoder.packs``), in the places of their tensors."""
        shapes, offsets = self.decoder.shapes(part), self.layout.tensors(part)
        packs: dict[str, Tensor] = {}
        for pack, names in self.decoder.packs(part).items():
            rows = sum(shapes[name][0] for name in names)
            packs[pack] = self._tensor(offsets[names[0]], names[0], (rows, *shapes[names[0]][1:]))
        return packs

    def _tensor(self, offset: int, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = TORCH_DTYPES[self.decoder.dtype_of(name, self.dtype)]
        if dtype is torch.float8_e4m3fn:
            # Arenas know it as bytes.
            return self._slot.tensor(offset, shape, torch.uint8).view(dtype)
        return self._slot.tensor(offset, shape, dtype)

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's rows in place, keys and values: [num_blocks * BLOCK_TOKENS, num_kv_heads,
        head_dim] each.
        """
        spec, dtype = self.decoder.spec, TORCH_DTYPES[self.dtype]
        shape = (self.num_blocks * BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        keys, values = self.layout.keys(layer), self.layout.values(layer)
        return self._slot.tensor(keys, shape, dtype), self._slot.tensor(values, shape, dtype)

    @property
    def num_blocks(self) -> int:
        """KV blocks that every layer of the stage has memory for."""
        return self._kv.num_blocks

    def resize(self, num_blocks: int) -> None:
        """Has memory for ``num_blocks`` KV blocks, in every layer.

        What lies in blocks that stay is as it was.

        Raises:
            NoRoom: there is no such memory; nothing has changed then.
        """
        self._check_addresses(num_blocks)
        self._kv.resize(num_blocks)

    def grow_towards(self, even_blocks: int, target_blocks: int) -> None:
        """See ``KvBacking.grow_towards``."""
        self._check_addresses(target_blocks)
        self._kv.grow_towards(even_blocks, target_blocks)

    def rounded(self, num_blocks: int, least_blocks: int) -> int:
        """See ``KvBacking.rounded``."""
        return self._kv.rounded(num_blocks, least_blocks)

    def kv_bytes(self, num_blocks: int) -> int:
        """What so many KV blocks take in all layers of the stage, whole granules."""
        layers = self.stage.stop - self.stage.start
        return self.layout.kv_bytes(num_blocks, layers, self.arena.granule_bytes)

    def _check_addresses(self, num_blocks: int) -> None:
        if num_blocks > self.layout.max_blocks:
            raise NoRoom(
                f"the device refuses {num_blocks} KV blocks: a slot has addresses for {self.layout.max_blocks}"
            )

    @property
    def steps_bytes(self) -> int:
        """What ``for_steps`` has taken, whole granules."""
        return self._steps_backed - self.layout.steps.start

    def for_steps(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for what captured steps read and write, zeros.

        The same calls give the same places in every process.

        Raises:
            NoRoom: the slot has no more addresses for it, or the device no such memory.
        """
        offset = -(-self._steps_stop // STEP_ALIGN_BYTES) * STEP_ALIGN_BYTES
        stop = offset + prod(shape) * dtype.itemsize
        if stop > self.layout.steps.stop:
            raise NoRoom(
                f"a slot has {self.layout.steps.num_bytes} bytes for what captured steps read and write"
            )
        granule_bytes = self.arena.granule_bytes
        backed = max(self._steps_backed, -(-stop // granule_bytes) * granule_bytes)
        self._slot.back(Extent(self._steps_backed, backed))
        self._steps_stop, self._steps_backed = stop, backed
        return self._slot.tensor(offset, shape, dtype).zero_()

    @property
    def slot_number(self) -> int:
        """The slot that it lies in; a model's own, or another where that was taken."""
        return self._slot.number

    def graph_pool_bytes(self, num_bytes: int) -> Tensor:
        """The first bytes of the slot's graph pool, whatever lies there."""
        first = self.arena.slot_bytes - self.arena.pool_bytes
        return self._slot.tensor(first, (num_bytes,), torch.uint8)

    def scratch(self) -> Scratch | None:
        """See ``Arena.scratch``."""
        return self._slot.scratch()

    def close(self) -> None:
        """Gives everything back."""
        self._slot.close()


def layout_of(arena: Arena, decoder: Decoder, stage: Stage, dtype: Dtype) -> SlotLayout:
    """Where everything of a stage's model lies in a slot.

    Args:
        arena: whose slot it is.
        decoder: the stage's model.
        stage: its layers; those of the others are laid out, too.
        dtype: in which it runs.

    Raises:
        NoRoom: the model is larger than a slot.
    """
    known = _KNOWN.setdefault(decoder, {})
    key = arena.slot_bytes, arena.granule_bytes, arena.pool_bytes, arena.steps_bytes, stage, dtype
    if key not in known:
        known[key] = _laid_out(arena, decoder, stage, dtype)
    return known[key]


_KNOWN = WeakKeyDictionary[Decoder, dict[tuple[object, ...], SlotLayout]]()
"""It takes a millisecond or two, and a start of a kind that was here before waits for none."""


def _laid_out(arena: Arena, decoder: Decoder, stage: Stage, dtype: Dtype) -> SlotLayout:
    spec = decoder.spec
    shapes = [decoder.shapes(part) for part in range(spec.num_layers + 2)]
    return SlotLayout(
        shapes,
        spec.num_layers,
        spec.num_kv_heads * spec.head_dim * dtype.size_bytes,
        dtype.size_bytes,
        arena.slot_bytes,
        {
            name
            for part in spec.parts_of(stage)
            for pack in decoder.packs(part).values()
            for name in pack[1:]
        },
        other_bytes={
            name: decoder.dtype_of(name, dtype).size_bytes for part in shapes for name in part
        },
        granule_bytes=arena.granule_bytes,
        pool_bytes=arena.pool_bytes,
        steps_bytes=arena.steps_bytes,
    )


@lru_cache(maxsize=64)
def parameter_bytes(decoder: Decoder, stage: Stage, dtype: Dtype) -> int:
    """Bytes of all parameters of a stage."""
    return sum(
        prod(shape) * decoder.dtype_of(name, dtype).size_bytes
        for part in decoder.spec.parts_of(stage)
        for name, shape in decoder.shapes(part).items()
    )
