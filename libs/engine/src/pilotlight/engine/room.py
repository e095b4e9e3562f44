"""How the bytes that a stage is given are divided."""

from dataclasses import replace

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.layout import SlotLayout
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.engine.device.memory import StageMemory, layout_of, parameter_bytes
from pilotlight.engine.errors import NoRoom
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.results import StageRoom
from pilotlight.policy.model import Dtype, ModelSpec, Stage


def divide(
    arena: Arena,
    decoder: Decoder,
    stage: Stage,
    dtype: Dtype,
    device_bytes: int,
    *,
    may_grow: bool = False,
) -> StageRoom:
    """Gives the KV cache what the parameters leave.

    Where granules are large, everything is counted in whole ones: parameters and KV never have more
    memory behind them than was given. What captured steps read and write, some 10 MiB, comes beside
    it.

    Args:
        arena: the device's.
        decoder: the stage's model.
        stage: its layers.
        dtype: in which it runs.
        device_bytes: what is divided.
        may_grow: the bytes are those of the whole model, which the stage is to become in them: it
            has no more KV than that will have, so that its requests can keep what they have.

    Raises:
        NoRoom: that is less than one block, or the model is larger than a slot.
    """
    parameters = parameter_bytes(decoder, stage, dtype)
    layout = layout_of(arena, decoder, stage, dtype)
    room = _divided(arena, layout, decoder.spec, stage, dtype, parameters, device_bytes)
    whole = decoder.spec.whole
    if not may_grow or stage == whole:
        return room
    try:
        later = divide(arena, decoder, whole, dtype, device_bytes)
    except NoRoom:
        return room  # It cannot become that.
    return replace(room, kv_capacity_tokens=min(room.kv_capacity_tokens, later.kv_capacity_tokens))


def divide_again(memory: StageMemory, device_bytes: int) -> StageRoom:
    """As ``divide``, for a stage that has its place."""
    return _divided(
        memory.arena,
        memory.layout,
        memory.decoder.spec,
        memory.stage,
        memory.dtype,
        memory.parameter_bytes,
        device_bytes,
    )


def _divided(
    arena: Arena,
    layout: SlotLayout,
    spec: ModelSpec,
    stage: Stage,
    dtype: Dtype,
    parameters: int,
    device_bytes: int,
) -> StageRoom:
    layers = stage.stop - stage.start
    parts = spec.parts_of(stage)
    counted_bytes = arena.granule_bytes if arena.whole_granules else 1
    held_bytes = (
        sum(layout.part(part).num_bytes for part in parts) if arena.whole_granules else parameters
    )
    num_blocks = layout.blocks_in(device_bytes - held_bytes, layers, counted_bytes)
    if not num_blocks:
        needed_bytes = held_bytes + layout.kv_bytes(1, layers, counted_bytes)
        raise NoRoom(
            f"the stage needs at least {needed_bytes} bytes for parameters and one KV block; {device_bytes} are given"
        )
    return StageRoom(
        parts=parts,
        parameter_bytes=parameters,
        kv_bytes_per_token=spec.kv_bytes_per_token(stage, dtype),
        kv_capacity_tokens=num_blocks * BLOCK_TOKENS,
    )
