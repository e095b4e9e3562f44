"""What is known of workers and nodes: their devices, stages, copies, transfers and links.

Everything here is frozen and carries its unit in its name. Messages embed these classes, and the
simulator builds them: there is no second class with the same fields anywhere. Times are seconds on
one monotonic clock.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from pilotlight.policy.ids import Digest, Epoch, Generation, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import Moment
from pilotlight.policy.shown import NO_TIMES, EngineStart, StageTimes


class DeviceKind(StrEnum):
    """What a worker's device is. What runs models on it is another question: see ``EngineKind``."""

    CPU = "cpu"
    CUDA = "cuda"
    SIM = "sim"
    """A stand-in that exists in its size and speed alone: every model on it is simulated, whatever
    engine it asks for. It is a kind of its own so that nothing that was learned there is believed
    of a device that computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device, or set of devices of one host, that a worker speaks for."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    load_bytes_per_s: float
    """Bandwidth from the host pool into device memory."""
    granule_bytes: int = 1
    """Memory comes in whole granules of this: each part of a model, and each layer's keys and
    values, take a whole number of them."""
    memory_bytes_per_s: float = 0.0
    """What it reads of its own memory, as its engine measured when it came up; 0: that was not
    measured."""


class HealthState(StrEnum):
    """How a worker's device is; ``policy.device_health`` judges."""

    UNWATCHED = "unwatched"
    """Not watched: cores, a simulation, a device whose driver cannot be asked, or of a release that
    does not say."""
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It works, with less than it should have, or not for long: taken where there is no other."""
    FAILED = "failed"
    """It computes nothing that can be trusted, or nothing at all: no engine runs on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """What its driver says of a device, or of a worker's devices."""

    state: HealthState = HealthState.UNWATCHED
    reason: str = ""
    """Which reading says so, and what it says: `xid: 79, the device has fallen off the bus`. Of a
    device that nothing is said of: why an engine on it was found hanging not long ago."""


class Liveness(StrEnum):
    """How long ago the last report came, by the receiver's monotonic clock."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    """Silent for 1 s: gets no new work."""
    DEAD = "dead"
    """Silent for 3 s, or its socket closed."""


class HeldState(StrEnum):
    """What a worker says of one stage it was told to hold."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """Takes no new request and ends the ones it has."""
    FAILED = "failed"
    EVICTED = "evicted"
    """Given up for room, at the cache's request; the scheduler has yet to take it back."""


RESIDENT = frozenset({HeldState.LOADING, HeldState.READY, HeldState.DRAINING})
"""States in which a stage takes device memory. One that failed or was evicted takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoan:
    """KV of a stage beyond its grant (``policy.lending``): free memory of the device, as far as
    placing is concerned.
    """

    lent_bytes: int = 0
    """What it has."""
    offered_bytes: int = 0
    """What the cache lends it, as the worker was told last."""
    wanted_bytes: int = 0
    """What its requests want."""
    most_bytes: int = 0
    """It can use no more; 0: it takes no loans."""
    limit_tokens: int = 0
    """Tokens for which its KV has room when it has grown into its loan; 0: that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLoan:
    """Device memory of a build (``policy.lending``): what its worker would lend to KV, and free as
    far as placing is concerned.
    """

    wanted_bytes: int = 0
    """What it asks for, with what its engine keeps for itself; 0: there is none."""
    offered_bytes: int = 0
    """What the cache lends it, as the worker was told last."""
    taken_bytes: int = 0
    """What it has, until its engine's process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """One stage on one worker, as the worker reports it."""

    instance_id: InstanceId
    generation: Generation
    model: ModelName
    digest: Digest
    stage: Stage
    state: HeldState
    device_bytes: int
    """Parameters and granted KV, without what is lent."""
    in_flight: int = 0
    idle_s: float = 0.0
    """Since its last request ended; 0 while one is in flight."""
    reason: str = ""
    """Why it failed or was evicted: a code of the error taxonomy and a sentence."""
    kv_capacity_tokens: int = 0
    """Tokens of prompt and output for which its KV has room, of all requests; 0: not known yet."""
    loaded: Moment | None = None
    """When the last part was in its place; None before."""
    open: bool = False
    """It takes requests and loads still: they run as far as its parts are in place. Or it leads a
    pipeline group: it is joined to the other stages."""
    port: int = 0
    """Where its engine listens for the engines of the instance's other stages; 0: nowhere."""
    loan: KvLoan = KvLoan()
    start_device_s: float = 0.0
    """Device-seconds that its load took, beside others (``device_time``); 0 while it loads."""
    idle_device_s: float = 0.0
    """In which it was ready and nobody used the device (``device_time``), as of a minute ago."""
    times: StageTimes = NO_TIMES
    """What its steps and hops took lately, told when that has changed."""

    @property
    def kv_reach_tokens(self) -> int:
        """Tokens for which its KV has room, or will have when requests want it."""
        return max(self.kv_capacity_tokens, self.loan.limit_tokens)

    @property
    def kv_grows(self) -> bool:
        """Its requests want more KV than there is, and it is about to have more."""
        wants = self.loan.wanted_bytes > self.loan.lent_bytes
        return wants and self.kv_reach_tokens > self.kv_capacity_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker of a pipeline group: its stage, and where its engine listens for those of the
    others.
    """

    worker_id: WorkerId
    node_id: NodeId
    stage: Stage
    host: str = ""
    port: int = 0
    """0: that is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What is known of a worker."""

    worker_id: WorkerId
    node_id: NodeId
    device: Device
    liveness: Liveness
    held: tuple[HeldStage, ...] = ()
    queue_requests: int = 0
    running_requests: int = 0
    kv_free_tokens: int = 0
    step_time_s: float = 0.0
    engine_up: bool = True
    health: DeviceHealth = DeviceHealth()
    devices: tuple[Device, ...] = ()
    """Each by itself, in the order of their shares; ``device`` is all of them
    (``devices.together``). Empty: of a release that does not say."""
    engine_start: EngineStart | None = None
    """Of the engine that is up, or was; None: there was none, or a release that does not say."""
    build: BuildLoan = BuildLoan()

    @property
    def used_bytes(self) -> int:
        """Device bytes taken by the stages that are held."""
        return sum(held.device_bytes for held in self.held if held.state in RESIDENT)

    @property
    def free_bytes(self) -> int:
        """Device bytes that nothing holds."""
        return self.device.memory_bytes - self.used_bytes

    @property
    def warm(self) -> bool:
        """Holds no model and is ready to load one."""
        return self.engine_up and not self.held and self.liveness is Liveness.ALIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker by its last report."""

    facts: WorkerFacts
    """With the receiver's judgement of its liveness."""
    heard_s: float
    """When the report came, or the last word that nothing has changed since, on the receiver's
    monotonic clock."""
    incarnation: str
    epoch_seen: Epoch
    unchanged_for_s: float = 0.0
    """How long before ``heard_s`` the facts were those already: ages in them are of that time."""

    @property
    def facts_s(self) -> float:
        """The time of which ages in the facts are, on the receiver's monotonic clock."""
        return self.heard_s - self.unchanged_for_s

    def facts_at(self, now_s: float) -> WorkerFacts:
        """The facts with the ages that they have by now: nothing is reported of a worker that only
        grows older.
        """
        aged_s = max(0.0, now_s - self.facts_s)
        held = tuple(
            one if one.in_flight else replace(one, idle_s=one.idle_s + aged_s)
            for one in self.facts.held
        )
        return replace(self.facts, held=held)

    def held(self, instance_id: InstanceId) -> HeldStage | None:
        """The stage of an instance, if the worker reports one."""
        return next((held for held in self.facts.held if held.instance_id == instance_id), None)


