"""What is decided: instances and their placements, schemes, and the snapshot that a decision looks
at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pilotlight.policy.arrivals import NO_ARRIVALS, RecentArrivals
from pilotlight.policy.cluster import DeviceKind, NodeFacts, WorkerFacts
from pilotlight.policy.ids import (
    DecisionId,
    Digest,
    Epoch,
    Generation,
    GrantId,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.model import Model, ModelSpec, Stage
from pilotlight.policy.phase import PhaseName
from pilotlight.policy.request import Demand


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


class InstanceRole(StrEnum):
    """What an instance computes of a request."""

    PREFILL = "prefill"
    """The prompt, and with it the first token."""
    DECODE = "decode"
    """The tokens that follow."""
    BOTH = "both"


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
    """Who was before the node in the chain of its model when it joined it, the nearest first
    (``policy.multicast``). Empty: nobody."""
    held: Stage | None = None
    """While its instance consolidates, or loads a lost stage again: the range that the worker has
    already. None: nothing yet."""
    grown_from: InstanceId | None = None
    """The instance in whose group the worker had a stage, which has grown to the whole model: the
    worker has all that it needs (``control.splitting``). None: it was loaded for this instance."""
    source: str = ""
    """Where its node takes what it misses from: another node, its disk, or what the model was
    registered from. Empty: nothing was missing, or the start did not choose."""
    fetch_bytes: int = 0
    """What the node missed when the start was decided; 0: nothing, or that was not counted."""
    fetch_deadline_s: float | None = None
    """D of ParaServe, section 4.2: until when its bytes are to be there, on the clock of
    ``Instance.state_since_s``. None: the start misses its SLO already, so its fetch may not delay
    others."""

    def parts_of(self, spec: ModelSpec) -> tuple[int, ...]:
        """Parts of a model that the node brings for this stage; not those that the worker has
        already.
        """
        parts = spec.parts_of(self.stage)
        if self.held is None:
            return tuple(parts)
        have = frozenset(spec.parts_of(self.held))
        return tuple(part for part in parts if part not in have)


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
    """It has been ready at least once: that it ends says nothing against the next start of its
    model."""
    load_s: float = 0.0
    """How long it was on its way, from its commands until it was ready; so far, while it is. 0: of
    a release that does not say."""
    drain_within_s: float | None = None
    """While it drains: how long its requests may run on before they go on elsewhere. None: until
    they end."""
    role: InstanceRole = InstanceRole.BOTH
    targets: int = 1
    """How many instances its group is to become, itself among them; 1 where it is none, or they
    are."""
    repairs: int = 0
    """How often another worker took a lost stage of its group over (``control.repairing``)."""

    @property
    def lead(self) -> WorkerId:
        """The worker of stage 0: it takes submits and alone talks to gateways."""
        return self.placements[0].worker_id

    def idle_s(self, now_s: float) -> float:
        """Seconds since its last use; 0 while requests are in flight."""
        return 0.0 if self.in_flight > 0 else now_s - self.last_used_s


def on_clock(instance: Instance, since_s: float) -> Instance:
    """An instance whose times are of another process's clock, on this one's.

    Args:
        instance: As it was written down.
        since_s: When its state began, on this process's clock. It is taken for not used since.
    """
    shift_s = since_s - instance.state_since_s
    placements = tuple(
        one
        if one.fetch_deadline_s is None
        else replace(one, fetch_deadline_s=one.fetch_deadline_s + shift_s)
        for one in instance.placements
    )
    return replace(instance, state_since_s=since_s, last_used_s=since_s, placements=placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Timings of one model on one device kind, learned from its own cold starts; 0: not known."""

    model: ModelName
    device_kind: DeviceKind
    fetch_bytes_per_s: float
    load_bytes_per_s: float
    prefill_s: float
    cold_ttft_s: float
    samples: int
    """Starts; 0: its profile alone, which was measured offline (``coldstart.profiles``)."""
    init_s: float = 0.0
    """What its next start takes beside the bytes, init or restore (``Timings.init_s``)."""


Estimates = Mapping[ModelName, tuple[Estimate, ...]]
"""By name of the model: one for each kind of device."""
ANY_MODEL = ModelName("")
"""The name of the estimates that stand for a usual model."""


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
    estimates: Estimates = field(default_factory=dict[ModelName, "tuple[Estimate, ...]"])
    arrivals: RecentArrivals = NO_ARRIVALS
    drains: tuple[NodeDrain, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A cold-start scheme: pipeline size s, full-memory workers w, and the workers with their
    stages.
    """

    pipeline_size: int
    full_memory_workers: int
    placements: tuple[Placement, ...]
    predicted_ttft_s: float
    predicted_tpot_s: float
    predicted_phase_s: Mapping[PhaseName, float] = field(default_factory=dict[PhaseName, float])
    """Of the longest stage each, of prefill the sum; empty: nothing was predicted of them."""
    refusal: str = ""
    """Why what runs forbids it; of schemes that were considered alone."""
