"""How a stage becomes one of a pipeline, once it has its channels."""

from pilotlight.engine.channel.channel import Channel
from pilotlight.engine.errors import BadRequest
from pilotlight.engine.pipeline.follow import PipelineFollower
from pilotlight.engine.pipeline.lead import PipelineLead
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage


def enter(resident: ResidentStage, before: Channel, behind: Channel, now_s: float) -> None:
    """Make a stage one of a pipeline: it leads if it begins the model, else it follows.

    Parts may still come: micro-batches run as far as they are in place.

    Args:
        resident: the stage; it owns both channels from now on.
        before: from the stage before; for the first stage, from the last.
        behind: to the next stage; for the last stage, to the first.
        now_s: on the engine's clock.

    Raises:
        BadRequest: it is a whole model, or in a pipeline already.
        PeerLost: the next stage is gone already.
    """
    if resident.stage == resident.spec.whole or resident.pipeline is not None:
        raise BadRequest(f"{resident.instance_id} is a whole model, or in a pipeline already")
    if resident.stage.start == 0:
        resident.pipeline = PipelineLead(resident, before, behind, now_s)
    else:
        resident.pipeline = PipelineFollower(resident, before, behind)


def shorten(resident: ResidentStage, stage: Stage, before: Channel, behind: Channel) -> None:
    """Give a stage its place in a shorter pipeline, while the one that it is in runs on.

    Args:
        resident: the stage; it may have a longer range to come. It owns both channels from now on.
        stage: its range in the shorter pipeline.
        before: from the stage that is before it there.
        behind: to the one behind it there.

    Raises:
        BadRequest: it is in no pipeline, or has layers beside that range.
    """
    if resident.pipeline is None or not resident.stage.is_within(stage):
        raise BadRequest(
            f"{resident.instance_id} is in no pipeline, or has not its layers in [{stage.start}, {stage.stop})"
        )
    resident.pipeline.shorten(stage, before, behind)
