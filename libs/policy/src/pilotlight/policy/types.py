"""The facts and plans that every service speaks in.

Everything here is frozen and carries its unit in its name. Messages embed these classes, the database stores them as JSON, the
simulator builds them: there is no second class with the same fields anywhere. Times are seconds on one monotonic clock, layer
ranges are half-open.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

ModelName = NewType("ModelName", str)
NodeId = NewType("NodeId", str)
WorkerId = NewType("WorkerId", str)
InstanceId = NewType("InstanceId", str)
GatewayId = NewType("GatewayId", str)
RequestId = NewType("RequestId", str)
DecisionId = NewType("DecisionId", str)
GrantId = NewType("GrantId", str)
Digest = NewType("Digest", str)
"""Lower-case hex of a BLAKE3 hash."""
Epoch = NewType("Epoch", int)
"""The scheduler's fencing number; a command with an older epoch is refused."""
Generation = NewType("Generation", int)
"""The version of one instance's desired stages; commands are idempotent by (instance, generation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point in time: a host's monotonic clock, and what to add to get wall time."""

    at_s: float
    wall_offset_s: float


class Dtype(StrEnum):
    """Element types that a checkpoint may hold and an engine may run."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[self.value]


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """The layer range [start, stop) that one worker of an instance holds.

    ::

        layers   0   1   2   3   4   5
                 [0 ....... 3)              Stage(0, 3): embedding and layers 0, 1, 2
                             [3 ....... 6)  Stage(3, 6): layers 3, 4, 5 and the head
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a stage needs 0 <= start < stop, not [{self.start}, {self.stop})")

    @property
    def num_layers(self) -> int:
        """Decoder layers in the range."""
        return self.stop - self.start


