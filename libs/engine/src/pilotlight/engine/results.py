"""What the facade answers: frozen records, free of tensors."""

from dataclasses import dataclass

from pilotlight.common.messages.engine import StepDone
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """How a stage's device bytes are divided.

    ::

        device_bytes  [ parameter_bytes | kv_capacity_tokens * kv_bytes_per_token | less than one block, and what granules waste ]
    """

    parts: tuple[int, ...]
    """Parts that have to be placed, in execution order."""
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    """Whole blocks only."""
    device_bytes: int = 0
    """What this takes, after a resize: less than was given where KV ends at a place that costs
    less, or where some layers have more than the others so far. 0: what was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPart:
    """What it took to place one part. Both times are zero when the part was in place already."""

    copy_s: float
    """Out of the given buffers into the engine's own memory."""
    convert_s: float
    """From the checkpoint's dtype into the stage's."""
    ready: bool
    """Every part of the stage is in place now."""
    waits: bool = False
    """It is not in place: its copies go on in the background, and it has to be placed again."""
    by_device_bytes: int = 0
    """Of tensors that came from the device of a neighbour, and not from the given buffers."""
    why: str = ""
    """Why it did not come from a neighbour, where that was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrefill:
    """From when a stage took up its first request until that request's first token was sampled."""

    instance_id: InstanceId
    request_id: RequestId
    start_s: float
    end_s: float
    tokens: int = 0
    """That were run for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPipeline:
    """A stage that is connected to no others any more. It is still held; its requests have
    ended.
    """

    instance_id: InstanceId
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownStage:
    """A stage that runs its longer range now."""

    instance_id: InstanceId
    stage: Stage
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A request that left in mid-generation: what another engine needs to go on with it, beside its
    KV.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling
    deadline_s: float | None


class StepResult(StepDone, frozen=True, kw_only=True):
    """What a step's worker is told, with sums over all resident stages, and what of it stays in the
    engine's process.
    """

    first_prefills: tuple[FirstPrefill, ...] = ()
    lost: tuple[LostPipeline, ...] = ()
    left: tuple[InstanceId, ...] = ()
    """Stages that are in no pipeline any more, since the leading one has taken all of their layers
    over."""
    grown: tuple[GrownStage, ...] = ()
    unformed: tuple[LostPipeline, ...] = ()
    """Stages that are in a pipeline, of which no shorter one forms."""
