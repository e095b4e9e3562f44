"""A stage gets a longer range of layers in place: [a, b) becomes [a', b') with a' <= a and b <= b'.

::

    begin       memory for the new layers, in the model's slot; their parts are placed one by one
                the stage runs its old range meanwhile; in a pipeline KV of the new layers is copied
    take_over   between two steps: the stage runs the longer range from now on
    call_off    the memory of the new layers goes; the stage stays what it was

The stage that leads a pipeline takes over when it has the KV (``pipeline.growth``). One that
follows has no books of the requests: it runs its old range as long as the pipeline lasts, and takes
over when that ends. Requests then come to it from the stage that led, with their KV or without.
Where several stages remain, all of them take over together (``pipeline.shorter``).

A stage of no pipeline serves nothing yet: it has the longer range at once, like a stage that is
being loaded and has some of its parts already.
"""

from dataclasses import replace

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.errors import BadRequest, NoRoom, StageBusy
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.resizing import limit_blocks, use_all
from pilotlight.engine.results import StageRoom
from pilotlight.engine.room import divide
from pilotlight.policy.model import Stage


def begin(
    resident: ResidentStage, stage: Stage, device_bytes: int, *, shorter: bool = False
) -> StageRoom:
    """Makes room for a longer range.

    Args:
        resident: the stage that grows.
        stage: its range afterwards, with all layers that it has now.
        device_bytes: what the stage has from now on, the new layers included.
        shorter: its pipeline is to have fewer stages, and it runs the range when those have formed
            (``Pipeline.shorten``).

    Returns:
        How the bytes are divided. In a pipeline the KV cache keeps its size until the stage is a
        whole model, since the blocks are those of all stages.

    Raises:
        BadRequest: the range is not a longer one of this model.
        StageBusy: it loads, or a growth is not over. That of a stage that follows lasts as long as
            its pipeline.
        NoRoom: the bytes do not hold the parameters and the KV blocks in use, or the device does
            not have them. The stage is what it was, but for KV blocks that its pipeline does not
            use.
    """
    old = resident.stage
    if stage == old or not old.is_within(stage) or stage.stop > resident.spec.num_layers:
        raise BadRequest(
            f"a stage [{old.start}, {old.stop}) of {resident.spec.num_layers} layers cannot grow to [{stage.start}, {stage.stop})"
        )
    if resident.target is not None or not resident.complete:
        raise StageBusy(f"{resident.instance_id} is loading or growing already")
    if resident.pipeline is not None and old.start == 0 and not resident.pipeline.leads:
        raise StageBusy(f"{resident.instance_id} waits for the other stages of its pipeline")
    memory = resident.memory
    room = divide(memory.arena, memory.decoder, stage, resident.dtype, device_bytes)
    num_blocks = room.kv_capacity_tokens // BLOCK_TOKENS
    used_blocks = resident.pipeline.num_blocks if resident.pipeline is not None else 0
    if num_blocks < used_blocks:
        raise NoRoom(
            f"{device_bytes} bytes hold {num_blocks} KV blocks of the longer range; its pipeline uses {used_blocks}"
        )
    if num_blocks < resident.num_blocks:
        if resident.pipeline is None:
            limit_blocks(resident, num_blocks)
        resident.kv.resize(num_blocks)
        resident.room = _of_blocks(resident.room, num_blocks)
    resident.kv.extend(stage)
    resident.compute.extended()
    resident.target, resident.target_bytes = stage, device_bytes
    resident.target_vouched = False
    resident.room = _of_blocks(room, memory.num_blocks)
    if resident.pipeline is None:
        # What is cached from an earlier pipeline lacks the new layers.
        resident.scheduler.forget_cached()
        resident.stage = stage
        use_all(resident)
    elif not shorter:
        resident.pipeline.grow(stage)
    return resident.room


def take_over(resident: ResidentStage) -> None:
    """The stage runs its longer range from now on; the caller has seen to the KV of the new
    layers.
    """
    assert resident.target is not None, "the stage grows"
    resident.stage = resident.target
    if resident.parameters.complete:
        resident.target = None


def has_all(resident: ResidentStage) -> bool:
    """Whether a stage whose parts are all in place has grown with that.

    One that leads still lacks KV.
    """
    if resident.target is None or (resident.pipeline is not None and resident.stage.start == 0):
        return False
    if resident.pipeline is None:
        resident.target = None
    return True


def leave_pipeline(resident: ResidentStage) -> bool:
    """A stage that followed is in no pipeline any more; it has its longer range now, if there is
    one.

    Returns:
        Whether it runs a longer range, of which parts may be missing.
    """
    resident.pipeline = None
    if resident.target is None:
        return False
    take_over(resident)
    use_all(resident)
    return True


def call_off(resident: ResidentStage) -> bool:
    """Ends a growth whose parts cannot be had; False if there is none that leaves a stage that
    works.
    """
    if resident.target is None or resident.pipeline is None:
        return False
    if resident.parameters.complete and not resident.pipeline.awaits_others:
        return False
    resident.pipeline.grow(None)
    resident.target = None
    resident.parameters.keep(resident.spec.parts_of(resident.stage))
    resident.kv.retract(resident.stage)
    parameters = resident.memory.parameter_bytes
    per_token = resident.spec.kv_bytes_per_token(resident.stage, resident.dtype)
    resident.room = replace(
        resident.room,
        parts=resident.memory.parts,
        parameter_bytes=parameters,
        kv_bytes_per_token=per_token,
    )
    return True


def _of_blocks(room: StageRoom, num_blocks: int) -> StageRoom:
    return replace(room, kv_capacity_tokens=num_blocks * BLOCK_TOKENS)
