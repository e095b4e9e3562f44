"""Worker and its engine child, over a socketpair: msgpack frames, each of them ``Timed``
(``common.envelope``).
"""

from pilotlight.common.envelope import Timed
from pilotlight.common.messages import graphs as restored
from pilotlight.common.messages.codec import Message
from pilotlight.common.messages.pipelines import (
    CallOffExtend,
    ConnectStage,
    DoorOpened,
    ExtendStage,
    KvAt,
    OpenDoor,
    PipelineLeft,
    RenameStage,
    RingUnformed,
    StageConnected,
    StageGrown,
    StageRenamed,
    VouchStage,
)
from pilotlight.common.messages.pool import TensorPlace
from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.materialized import Environment
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.phase import Phase
from pilotlight.policy.request import NO_PROMISE, FinishReason, Promise, Sampling, Vocabulary
from pilotlight.policy.shown import EngineStart


class LoadStage(Message, tag="load", frozen=True, kw_only=True):
    """Make room for a stage; its parts follow as ``PlacePart``, as soon as the worker has them.

    The engine's part of ``init`` begins when it was sent.
    """

    instance_id: InstanceId
    model: Model
    stage: Stage
    device_bytes: int
    may_grow: bool = False
    """The bytes are those of the whole model, which a stage of a group is to become in them: it has
    no more KV than that will have."""
    pool_path: str = ""
    """Where its parts lie; empty: each of them says so, for their lease is asked for meanwhile."""
    artifact: bytes = b""
    """The signed manifest of what the stage is restored from; empty: everything is computed."""
    graphs: str = ""
    """Where the artifact's archive of graphs is, for an engine on a GPU; empty: there is none."""
    prove: bool = False
    """Prove all graphs as soon as the stage's parts are in place, not each before its first use."""
    record: str = ""
    """Where its graphs go once its parts are there (``ChildOptions.record_images``)."""
    precomputed: restored.Precomputed = restored.Precomputed()


class PlacePart(Message, tag="part", frozen=True, kw_only=True):
    """Copy one part's tensors from the host pool to their place.

    The envelope says since when the part is ready: ``load`` of it begins then, or with the end of
    what came before.
    """

    instance_id: InstanceId
    part: int
    tensors: tuple[TensorPlace, ...]
    pool_path: str = ""
    """Where they lie, if the stage was begun before that was known; of a stage the first part's
    counts."""


class ResizeStage(Message, tag="resize", frozen=True, kw_only=True):
    """Give a stage more bytes or fewer: its KV grows or shrinks.

    ``StageResized`` follows, or ``StageRefused``.
    """

    instance_id: InstanceId
    device_bytes: int
    must: bool = False
    """Others need the memory: requests that then have no room, even alone, end with
    ``not_loaded``, to go on elsewhere. Otherwise they are a reason to refuse."""
    target_bytes: int = 0
    """Of a growth in many small steps, what the last of them gives: layers get memory one after the
    other, and KV has more room when all have it. 0: all of it at once."""


class LeaveRoom(Message, tag="leave", frozen=True, kw_only=True):
    """Leave so much of the device's memory to another process: no memory that is idle is kept that
    it needs. ``RoomLeft`` follows.
    """

    device_bytes: int
    """0: to none any more."""


class UnloadStage(Message, tag="unload", frozen=True, kw_only=True):
    """Free a stage. Requests that still run on it end as cancelled."""

    instance_id: InstanceId


class Run(Message, tag="run", frozen=True, kw_only=True):
    """Take a request into the batch.

    ``prefill`` of a stage's first request begins when it was sent.
    """

    request_id: RequestId
    attempt: int
    instance_id: InstanceId
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: Sampling
    vocabulary: Vocabulary | None = None
    """The model's, if the sampling has a grammar."""
    deadline_in_s: float | None = None
    """As in ``Submit``, from when it was sent."""
    kv_at: KvAt | None = None
    """Of a request that moved here: an engine that may have keys and values of its tokens. What
    that does not give in time is computed."""
    share: FairShare = NO_TENANT
    """As in ``Submit``."""
    promise: Promise = NO_PROMISE
    """As in ``Submit``, from when it was sent."""


class Abort(Message, tag="abort", frozen=True, kw_only=True):
    """Drop a request within one step."""

    request_id: RequestId
    attempt: int


class Promote(Message, tag="promote", frozen=True, kw_only=True):
    """To a spare child, or one that was started ahead: become the engine. ``EngineUp`` follows."""

    cuda_devices: tuple[str, ...] = ()
    """UUIDs or indexes of the GPUs that it is shown, where that was not known when it started."""


class Shutdown(Message, tag="shutdown", frozen=True, kw_only=True):
    """End the child, in order."""


