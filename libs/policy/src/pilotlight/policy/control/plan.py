"""What a tick looks at, what it remembers, what it says."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pilotlight.policy.arrivals import NO_ARRIVALS, RecentArrivals
from pilotlight.policy.cluster import NodeFacts, WorkerView
from pilotlight.policy.coldstart.timings import Timings
from pilotlight.policy.control.books import Books
from pilotlight.policy.control.focus import EARLY_S, Focus, Visited
from pilotlight.policy.control.holds import PartFetch, StageHold
from pilotlight.policy.control.index import Index
from pilotlight.policy.control.reconcile import Change, ReconcileRules
from pilotlight.policy.control.table import Table
from pilotlight.policy.drain import DrainRules
from pilotlight.policy.ids import Epoch, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import SchemeChoice, SchemeRules
from pilotlight.policy.plan import Estimate, Estimates, NodeDrain, Placement, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Drain, ScalingRules
from pilotlight.policy.targets import Retarget
from pilotlight.policy.turns import TurnRules

NO_ROOM = "no_room"
"""Code of the taxonomy (``common.errors``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRules:
    """Figures of every decision."""

    reconcile: ReconcileRules
    scaling: ScalingRules = field(default_factory=ScalingRules)
    scheme: SchemeRules = field(default_factory=SchemeRules)
    drain: DrainRules = field(default_factory=DrainRules)
    turns: TurnRules = field(default_factory=TurnRules)
    consolidate: bool = True
    """Groups become whole instances; else each stays as its start made it."""
    starts_at_once: int = 8
    """Starts that one tick decides at most, unless its facts say otherwise. Each takes
    milliseconds: hundreds in one tick would outlast the lease, and the next leader would fare no
    better."""
    max_tries: int = 3
    """Workers that are asked for room in one attempt; the next attempt sees newer reports."""
    retry_first_s: float = 0.1
    """Pause after a refused attempt, doubled with each further one, with jitter."""
    retry_limit_s: float = 2.0
    retry_at_once_s: float = 0.1
    """After a refusal a change of the workers is answered no sooner than this."""
    refusal_again_s: float = 60.0
    """A refusal that stands is written down again after this time: requests that came since then
    are told of it."""
    repeat_s: float = 1.0
    """A hold is told again after this time, as far as ``repeat_limit`` allows."""
    repeat_limit: int = 32
    """Workers, and nodes, that are told again in one tick because of the time alone, those first
    that were told longest ago."""
    repeat_every_s: float = 0.2
    """So long after such a tick as many are told again, sooner fewer: under load ticks follow each
    other at once, and each has its share."""
    explained_workers: int = 64
    """In a cluster of no more workers than this, a decision's record has all of them. Else it has
    those that could be the answer."""
    disagrees_again_s: float = 0.1
    """A report may have been under way while the hold was: it is given this long to be about it."""
    learn_s: float = 1.0
    """Listened for this long, every live worker has reported several times; before that nothing is
    commanded."""
    learned_s: float = 0.3
    """How long a standby that has listened for that long waits for workers that are silent."""

    def repeated(self, since_s: float) -> int:
        """How many workers, and nodes, are told again so long after that was done last."""
        return int(self.repeat_limit * min(1.0, (since_s + EARLY_S) / self.repeat_every_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A worker's room could not be had for a start."""

    model: ModelName
    worker_id: WorkerId
    code: str
    message: str
    transient: bool
    """The cache did not answer: another worker would be asked in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What the leader knows of its own term."""

    epoch: Epoch
    started_s: float
    listening_since_s: float
    deaf: bool
    """The bus is lost: nothing is decided, absence is not taken for deletion."""
    announced: bool
    """The epoch is written where loaders learn it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The last hold that a receiver was sent."""

    essence: tuple[object, ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFacts:
    """Everything that a tick looks at, at one moment. Mappings are not written to while it is
    kept.
    """

    now_s: float
    term: Term
    books: Books
    workers: Mapping[WorkerId, WorkerView]
    nodes: Mapping[NodeId, NodeFacts]
    models: Mapping[ModelName, Model]
    demand: tuple[Demand, ...] = ()
    """What gateways hold and what operators ask to be warm."""
    demand_seen_s: Mapping[ModelName, float] = field(default_factory=dict[ModelName, float])
    """Since when the scheduler knows of it."""
    awaited: frozenset[ModelName] = frozenset()
    """Models for which some gateway holds requests."""
    estimates: Estimates = field(default_factory=dict[ModelName, "tuple[Estimate, ...]"])
    arrivals: RecentArrivals = NO_ARRIVALS
    timings: Timings = field(default_factory=Timings)
    """What starts take, as far as it was learned; for the policies of ``coldstart``."""
    drains: tuple[NodeDrain, ...] = ()
    evict: tuple[ModelName, ...] = ()
    """Models that an operator wants off every device."""
    world_version: int = 0
    """Counts changes of what could take a model."""
    refusals: tuple[Refusal, ...] = ()
    """Since the last tick."""
    started: tuple[ModelName, ...] = ()
    """Starts that got their room since the last tick."""
    changed: Focus | None = None
    """Whose facts may be others than at the last tick; None: everything's.

    The books note themselves what changed in them: they are those of the last plan, with what was
    put in them since.
    """
    asked: frozenset[ModelName] = frozenset()
    """Models with demand that is left out, because a tick would not look at it (``line``)."""
    starts_at_once: int | None = None
    """Starts that this tick decides at most, by what ticks take here (``pace``); None: as many as
    the rules say."""

    told_nodes: Mapping[NodeId, Told] = field(default_factory=dict[NodeId, Told])
    """What was sent since the last tick, of starts that were written: it is not told again."""
    told_workers: Mapping[WorkerId, Told] = field(default_factory=dict[WorkerId, Told])

    def most_starts(self, rules: ControlRules) -> int:
        """Starts that the tick decides at most."""
        return rules.starts_at_once if self.starts_at_once is None else self.starts_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Backing:
    """A model that was refused, and when it is tried again."""

    attempts: int
    at_s: float
    retry_at_s: float
    world_version: int
    code: str
    """Of the last refusal."""
    recorded: frozenset[str] = frozenset()
    """What the recorded decisions said: a model that waits for room must not write rows by the
    second."""
    recorded_s: float = 0.0
    """When the last of them was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one tick hands to the next. A new leader begins with none."""

    wanted: Mapping[ModelName, str] = field(default_factory=dict[ModelName, str])
    """Models that are to serve elsewhere before they leave a node that drains, and why."""
    backing: Mapping[ModelName, Backing] = field(default_factory=dict[ModelName, Backing])
    tries: Mapping[ModelName, tuple[Refusal, ...]] = field(
        default_factory=dict[ModelName, tuple[Refusal, ...]]
    )
    """Refusals of the attempt that is under way."""
    surplus_since_s: Mapping[ModelName, float] = field(default_factory=dict[ModelName, float])
    """Since when models have had an instance too many."""
    told_workers: Table[WorkerId, Told] = field(default_factory=Table["WorkerId", Told])
    told_nodes: Table[NodeId, Told] = field(default_factory=Table["NodeId", Told])
    repeated_s: float = -math.inf
    """When holds were last told again because of the time alone."""
    index: Index | None = None
    """What the last tick found, so that the next one looks at what changed. None: it looks at
    everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """One instance that is to be started: ask for its room, write it down, command it."""

    model: Model
    reason: str
    choice: SchemeChoice
    seen: Snapshot
    """What the choice was made from."""
    demand_seen_s: float
    trace_parent: str
    ahead: bool = False
    """No request waits for it: nothing may be evicted for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedStart:
    """A start that nothing came of."""

    model: ModelName
    code: str
    message: str
    reasons: tuple[str, ...]
    seen: Snapshot
    """With the workers that explain it, if it is to be recorded."""
    record: bool
    """It says something that was not written down yet."""
    never_fits: bool = False
    """No worker that there is can hold the model: its requests are told at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTold:
    """A worker's whole desired state, to be sent now."""

    worker_id: WorkerId
    holds: tuple[StageHold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTold:
    """A node's whole desired state, to be sent now."""

    node_id: NodeId
    fetches: tuple[PartFetch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """Whole desired states that are to be sent now."""

    nodes: tuple[NodeTold, ...] = ()
    """Before the workers: bytes take longest."""
    workers: tuple[WorkerTold, ...] = ()


Room = Callable[[WorkerId], tuple[int, int]]
"""Free bytes of a worker's device, and the granule in which its memory comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowOrder:
    """An instance whose stages are to take on longer ranges."""

    instance_id: InstanceId
    placements: tuple[Placement, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done, in this order."""

    books: Books
    """With what reports say of use; before any of the following."""
    memory: Memory
    changes: tuple[Change, ...] = ()
    """Of instances, as reports show them."""
    drain: tuple[Drain, ...] = ()
    """Instances that take no new requests from now on, and why."""
    evicted: Mapping[ModelName, tuple[InstanceId, ...]] = field(
        default_factory=dict[ModelName, tuple[InstanceId, ...]]
    )
    """For each eviction that was asked for, the instances that drain."""
    start: tuple[StartOrder, ...] = ()
    retarget: tuple[Retarget, ...] = ()
    """Groups that are to become another number of instances."""
    grow: tuple[GrowOrder, ...] = ()
    """Groups that are to become whole instances."""
    refuse: tuple[RefusedStart, ...] = ()
    tell: Holds = field(default_factory=Holds)
    """Holds that are new, or others than before."""
    repeat: Holds = field(default_factory=Holds)
    """Holds that a report contradicts, or that were told long ago: a command may have been lost."""
    longest_wait_s: float = 0.0
    """Of the models that are wanted and served nowhere."""
    visited: Visited = field(default_factory=Visited)
