"""A stage gets more bytes or fewer in place, and its KV cache grows or shrinks with them."""

from contextlib import suppress
from dataclasses import replace

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.errors import NoRoom, StageBusy, UnknownInstance
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.results import StageRoom
from pilotlight.engine.room import divide_again


def resize(
    resident: ResidentStage,
    device_bytes: int,
    ended: list[Produced] | None = None,
    target_bytes: int = 0,
) -> StageRoom:
    """Has ``device_bytes`` from now on: KV grows or shrinks in place.

    Requests that lose their blocks run again later. Where memory comes and goes in long chunks, KV
    that others need shrinks by more than is asked for, if no request loses anything by it.

    Args:
        resident: the stage.
        device_bytes: for parameters and KV.
        ended: takes the ends of requests that would have no room even alone, which have to go on
            elsewhere; None: with such requests, nothing changes.
        target_bytes: of a growth in many small steps, what the last of them gives; KV may have no
            more room before others follow. 0: all of it at once.

    Raises:
        NoRoom: the bytes do not hold the parameters and what the requests here may reach, or the
            device does not have them.
        StageBusy: the stage is one of a pipeline, whose stages have the same blocks.
    """
    if resident.pipeline is not None:
        raise StageBusy(
            f"{resident.instance_id} is a stage of a pipeline: its blocks are those of all stages"
        )
    room = divide_again(resident.memory, device_bytes)
    num_blocks = room.kv_capacity_tokens // BLOCK_TOKENS
    if ended is not None:
        ended.extend(_end_beyond(resident, room.kv_capacity_tokens))
    if target_bytes and num_blocks >= resident.num_blocks:
        has_blocks = _grow_towards(resident, num_blocks, target_bytes)
    elif num_blocks > resident.num_blocks and ended is None:
        has_blocks = num_blocks
        resident.kv.resize(num_blocks)
        resident.scheduler.resize(num_blocks)
    elif num_blocks < resident.num_blocks:
        has_blocks = num_blocks
        if ended is not None:
            has_blocks = resident.memory.rounded(num_blocks, _needed_blocks(resident))
        resident.forget_batch()  # Its blocks may move.
        limit_blocks(resident, has_blocks)
        resident.kv.resize(has_blocks)
    else:
        # Others need memory that some layers alone have got so far.
        has_blocks = resident.num_blocks
        resident.kv.resize(has_blocks)
    kept_back = resident.memory.kv_bytes(num_blocks) - resident.memory.kv_bytes(has_blocks)
    resident.room = replace(
        room,
        kv_capacity_tokens=has_blocks * BLOCK_TOKENS,
        device_bytes=device_bytes - kept_back if kept_back else 0,
    )
    return resident.room


def _grow_towards(resident: ResidentStage, num_blocks: int, target_bytes: int) -> int:
    """Takes as much memory as so many blocks would; how many all layers have then."""
    target_blocks = divide_again(resident.memory, target_bytes).kv_capacity_tokens // BLOCK_TOKENS
    resident.kv.grow_towards(num_blocks, max(num_blocks, target_blocks))
    has_blocks = resident.memory.num_blocks
    if has_blocks > resident.num_blocks:
        resident.scheduler.resize(has_blocks)
    return has_blocks


def _needed_blocks(resident: ResidentStage) -> int:
    """Below it, a request would run anew or have no room."""
    scheduler = resident.scheduler
    reach_tokens = max((request.kv_tokens for request in scheduler.requests), default=0)
    return -(-max(scheduler.kv_used_tokens, reach_tokens) // BLOCK_TOKENS)


def _end_beyond(resident: ResidentStage, kv_capacity_tokens: int) -> list[Produced]:
    """Ends the requests that can reach more tokens than there is room for."""
    gone = UnknownInstance(f"{resident.instance_id} gives KV back: the request goes on elsewhere")
    return [
        resident.cancel(request, gone)
        for request in resident.scheduler.requests
        if request.kv_tokens > kv_capacity_tokens
    ]


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