ToEngine = (
    LoadStage
    | PlacePart
    | UnloadStage
    | Run
    | Abort
    | Promote
    | Shutdown
    | OpenDoor
    | ConnectStage
    | ExtendStage
    | CallOffExtend
    | VouchStage
    | ResizeStage
    | LeaveRoom
    | RenameStage
)
CommandFrame = Timed[ToEngine]
"""What the engine child reads."""


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
    memory_bytes_per_s: float = 0.0
    """As in ``Device``."""
    environment: Environment | None = None
    """What artifacts depend on; None of an engine that uses none."""
    beside_bytes: int = 0
    """Of the memory for models, what another engine on the device, of the same kind, would keep for
    itself: its context, libraries and workspace. 0 where that is no device's memory."""
    start: EngineStart | None = None


class EngineFault(Message, tag="fault", frozen=True, kw_only=True):
    """Last frame of a child that cannot go on: its device's context is lost, or its books are
    wrong.

    It ends now.
    """

    code: str
    message: str


class StageOpened(Message, tag="opened", frozen=True, kw_only=True):
    """The stage takes requests: room is made for a whole model, which runs them as far as its parts
    are in place, or the stage leads a pipeline whose stages have all answered. Nothing else says
    that an engine serves an instance.
    """

    instance_id: InstanceId
    kv_capacity_tokens: int


class StageLoaded(Message, tag="loaded", frozen=True, kw_only=True):
    """Every part is in place: the stage runs requests to their ends from now on."""

    instance_id: InstanceId
    phases: tuple[Phase, ...]
    kv_capacity_tokens: int
    recorded: restored.GraphsRecorded | None = None
    """Where graphs were to be recorded."""


class StageFailed(Message, tag="load_failed", frozen=True, kw_only=True):
    """The stage cannot be loaded: a code of the error taxonomy and a sentence.

    Its memory is free again.
    """

    instance_id: InstanceId
    code: str
    message: str


class StageResized(Message, tag="resized", frozen=True, kw_only=True):
    """The stage has the bytes that it was given."""

    instance_id: InstanceId
    kv_capacity_tokens: int
    device_bytes: int = 0
    """What this room takes, where that is less than was given: KV shrank by more than was asked
    for, or some layers wait for the others' memory. 0: all of it."""


class RoomLeft(Message, tag="left-room", frozen=True, kw_only=True):
    """What was to be left to another process is free, as far as it is this one's."""

    device_bytes: int
    refused: str = ""
    """Why the device does not take it back; empty: it has."""


class StageRefused(Message, tag="refused", frozen=True, kw_only=True):
    """The last command about pipelines, ranges or bytes cannot be done: the stage stays what it
    was.
    """

    code: str
    message: str
    instance_id: InstanceId | None = None


class StageUnloaded(Message, tag="unloaded", frozen=True, kw_only=True):
    """The stage's memory is free."""

    instance_id: InstanceId
    kernels: restored.KernelsRecorded | None = None
    """Where they were to be recorded."""


class Produced(Message, array_like=True, frozen=True, kw_only=True):
    """What one step gave one request.

    Every request that was added gets exactly one with a ``finish``.
    """

    request_id: RequestId
    attempt: int
    position: int
    """Output position of the first of ``token_ids``; the number of output tokens so far when there
    are none."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    """As many as tokens, if the request asked for them."""
    finish: FinishReason | None = None
    code: str = ""
    message: str = ""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """Of each token, ids and log probabilities of the most probable ones, if the request asked for
    them."""
    cached_tokens: int = 0
    """With the first token: as many of the prompt were found in the prefix cache."""
    prompt: PromptLogprobs | None = None
    """With the first token, if the request asked for it."""
    vector: bytes | None = None
    """With the token of a request that is pooled: its vector or score, float32 and lowest byte
    first."""


class StepDone(Message, tag="step", frozen=True, kw_only=True):
    """One engine step: its output, and what the batch looks like after it.

    The envelope says when its tokens were there: ``prefill`` ends and ``deliver`` begins then.
    """

    produced: tuple[Produced, ...]
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
    turn_of: InstanceId | None = None
    """Whose batch ran, or went on as far as its parts are in place."""
    hop_s: float = 0.0
    """As in ``StageTimes``, of a micro-batch that has come round; 0: none that went alone."""


class Prefilled(Message, tag="prefilled", frozen=True, kw_only=True):
    """When a stage computed its first token: the last phase of its cold start."""

    instance_id: InstanceId
    request_id: RequestId
    phase: Phase
    """From when every part was in place, or the request came, until the token was sampled."""
    earlier: tuple[Phase, ...] = ()
    """Whatever else was recorded since the stage was loaded. What ran while parts were on their way
    left with ``StageLoaded``."""


FromEngine = (
    SpareReady
    | EngineUp
    | EngineFault
    | StageOpened
    | StageLoaded
    | StageFailed
    | StageUnloaded
    | StepDone
    | Prefilled
    | DoorOpened
    | StageConnected
    | StageGrown
    | restored.StageGraphs
    | restored.StageKernels
    | StageResized
    | RoomLeft
    | StageRefused
    | PipelineLeft
    | RingUnformed
    | StageRenamed
)
EventFrame = Timed[FromEngine]
"""What the worker reads."""
