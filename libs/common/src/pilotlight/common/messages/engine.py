"""Worker and its engine child, over a socketpair: msgpack frames."""

from pilotlight.common.messages.codec import Message
from pilotlight.common.messages.pool import TensorPlace
from pilotlight.policy.types import FinishReason, InstanceId, Model, Moment, Phase, RequestId, Sampling, Stage, Vocabulary


class LoadStage(Message, tag="load", frozen=True, kw_only=True):
    """Make room for a stage; its parts follow as ``PlacePart``."""

    instance_id: InstanceId
    model: Model
    stage: Stage
    device_bytes: int
    pool_path: str
    sent: Moment | None = None
    """The engine's part of ``init`` begins then."""


class PlacePart(Message, tag="part", frozen=True, kw_only=True):
    """Copy one part's tensors from the host pool to their place."""

    instance_id: InstanceId
    part: int
    tensors: tuple[TensorPlace, ...]
    ready: Moment | None = None
    """As in ``PartReady``: ``load`` of this part begins then, or with the end of what came before."""


class UnloadStage(Message, tag="unload", frozen=True, kw_only=True):
    """Free a stage. Requests that still run on it end as cancelled."""

    instance_id: InstanceId


class Run(Message, tag="run", frozen=True, kw_only=True):
    """Take a request into the batch."""

    request_id: RequestId
    attempt: int
    instance_id: InstanceId
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: Sampling
    vocabulary: Vocabulary | None = None
    """The model's, if the sampling has a grammar."""
    sent: Moment | None = None
    """``prefill`` of a stage's first request begins then."""
    deadline_in_s: float | None = None
    """As in ``Submit``, from ``sent`` on."""


class Abort(Message, tag="abort", frozen=True, kw_only=True):
    """Drop a request within one step."""

    request_id: RequestId
    attempt: int


class Promote(Message, tag="promote", frozen=True, kw_only=True):
    """To a spare child: become the engine. ``EngineUp`` follows."""


class Shutdown(Message, tag="shutdown", frozen=True, kw_only=True):
    """End the child, in order."""


ToEngine = LoadStage | PlacePart | UnloadStage | Run | Abort | Promote | Shutdown


class SpareReady(Message, tag="spare", frozen=True, kw_only=True):
    """First frame of a spare child: it has imported what an engine needs, and waits."""

    device_open: bool = False
    """It has a context on a device, which it must not have before it is promoted."""


class EngineUp(Message, tag="up", frozen=True, kw_only=True):
    """First frame of a child that is ready to load."""

    pid: int
    device_name: str
    load_bytes_per_s: float
    device_bytes: int = 0
    """Memory for models, where the engine found out itself what its device has for them; else 0."""
    granule_bytes: int = 1
    """As in ``Device``."""


class EngineFault(Message, tag="fault", frozen=True, kw_only=True):
    """Last frame of a child that cannot go on: its device's context is lost, or its books are wrong. It ends now."""

    code: str
    message: str


class StageOpened(Message, tag="opened", frozen=True, kw_only=True):
    """Room is made for a whole model: it takes requests, and runs them as far as its parts are in place."""

    instance_id: InstanceId
    kv_capacity_tokens: int


class StageLoaded(Message, tag="loaded", frozen=True, kw_only=True):
    """Every part is in place: the stage runs requests to their ends from now on."""

    instance_id: InstanceId
    phases: tuple[Phase, ...]
    kv_capacity_tokens: int


class StageFailed(Message, tag="load_failed", frozen=True, kw_only=True):
    """The stage cannot be loaded: a code of the error taxonomy and a sentence. Its memory is free again."""

    instance_id: InstanceId
    code: str
    message: str


class StageUnloaded(Message, tag="unloaded", frozen=True, kw_only=True):
    """The stage's memory is free."""

    instance_id: InstanceId


class Produced(Message, array_like=True, frozen=True, kw_only=True):
    """What one step gave one request. ``position`` is that of its first new output token."""

    request_id: RequestId
    attempt: int
    position: int
    token_ids: list[int]
    logprobs: list[float] | None
    finish: FinishReason | None
    code: str = ""
    message: str = ""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Of each token, ids and log probabilities of the most probable ones, if the request asked for them."""


class StepDone(Message, tag="step", frozen=True, kw_only=True):
    """One engine step: its output, and what the batch looks like after it."""

    produced: list[Produced]
    waiting: int
    """Requests that own no KV blocks: not taken up yet, or preempted."""
    running: int
    kv_free_tokens: int
    """Room that no request owns."""
    step_time_s: float
    kv_used_tokens: int = 0
    """Room in blocks that requests own, filled or not."""
    kv_cached_tokens: int = 0
    """As much of the free room holds prefixes that can still be shared."""
    batch_tokens: int = 0
    """Tokens that the step ran through the model, of prompts and outputs."""
    prefix_looked_up_tokens: int = 0
    """Tokens of the requests that the step took up for the first time."""
    prefix_hit_tokens: int = 0
    """As many of those were found in the prefix cache."""
    preemptions: int = 0
    """Requests that gave up their KV blocks to older ones and will run again."""
    sampled: Moment | None = None
    """When its tokens were there: ``prefill`` ends and ``deliver`` begins then."""
    turn_of: InstanceId | None = None
    """Whose batch it was."""


class Prefilled(Message, tag="prefilled", frozen=True, kw_only=True):
    """When a stage computed its first token: the last phase of its cold start."""

    instance_id: InstanceId
    request_id: RequestId
    phase: Phase
    """From when every part was in place, or the request came, until the token was sampled."""
    earlier: tuple[Phase, ...] = ()
    """What ran of it before, while parts were on their way."""


FromEngine = SpareReady | EngineUp | EngineFault | StageOpened | StageLoaded | StageFailed | StageUnloaded | StepDone | Prefilled