class Tier(StrEnum):
    """Where a copy of parameters lies."""

    REMOTE = "remote"
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One model's parameters, or some parts of them, in one tier of one node."""

    digest: Digest
    node_id: NodeId
    tier: Tier
    parts: tuple[int, ...]
    """Parts that are complete and verified."""
    size_bytes: int
    leases: int = 0
    idle_s: float = 0.0
    """Since it was last leased or asked for: an age, because a loader and its reader may be on two
    hosts."""


class FetchPriority(StrEnum):
    """Why bytes move. What a cold start waits for goes before everything else."""

    COLD_START = "cold_start"
    PREFETCH = "prefetch"


class OriginKind(StrEnum):
    """What a fetch takes chunks from, the nearest first."""

    DISK = "disk"
    PEER = "peer"
    SOURCE = "source"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginShare:
    """What one origin gave of a transfer."""

    kind: OriginKind
    name: str
    """A node's id, a model's URI, ``disk``."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A fetch that is under way."""

    digest: Digest
    source: str
    done_bytes: int
    total_bytes: int
    model: ModelName = ModelName("")
    """Empty: of a release that does not say, as are the defaults of what follows."""
    priority: FetchPriority = FetchPriority.COLD_START
    bytes_per_s: float | None = None
    """What came lately; None: too little came to say."""
    age_s: float = 0.0
    """Since it began."""
    origins: tuple[OriginShare, ...] = ()
    """Whose verified chunks it has, in the order in which they gave the first one."""


PEER_LINK = "peer://"
"""Before a node's id: what the link to it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """What a link gave a node when it was last busy, all reads together, by the loader's
    measurement; of a disk that was not read from yet, what a probe found.
    """

    kind: OriginKind
    name: str
    """What shares it: a node (``PEER_LINK``, id), a bucket, the hub, the host's folders, a disk."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is known of a node: its links, its host pool, the copies and transfers there."""

    node_id: NodeId
    host: str
    liveness: Liveness
    nic_bytes_per_s: float
    pool_bytes: int
    pool_free_bytes: int
    pool_unit_bytes: int = 1
    """The pool gives room in multiples of this."""
    copies: tuple[Copy, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    draining: bool = False
    pool_largest_free_bytes: int | None = None
    """Free bytes of the host pool that lie in a row; None: of a release that does not say."""
    disk_tier_bytes: int = 0
    """What chunks on the node's disk may take; 0: none are kept there."""
    disk_tier_used_bytes: int = 0
    dataplane_host: str = ""
    """Where other nodes' loaders reach this one. Empty: of a release that sends no chunks, or one
    that has no key."""
    dataplane_port: int = 0
    links: tuple[LinkSpeed, ...] = ()
    """Those over which chunks came, and the node's disk."""
    distrusted: tuple[str, ...] = ()
    """Nodes that gave this node wrong bytes, and are not asked until some time has passed."""

    def pool_room_bytes(self, part_bytes: tuple[int, ...]) -> int:
        """What parts of these sizes take of the host pool."""
        return sum(-(-size // self.pool_unit_bytes) * self.pool_unit_bytes for size in part_bytes)
