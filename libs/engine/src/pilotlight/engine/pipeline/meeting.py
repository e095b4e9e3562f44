"""What stages learn of each other when a ring forms, and what the one that leads makes of it."""

from collections.abc import Sequence

from pilotlight.engine.errors import PeerLost
from pilotlight.engine.pipeline.frames import StageHello
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage


def hello_of(resident: ResidentStage, stage: Stage, *, loading: bool = False) -> StageHello:
    """What a stage says of itself.

    Args:
        resident: the stage.
        stage: the layers that it runs in the ring.
        loading: it answers later.
    """
    return StageHello(
        stage=stage,
        spec=resident.spec,
        dtype=resident.dtype,
        num_blocks=resident.num_blocks,
        loading=loading,
        lends=resident.memory.arena.lending is not None,
        held=resident.stage if stage != resident.stage else None,
    )


def blocks_of(resident: ResidentStage, stages: Sequence[StageHello]) -> int:
    """KV blocks that all stages of a ring have.

    Args:
        resident: the stage that leads.
        stages: all of them, in the order of the ring.

    Raises:
        PeerLost: they are not one model.
    """
    stop = 0
    for hello in stages:
        if (
            hello.stage.start != stop
            or hello.spec != resident.spec
            or hello.dtype is not resident.dtype
        ):
            raise PeerLost(
                f"stage [{hello.stage.start}, {hello.stage.stop}) does not follow on layer {stop} of one model"
            )
        stop = hello.stage.stop
    if stop != resident.spec.num_layers or len(stages) < 2:
        raise PeerLost(f"the stages end at layer {stop} of {resident.spec.num_layers}")
    return min(hello.num_blocks for hello in stages)
