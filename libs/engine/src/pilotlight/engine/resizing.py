"""A stage gets more bytes or fewer in place, and its KV cache grows or shrinks with them."""

from contextlib import suppress

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.errors import NoRoom, StageBusy
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.results import StageRoom
from pilotlight.engine.room import divide


def resize(resident: ResidentStage, device_bytes: int) -> StageRoom:
    """Has ``device_bytes`` from now on: KV grows or shrinks in place.

    Requests that lose their blocks run again later.

    Raises:
        NoRoom: the bytes do not hold the parameters and what the requests here may reach, or the
            device does not have them.
        StageBusy: the stage is one of a pipeline, whose stages have the same blocks.
    """
    if resident.pipeline is not None:
        raise StageBusy(
            f"{resident.instance_id} is a stage of a pipeline: its blocks are those of all stages"
        )
    room = divide(
        resident.memory.arena,
        resident.memory.decoder,
        resident.memory.stage,
        resident.dtype,
        device_bytes,
    )
    resident.forget_batch()  # Its blocks may move.
    num_blocks = room.kv_capacity_tokens // BLOCK_TOKENS
    if num_blocks > resident.num_blocks:
        resident.kv.resize(num_blocks)
        resident.scheduler.resize(num_blocks)
    elif num_blocks < resident.num_blocks:
        limit_blocks(resident, num_blocks)
        resident.kv.resize(num_blocks)
    resident.room = room
    return room


def use_all(resident: ResidentStage) -> None:
    """Gives KV what a grown stage's bytes leave, or as much as there is: no other stage has the
    same blocks.
    """
    with suppress(NoRoom):
        resize(resident, resident.target_bytes)
    resident.scheduler.resize(resident.num_blocks)


def limit_blocks(resident: ResidentStage, num_blocks: int) -> None:
    """Uses the first blocks alone; fewer than there are.

    Raises:
        NoRoom: some request here needs more.
    """
    if moves := resident.scheduler.resize(num_blocks):
        resident.kv.move(moves)
