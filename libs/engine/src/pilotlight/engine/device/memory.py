"""A stage's share of its model's slot: the parameters and the KV of its layers; of all other
layers, nothing but addresses.
"""

from math import prod

import torch
from torch import Tensor

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.core.layout import SlotLayout
from pilotlight.engine.device.arena_protocol import Arena, Scratch
from pilotlight.engine.device.dtypes import TORCH_DTYPES
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
        self.num_blocks = 0
        """KV blocks that every layer of the stage has memory for."""
        self._layout = layout_of(arena, decoder, stage, dtype)
        self._steps_stop = self._steps_backed = self._layout.steps.start
        self._slot = arena.open_slot(slot)
        try:
            for part in self.parts:
                self._slot.back(self._layout.part(part))
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
        parts, blocks = self._beyond(stage, self.stage)
        self._back_all(parts, divisible=False)
        try:
            self._back_all(blocks)
        except EngineError:
            self._unback_all(parts)
            raise
        self.stage = stage

    def retract(self, stage: Stage) -> None:
        """Takes back an ``extend``: the memory of all layers but those of the shorter range
        goes.
        """
        parts, blocks = self._beyond(self.stage, stage)
        self._unback_all(parts + blocks)
        self.stage = stage

    def _beyond(self, longer: Stage, shorter: Stage) -> tuple[list[Extent], list[Extent]]:
        """What the longer of two ranges needs more than the shorter one: parts and KV blocks."""
        spec = self.decoder.spec
        held = spec.parts_of(shorter)
        parts = [self._layout.part(part) for part in spec.parts_of(longer) if part not in held]
        layers = [*range(longer.start, shorter.start), *range(shorter.stop, longer.stop)]
        return parts, [
            extent for layer in layers for extent in self._layout.kv(layer, 0, self.num_blocks)
        ]

    def tensors(self, part: int) -> dict[str, Tensor]:
        """A part's tensors, by their names within it, in their places."""
        shapes, dtype = self.decoder.shapes(part), TORCH_DTYPES[self.dtype]
        return {
            name: self._slot.tensor(offset, shapes[name], dtype)
            for name, offset in self._layout.tensors(part).items()
        }

    def packs(self, part: int) -> dict[str, Tensor]:
        """A part's packs (see ``Decoder.packs``), in the places of their tensors."""
        shapes, offsets, dtype = (
            self.decoder.shapes(part),
            self._layout.tensors(part),
            TORCH_DTYPES[self.dtype],
        )
        packs: dict[str, Tensor] = {}
        for pack, names in self.decoder.packs(part).items():
            rows = sum(shapes[name][0] for name in names)
            packs[pack] = self._slot.tensor(offsets[names[0]], (rows, *shapes[names[0]][1:]), dtype)
        return packs

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's rows in place, keys and values: [num_blocks * BLOCK_TOKENS, num_kv_heads,
        head_dim] each.
        """
        spec, dtype = self.decoder.spec, TORCH_DTYPES[self.dtype]
        shape = (self.num_blocks * BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        keys, values = self._layout.keys(layer), self._layout.values(layer)
        return self._slot.tensor(keys, shape, dtype), self._slot.tensor(values, shape, dtype)

    def resize(self, num_blocks: int) -> None:
        """Has memory for ``num_blocks`` KV blocks, in every layer.

        What lies in blocks that stay is as it was.

        Raises:
            NoRoom: there is no such memory; nothing has changed then.
        """
        if num_blocks > self._layout.max_blocks:
            raise NoRoom(
                f"the device refuses {num_blocks} KV blocks: a slot has addresses for {self._layout.max_blocks}"
            )
        grown = [
            extent
            for layer in range(self.stage.start, self.stage.stop)
            for extent in self._layout.kv(layer, *sorted((self.num_blocks, num_blocks)))
        ]
        if num_blocks < self.num_blocks:
            self._unback_all(grown)
        else:
            self._back_all(grown)
        self.num_blocks = num_blocks

    def _back_all(self, extents: list[Extent], *, divisible: bool = True) -> None:
        for index, extent in enumerate(extents):
            try:
                self._slot.back(extent, divisible=divisible)
            except EngineError:
                for backed in extents[:index]:
                    self._slot.unback(backed)
                raise

    def _unback_all(self, extents: list[Extent]) -> None:
        for index, extent in enumerate(extents):
            try:
                self._slot.unback(extent)
            except EngineError:
                # Every layer has the blocks or none has: with fewer, the device would be told of
                # places without memory.
                self._back_all(extents[:index])
                raise

    def for_steps(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for what captured steps read and write, zeros.

        The same calls give the same places in every process.

        Raises:
            NoRoom: the slot has no more addresses for it, or the device no such memory.
        """
        offset = -(-self._steps_stop // STEP_ALIGN_BYTES) * STEP_ALIGN_BYTES
        stop = offset + prod(shape) * dtype.itemsize
        if stop > self._layout.steps.stop:
            raise NoRoom(
                f"a slot has {self._layout.steps.num_bytes} bytes for what captured steps read and write"
            )
        granule_bytes = self.arena.granule_bytes
        backed = max(self._steps_backed, -(-stop // granule_bytes) * granule_bytes)
        self._slot.back(Extent(self._steps_backed, backed))
        self._steps_stop, self._steps_backed = stop, backed
        return self._slot.tensor(offset, shape, dtype).zero_()

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
    spec = decoder.spec
    return SlotLayout(
        [decoder.shapes(part) for part in range(spec.num_layers + 2)],
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
        granule_bytes=arena.granule_bytes,
        pool_bytes=arena.pool_bytes,
        steps_bytes=arena.steps_bytes,
    )


def parameter_bytes(decoder: Decoder, stage: Stage, dtype: Dtype) -> int:
    """Bytes of all parameters of a stage."""
    shapes = (
        shape for part in decoder.spec.parts_of(stage) for shape in decoder.shapes(part).values()
    )
    return sum(map(prod, shapes)) * dtype.size_bytes
