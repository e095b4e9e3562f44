"""Scheduler to worker and loader: what to hold.

Level-triggered: a command is the whole desired state of its receiver under one epoch. What is not
in it is to be let go. It is repeated until reports agree, and every second after; hearing one
twice, or only the last of many, changes nothing.
"""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.cluster import FetchPriority, Member
from pilotlight.policy.ids import Epoch, Generation, InstanceId, NodeId, WorkerId
from pilotlight.policy.model import Model, Stage


def worker_hold_subject(worker_id: WorkerId) -> str:
    """``WorkerHold``."""
    return f"v1.worker.{worker_id}.hold"


def node_hold_subject(node_id: NodeId) -> str:
    """``NodeHold``."""
    return f"v1.loader.{node_id}.hold"


def prefetch_subject(node_id: NodeId) -> str:
    """``NodePrefetch``, by the cache."""
    return f"v1.loader.{node_id}.prefetch"


LEADING_KEY = "scheduler"
"""``Leading`` in the bucket ``leader``."""


class Leading(Message, frozen=True, kw_only=True):
    """The newest epoch, written before its leader's first command: a loader that was away learns
    from it which commands to refuse.
    """

    epoch: Epoch


class Hold(Message, frozen=True, kw_only=True):
    """One stage that a worker is to hold. Idempotent by (instance_id, generation)."""

    instance_id: InstanceId
    generation: Generation
    model: Model
    stage: Stage
    device_bytes: int
    """Granted room: parameters plus KV."""
    draining: bool = False
    """Take no new request; the stage is let go when the last one has ended."""
    drain_within_s: float | None = None
    """While ``draining``: requests that have not ended this long after the worker heard of it are
    to go on elsewhere. None: they end here, however long they take; an earlier release knows
    nothing else."""
    trace_parent: str = ""
    members: tuple[Member, ...] = ()
    """The pipeline group that the stage is one of, in the order of its stages; empty where one
    worker holds the model."""
    grown_from: InstanceId | None = None
    """The instance of whose group the worker had a stage, which has grown to the whole model: what
    it has of that is this one's from now on. A release before loads it anew."""


class WorkerHold(Message, frozen=True, kw_only=True):
    """Everything that a worker is to hold. ``init`` of what it starts begins when it was sent."""

    worker_id: WorkerId
    epoch: Epoch
    holds: tuple[Hold, ...]
    seq: int = 0
    """Counts the leader's commands under its epoch from 1, so that one that comes late is known to
    be old. 0: of a release that does not."""


class Peer(Message, frozen=True, kw_only=True):
    """Another node's loader, from which chunks can be had."""

    node_id: NodeId
    host: str
    port: int


class Fetch(Message, frozen=True, kw_only=True):
    """Parts of one model that a node's workers are about to lease: move their bytes at once, or,
    for a prefetch, when nothing that a cold start waits for is on its way.
    """

    instance_id: InstanceId
    generation: Generation
    model: Model
    parts: tuple[int, ...]
    trace_parent: str = ""
    priority: FetchPriority = FetchPriority.COLD_START
    upstreams: tuple[Peer, ...] = ()
    """Nodes that have the parts, or get them at this moment, in the order in which they are to be
    asked: the predecessor in the chain, then the nodes before it. The model's own source is asked
    when none of them can give a chunk."""


class NodePrefetch(Message, frozen=True, kw_only=True):
    """Everything that a node is to fetch ahead, beside its hold: for no instance, so that a copy
    stays in some memory. The order's generation counts its tries.
    """

    node_id: NodeId
    cache: str
    """Which life of the cache tells it."""
    fetches: tuple[Fetch, ...]
    seq: int = 0
    """Counts what that life has told the node, from 1."""


class NodeHold(Message, frozen=True, kw_only=True):
    """Everything that a node is to fetch for its workers.

    ``fetch`` of what it starts begins when it was sent.
    """

    node_id: NodeId
    epoch: Epoch
    fetches: tuple[Fetch, ...]
    seq: int = 0
    """As in ``WorkerHold``."""
