"""The one builder of eviction candidates, for the cache that evicts and for a start that expects
evictions.

::

    reports                  held stages, copies, leases, ages  ─┐
    registrations            pins, whose digest it is            ├─> EvictionCandidate
    arrivals, estimates      what it costs to be without it     ─┘

The minimum residency is judged from ``resident_since_s`` (``base.why_kept``).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.policy.arrivals import NO_ARRIVALS, RecentArrivals
from pilotlight.policy.cluster import (
    RESIDENT,
    Copy,
    HeldStage,
    HeldState,
    NodeFacts,
    Tier,
    WorkerFacts,
)
from pilotlight.policy.cost import fetch_bytes_per_s, missing_bytes, stage_cost, transfer_s
from pilotlight.policy.estimates import estimate_among_others
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Estimate, Estimates

MAX_PENALTY_S = 3600.0
"""What cannot be brought back at all counts as this."""
_BUSY = frozenset({HeldState.LOADING, HeldState.DRAINING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """Registered models, by what holders say of them."""

    by_name: Mapping[ModelName, Model] = field(default_factory=dict[ModelName, Model])
    by_digest: Mapping[Digest, tuple[Model, ...]] = field(
        default_factory=dict[Digest, "tuple[Model, ...]"]
    )
    """Two names may be registered for one checkpoint."""
    pinned: frozenset[ModelName] = frozenset()


def registered(models: Iterable[Model]) -> Registered:
    """Index registered models."""
    listed = tuple(models)
    by_digest: defaultdict[Digest, tuple[Model, ...]] = defaultdict(tuple)
    for model in listed:
        by_digest[model.digest] += (model,)
    return Registered(
        by_name={model.name: model for model in listed},
        by_digest=dict(by_digest),
        pinned=frozenset(model.name for model in listed if model.pinned),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MissFacts:
    """What the cost of a miss is made from."""

    estimates: Estimates = field(default_factory=dict[ModelName, "tuple[Estimate, ...]"])
    arrivals: RecentArrivals = NO_ARRIVALS
    again_bytes_per_s: Mapping[Digest, float] = field(default_factory=dict[Digest, float])
    """What other copies give the node of a model that is not in its host pool
    (``ParameterPool.again_bytes_per_s``): penalties of one model's copies are coupled, and the last
    copy is worth more than one of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateFacts:
    """What reports do not say of copies in one place."""

    now_s: float
    models: Registered
    since_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Since when each subject has been there, ready to be used. One that is missing came now."""
    given_up: Collection[str] = ()
    """Subjects that have gone since the report."""
    aged_s: float = 0.0
    """How long ago the ages in what is reported were those."""
    misses: MissFacts | None = None
    """None: what a miss costs is not asked for."""


def on_device(
    worker: WorkerFacts, node: NodeFacts | None, facts: CandidateFacts
) -> tuple[EvictionCandidate, ...]:
    """Stages that take room on a device.

    Args:
        worker: As it reports.
        node: Its node, from whose host pool a stage would come back; None: not known, and nothing
            is said of what that costs.
        facts: What else is known.
    """
    stages = (one for one in worker.held if one.state in RESIDENT)
    return tuple(
        _of_stage(one, worker, node, facts)
        for one in stages
        if one.instance_id not in facts.given_up
    )


def in_pool(node: NodeFacts, facts: CandidateFacts) -> tuple[EvictionCandidate, ...]:
    """Copies in a node's host pool."""
    copies = (one for one in node.copies if one.tier is Tier.HOST)
    return tuple(_of_copy(one, node, facts) for one in copies if one.digest not in facts.given_up)


def _of_stage(
    held: HeldStage, worker: WorkerFacts, node: NodeFacts | None, facts: CandidateFacts
) -> EvictionCandidate:
    model = facts.models.by_name.get(held.model)
    penalty_s, arrivals_per_s = 0.0, 0.0
    # Requests for the model get the version that is registered now: another version is not missed.
    if facts.misses is not None and model is not None and model.digest == held.digest:
        arrivals_per_s = facts.misses.arrivals.rate_per_s(model.name, facts.now_s)
        if node is not None:
            estimate = estimate_among_others(model, worker.device.kind, facts.misses.estimates)
            cost = stage_cost(model, held.stage, worker, node, estimate)
            near = facts.misses.again_bytes_per_s.get(held.digest, 0.0)
            if near > 0.0:
                near_s = transfer_s(missing_bytes(model, held.stage, node), near)
                cost = replace(cost, fetch_s=min(cost.fetch_s, near_s))
            penalty_s = cost.ready_s
    return EvictionCandidate(
        subject=held.instance_id,
        model=held.model,
        digest=held.digest,
        tier=Tier.DEVICE,
        node_id=worker.node_id,
        size_bytes=held.device_bytes,
        resident_since_s=facts.since_s.get(held.instance_id, facts.now_s),
        last_used_s=facts.now_s - facts.aged_s - held.idle_s,
        in_flight=held.in_flight,
        pinned=held.model in facts.models.pinned,
        busy=held.state in _BUSY,
        penalty_s=min(penalty_s, MAX_PENALTY_S),
        arrivals_per_s=arrivals_per_s,
    )


def _of_copy(copy: Copy, node: NodeFacts, facts: CandidateFacts) -> EvictionCandidate:
    models = facts.models.by_digest.get(copy.digest, ())
    penalty_s, arrivals_per_s = 0.0, 0.0
    if facts.misses is not None and models:
        misses = facts.misses
        arrivals_per_s = sum(misses.arrivals.rate_per_s(one.name, facts.now_s) for one in models)
        rate = min(
            fetch_bytes_per_s(node, estimate_among_others(one, None, misses.estimates))
            for one in models
        )
        rate = max(rate, misses.again_bytes_per_s.get(copy.digest, 0.0))
        penalty_s = transfer_s(copy.size_bytes, rate)
    return EvictionCandidate(
        subject=copy.digest,
        model=models[0].name if models else ModelName(""),
        digest=copy.digest,
        tier=Tier.HOST,
        node_id=node.node_id,
        size_bytes=copy.size_bytes,
        resident_since_s=facts.since_s.get(copy.digest, facts.now_s),
        last_used_s=facts.now_s - facts.aged_s - copy.idle_s,
        leases=copy.leases,
        pinned=any(one.name in facts.models.pinned for one in models),
        penalty_s=min(penalty_s, MAX_PENALTY_S),
        arrivals_per_s=arrivals_per_s,
    )
