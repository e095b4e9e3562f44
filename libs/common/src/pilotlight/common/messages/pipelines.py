"""Worker and its engine child, on pipelines and on ranges that grow: a part of ``engine``."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import Phase


class OpenDoor(Message, tag="door", frozen=True, kw_only=True):
    """Listen for the engines of other stages.

    ``DoorOpened`` follows, or ``StageRefused`` without an instance.
    """

    node_id: NodeId
    """What this node proves, with the cluster's key."""
    host: str
    """The address to listen at."""
    secrets_dir: str
    """The folder of the cluster's key, which is in no message."""


class StageAddress(Message, frozen=True, kw_only=True):
    """Where the engine of a stage listens."""

    node_id: NodeId
    stage: Stage
    host: str
    port: int


class KvAt(Message, frozen=True, kw_only=True):
    """Where KV of a request may be that ran there: an engine of the cluster, and its door."""

    instance_id: InstanceId
    """As that engine calls the model that it has whole."""
    node_id: NodeId
    host: str
    port: int


class ConnectStage(Message, tag="connect", frozen=True, kw_only=True):
    """Join a pipeline: each stage connects to the one behind it, the last one to the first.

    ``StageConnected`` follows, and ``StageOpened`` where the stage leads; or ``StageRefused``.
    """

    instance_id: InstanceId
    stage: Stage
    """What this engine holds of the instance."""
    behind: StageAddress
    timeout_s: float
    """For each of the two channels."""
    proven: bool = True
    """Its parts are in place, and were whole. Else ``VouchStage`` follows when that is known."""
    shorter: bool = False
    """The stage is in a pipeline, which runs on until one of fewer stages takes its place: these
    are its neighbours there. ``RingUnformed`` follows where nothing comes of that."""


class VouchStage(Message, tag="vouch", frozen=True, kw_only=True):
    """The parts of a stage of several were whole when they were copied: what it computes may go to
    the other stages.
    """

    instance_id: InstanceId


class ExtendStage(Message, tag="extend", frozen=True, kw_only=True):
    """Give a stage more layers behind its own; the parts that it lacks follow as ``PlacePart``.

    It serves its old range meanwhile. ``StageGrown`` follows, or ``StageRefused``: then it stays
    what it was.
    """

    instance_id: InstanceId
    stage: Stage
    """Its range afterwards."""
    device_bytes: int
    """What the stage has from now on."""
    pool_path: str
    shorter: bool = False
    """Its pipeline is to have fewer stages: it runs the longer range when these have formed."""


class CallOffExtend(Message, tag="call_off", frozen=True, kw_only=True):
    """Parts of a longer range cannot be had.

    ``StageRefused`` follows if the stage serves its old range on, else ``StageFailed``.
    """

    instance_id: InstanceId
    code: str
    message: str


class RenameStage(Message, tag="rename", frozen=True, kw_only=True):
    """A stage that has grown to the whole model, and is in no pipeline any more, is another
    instance's from now on.

    ``StageRenamed`` follows, or ``StageRefused``: then it stays what it was.
    """

    instance_id: InstanceId
    new_id: InstanceId


class DoorOpened(Message, tag="door_opened", frozen=True, kw_only=True):
    """The engines of other stages can connect here."""

    port: int


class StageConnected(Message, tag="connected", frozen=True, kw_only=True):
    """The stage is one of a pipeline."""

    instance_id: InstanceId


class StageGrown(Message, tag="grown", frozen=True, kw_only=True):
    """The stage has its longer range. One that follows in a pipeline runs it when the pipeline
    ends, or has become shorter; ``StageOpened`` tells that of a whole model.
    """

    instance_id: InstanceId
    stage: Stage
    kv_capacity_tokens: int
    phases: tuple[Phase, ...] = ()
    """Of the parts that came."""


class PipelineLeft(Message, tag="left", frozen=True, kw_only=True):
    """The stage is in no pipeline any more: all of its layers were taken over, or, with a code,
    others of its stages are lost.
    """

    instance_id: InstanceId
    code: str = ""
    message: str = ""


class RingUnformed(Message, tag="ring_unformed", frozen=True, kw_only=True):
    """A stage has no place in a shorter pipeline, or has lost it; the one that it is in runs on."""

    instance_id: InstanceId
    code: str
    message: str


class StageRenamed(Message, tag="renamed", frozen=True, kw_only=True):
    """The stage is this instance's from now on, and serves it."""

    instance_id: InstanceId
    old_id: InstanceId
    kv_capacity_tokens: int