class RopeKind(StrEnum):
    """Ways to stretch rotary embeddings over a longer context than a model was trained on first."""

    LLAMA3 = "llama3"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies of rotary embeddings are changed. What a kind has no use for keeps its default."""

    factor: float
    low_freq_factor: float = 0.0
    """Of ``LLAMA3``, as is the next."""
    high_freq_factor: float = 0.0
    original_max_position_tokens: int = 0
    """Of ``LLAMA3`` and ``YARN``: the context before stretching."""
    kind: RopeKind = RopeKind.LLAMA3
    beta_fast: float = 32.0
    """Of ``YARN``, as are those that follow: turns within the original context above which a frequency stays as it is."""
    beta_slow: float = 1.0
    """Turns below which a frequency is divided by the whole factor."""
    attention_factor: float = 1.0
    """What rotated queries and keys are multiplied with."""
    truncate: bool = True
    """The bounds that follow from the betas are rounded to whole dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward networks of a mixture-of-experts model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalized: bool
    """The shares of a token's experts are made to add up to 1."""
    layers: tuple[int, ...]
    """Layers that have experts; the others have one network of ``ModelSpec.intermediate_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a checkpoint is, read from its configuration and headers. Nothing here is an operator's choice.

    ``part_bytes`` has ``num_layers + 2`` entries in execution order: the embedding, each decoder layer, the head (final norm
    and output projection). Embedding and head are not split; a tied embedding lies in part 0 alone.

    A field with a default came with a later release. Its default is what models had before: such a model's digest does not
    change with the release.
    """

    architecture: str
    dtype: Dtype
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tied_embeddings: bool
    attention_bias: bool
    part_bytes: tuple[int, ...]
    sliding_window_tokens: int | None = None
    """How many tokens a query of a sliding layer sees, its own among them."""
    sliding_layers: tuple[int, ...] = ()
    """Layers with that window; the others see the whole context."""
    sliding_rope_theta: float | None = None
    """Of the sliding layers, whose frequencies are then not scaled; None: they turn as the others do."""
    attention_scale: float | None = None
    """What attention scores are multiplied with; None: 1 / sqrt(head_dim)."""
    logit_softcap: float | None = None
    """Logits are bent into (-cap, cap) by cap * tanh(logit / cap)."""
    experts: Experts | None = None

    @property
    def whole(self) -> Stage:
        """The stage that holds every layer."""
        return Stage(0, self.num_layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters as stored."""
        return sum(self.part_bytes)

    def parts_of(self, stage: Stage) -> tuple[int, ...]:
        """Parts that a stage needs, in execution order.

        Part 0 is the embedding (first stage; the last stage too when it is tied to the head), part 1 + l is layer l, and part
        ``num_layers + 1`` is the head (last stage).
        """
        first = (0,) if stage.start == 0 or (self.tied_embeddings and stage.stop == self.num_layers) else ()
        last = (self.num_layers + 1,) if stage.stop == self.num_layers else ()
        return (*first, *range(1 + stage.start, 1 + stage.stop), *last)

    def stage_bytes(self, stage: Stage) -> int:
        """Bytes of the parameters that a stage holds, as stored."""
        return sum(self.part_bytes[part] for part in self.parts_of(stage))

    def kv_bytes_per_token(self, stage: Stage, dtype: Dtype) -> int:
        """Bytes of keys and values that one token takes in a stage's layers."""
        return 2 * stage.num_layers * self.num_kv_heads * self.head_dim * dtype.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a model must meet: time to first token, time per output token, and for which share of its requests."""

    ttft_ms: float
    tpot_ms: float
    attainment: float = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingBounds:
    """How many instances a model may have, and how long an idle one is kept."""

    min_instances: int = 0
    max_instances: int = 1
    keep_alive_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A registered checkpoint: what it is, where it lies, what its owner asks for."""

    name: ModelName
    uri: str
    revision: str | None
    source_version: str
    """Pinned version of the source: file sizes and times, an S3 ETag, a hub commit."""
    digest: Digest
    """Digest of the manifest without chunk digests; also the manifest's key in the object store."""
    text_digest: Digest
    """Key of the text bundle (tokenizer, chat template, generation defaults)."""
    dtype: Dtype
    """Element type that the engine runs in."""
    spec: ModelSpec
    slo: Slo
    scaling: ScalingBounds
    pinned: bool = False
    keep_host_copy: bool = True

    def device_bytes(self, stage: Stage) -> int:
        """Bytes of a stage's parameters on a device, in the dtype that the engine runs in."""
        return self.spec.stage_bytes(stage) * self.dtype.size_bytes // self.spec.dtype.size_bytes


class DeviceKind(StrEnum):
    """What a worker's device is. ``sim`` answers with timings and computes nothing."""

    CPU = "cpu"
    CUDA = "cuda"
    SIM = "sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device, or set of devices of one host, that a worker speaks for."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    load_bytes_per_s: float
    """Bandwidth from the host pool into device memory."""
    granule_bytes: int = 1
    """Memory comes in whole granules of this: each part of a model, and each layer's keys and values, take so many."""


class HealthState(StrEnum):
    """How a worker's device is; ``policy.device_health`` judges."""

    UNWATCHED = "unwatched"
    """Nobody looks: cores, a simulation, a device whose driver cannot be asked, or of a release that does not say."""
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It works, with less than it should have, or not for long: taken where there is no other."""
    FAILED = "failed"
    """It computes nothing that can be trusted, or nothing at all: no engine runs on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """What its driver says of a device."""

    state: HealthState = HealthState.UNWATCHED
    reason: str = ""
    """Which reading says so, and what it says: `xid: 79, the device has fallen off the bus`. Of a device that nothing is said of: why an
    engine on it was found hanging not long ago."""


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
    """Parameters and granted KV."""
    in_flight: int = 0
    idle_s: float = 0.0
    """Since its last request ended; 0 while one is in flight."""
    reason: str = ""
    """Why it failed or was evicted: a code of the error taxonomy and a sentence."""
    kv_capacity_tokens: int = 0
    """Tokens of prompt and output for which its KV has room, all requests together; 0 while that is not known."""
    loaded: Moment | None = None
    """When the last part was in its place; None before."""
    open: bool = False
    """It loads, and takes requests already: they run as far as its parts are in place."""


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

    @property
    def used_bytes(self) -> int:
        """Device bytes taken by the stages that are held."""
        return sum(held.device_bytes for held in self.held if held.state is not HeldState.EVICTED)

    @property
    def free_bytes(self) -> int:
        """Device bytes that nothing holds."""
        return self.device.memory_bytes - self.used_bytes

    @property
    def warm(self) -> bool:
        """Holds no model and is ready to load one."""
        return self.engine_up and not self.held and self.liveness is Liveness.ALIVE


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
    """Since it was last leased or asked for: an age, because a loader and its reader may be on two hosts."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """What a link gave a node when it was last busy, all reads together, by the loader's measurement."""

    kind: OriginKind
    name: str
    """What shares it: another node, a bucket, the hub, the folders of this host, the disk tier."""
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
    """Where other nodes' loaders reach this one. Empty: of a release that sends no chunks, or one that has no key."""
    dataplane_port: int = 0
    links: tuple[LinkSpeed, ...] = ()
    """Those over which chunks came."""
    distrusted: tuple[str, ...] = ()
    """Who gave this node wrong bytes, and is not asked for any until some time has passed."""

    def pool_room_bytes(self, part_bytes: tuple[int, ...]) -> int:
        """What parts of these sizes take of the host pool."""
        return sum(-(-size // self.pool_unit_bytes) * self.pool_unit_bytes for size in part_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests for one model that some gateway holds."""

    model: ModelName
    waiting: int
    oldest_age_s: float
    """Ages, not times: gateways and schedulers share no clock. A reader adds what has passed since it heard."""
    deadline_in_s: float
    """Until the earliest deadline among the held requests; negative when it has passed."""
    arrivals: int = 0
    """Requests that arrived within the last window, held or not."""
    window_s: float = 1.0
    trace_parent: str = ""
    """W3C trace context of the oldest waiting request: the cold start joins its trace."""


class InstanceState(StrEnum):
    """Lifecycle of an instance; the table of moves is in ``policy.instance``."""

    PLANNED = "planned"
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    CONSOLIDATING = "consolidating"
    DRAINING = "draining"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One stage on one worker. The first placement of an instance leads."""

    worker_id: WorkerId
    node_id: NodeId
    stage: Stage
    device_bytes: int
    """Parameters plus the KV room that was granted."""
    grant_id: GrantId | None = None
    upstreams: tuple[NodeId, ...] = ()
    """Who was before the node in the chain of its model when it joined it, the nearest first (``policy.multicast``). Empty: nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A complete copy of a model that serves, or is on its way to."""

    instance_id: InstanceId
    model: ModelName
    digest: Digest
    state: InstanceState
    generation: Generation
    epoch: Epoch
    placements: tuple[Placement, ...]
    decision_id: DecisionId
    state_since_s: float
    last_used_s: float
    in_flight: int = 0
    reason: str = ""
    served: bool = False
    """It has been ready at least once: that it ends says nothing against the next start of its model."""
    load_s: float = 0.0
    """How long it was on its way, from its commands until it was ready; so far, while it is. 0: of a release that does not say."""
    drain_within_s: float | None = None
    """While it drains: how long its requests may run on before they go on elsewhere. None: until they end."""
    shown: Moment | None = None
    """When this was sent to the bucket ``instances``; None anywhere else."""

    @property
    def lead(self) -> WorkerId:
        """The worker of stage 0: it takes submits and alone talks to gateways."""
        return self.placements[0].worker_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Timings of one model on one device kind, learned from its own cold starts."""

    model: ModelName
    device_kind: DeviceKind
    fetch_bytes_per_s: float
    load_bytes_per_s: float
    prefill_s: float
    cold_ttft_s: float
    samples: int


class FinishReason(StrEnum):
    """Why an engine ended a request."""

    STOP = "stop"
    """An end-of-sequence or stop token was sampled. The token itself is not part of the output."""
    LENGTH = "length"
    """``max_tokens`` or the model's context is reached."""
    CANCELLED = "cancelled"
    ERROR = "error"


class GrammarKind(StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """The dialect of Lark that llguidance takes."""
    CHOICE = "choice"
    """A JSON array of strings: the output is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must look like, from its first character to its last."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Where a worker has a model's tokenizer: what its grammars need to know which token writes what."""

    path: str
    """Of a ``tokenizer.json``. Another one may be there later."""
    eos_token_ids: tuple[int, ...] = ()
    text_digest: Digest = Digest("")
    """Tells it apart from those at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are drawn. Stateless: noise for token i is Philox(key = seed, counter = i), and all else follows from
    the tokens before it.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch their filters off, ``presence_penalty`` and
    ``frequency_penalty`` 0 and ``repetition_penalty`` 1 the penalties.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one's probability are out."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as the output has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or output have."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens, by id."""
    min_tokens: int = 0
    """No stop token before so many others."""
    top_logprobs: int = 0
    """So many of the most probable tokens are told with each token, when ``logprobs`` is set."""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrain:
    """An operator wants a node to be empty."""

    node_id: NodeId
    age_s: float
    """Since it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a decision may look at, at one moment."""

    now_s: float
    epoch: Epoch
    models: tuple[Model, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    instances: tuple[Instance, ...] = ()
    demand: tuple[Demand, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    drains: tuple[NodeDrain, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A cold-start scheme: pipeline size s, full-memory workers w, and the workers with their stages."""

    pipeline_size: int
    full_memory_workers: int
    placements: tuple[Placement, ...]
    predicted_ttft_s: float
    predicted_tpot_s: float


class PhaseName(StrEnum):
    """Named parts of a cold start. All but ``queue`` count as work."""

    QUEUE = "queue"
    SCHEDULE = "schedule"
    DISPATCH = "dispatch"
    FETCH = "fetch"
    INIT = "init"
    LOAD = "load"
    CONVERT = "convert"
    RESTORE = "restore"
    ACTIVATE = "activate"
    SUBMIT = "submit"
    PREFILL = "prefill"
    DELIVER = "deliver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A leaf interval of a cold start, reported by the process that did the work: the work, and the transit that led to it.

    ``start_s`` and ``end_s`` are the host's CLOCK_MONOTONIC; ``wall_offset_s`` is what to add to get wall-clock time, so that
    intervals of several hosts can be laid on one axis.
    """

    name: PhaseName
    start_s: float
    end_s: float
    wall_offset_s: float
    process: str
    detail: str = ""
