"""How important models are on disks: the order in which loaders let go of their chunks.

A disk is below the host pool: what leaves the pool comes back from there, and what leaves the disk
from its source. The same policy orders all tiers; the penalty here is what the source takes longer
than a disk does, both as measured. A model whose source is as near as the disk is worth nothing
there.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

from pilotlight.policy.arrivals import NO_ARRIVALS, RecentArrivals
from pilotlight.policy.cluster import NodeFacts, OriginKind, Tier
from pilotlight.policy.cost import transfer_s
from pilotlight.policy.eviction.base import EvictionCandidate, EvictionPolicy
from pilotlight.policy.eviction.candidates import MAX_PENALTY_S, Registered
from pilotlight.policy.ids import Digest, ModelName, NodeId

MAX_ORDERED = 1_000
"""Models that are named, those that were asked for last: 70 kB of a message. The others are less
important than any of them."""
GUESSED_SOURCE_BYTES_PER_S = 125e6
"""Of a source that nothing was measured of, where no other was measured either: 1 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """What the order is made of."""

    now_s: float
    models: Registered
    source_bytes_per_s: Mapping[ModelName, float] = field(default_factory=dict[ModelName, float])
    """What the source of each gives; one that was not measured counts as the slowest."""
    disk_bytes_per_s: float = math.inf
    """What disks give; infinite: not measured."""
    arrivals: RecentArrivals = NO_ARRIVALS


def measured_bytes_per_s(nodes: Iterable[NodeFacts], kind: OriginKind) -> Mapping[str, float]:
    """What links of one kind gave, in mean over the nodes that have measured them, by name."""
    found: dict[str, list[float]] = {}
    for node in nodes:
        for link in node.links:
            if link.kind is kind and link.bytes_per_s > 0:
                found.setdefault(link.name, []).append(link.bytes_per_s)
    return {name: fmean(rates) for name, rates in found.items()}


def asked_last(models: Registered, arrivals: RecentArrivals) -> tuple[ModelName, ...]:
    """Models that are named: those that were asked for last, ``MAX_ORDERED`` at most, and pinned
    ones.
    """
    known = (name for name in reversed(tuple(arrivals.models)) if name in models.by_name)
    return tuple(dict.fromkeys([*islice(known, MAX_ORDERED), *sorted(models.pinned)]))


def disk_order(policy: EvictionPolicy, facts: DiskFacts) -> tuple[Digest, ...]:
    """Checkpoints in the order in which disks let go of them.

    1. those that were asked for last (``asked_last``): the others are not named
    2. the policy orders them, the least important first
    3. pinned ones after all others: nothing takes their place

    Args:
        policy: As it orders host pools, told of all accesses.
        facts: What a copy on a disk saves.
    """
    slowest = min(facts.source_bytes_per_s.values(), default=GUESSED_SOURCE_BYTES_PER_S)
    candidates: dict[Digest, EvictionCandidate] = {}
    for name in asked_last(facts.models, facts.arrivals):  # 1
        digest = facts.models.by_name[name].digest
        if digest not in candidates:
            candidates[digest] = _on_disk(digest, facts, slowest)
    ordered = policy.ordered(list(candidates.values()), facts.now_s)  # 2
    loose, pinned = _named(ordered, pinned=False), _named(ordered, pinned=True)  # 3
    return (*loose, *pinned)


def _named(ordered: Collection[EvictionCandidate], *, pinned: bool) -> Iterable[Digest]:
    return (one.digest for one in ordered if one.pinned is pinned)


def _on_disk(digest: Digest, facts: DiskFacts, slowest: float) -> EvictionCandidate:
    models = facts.models.by_digest[digest]
    size_bytes = models[0].spec.total_bytes
    last_s = (facts.arrivals.last_s(one.name) for one in models)
    rate = min(facts.source_bytes_per_s.get(one.name, slowest) for one in models)
    from_source_s = transfer_s(size_bytes, rate)
    from_disk_s = transfer_s(size_bytes, facts.disk_bytes_per_s)
    return EvictionCandidate(
        subject=digest,
        model=models[0].name,
        digest=digest,
        tier=Tier.DISK,
        node_id=NodeId(""),
        size_bytes=size_bytes,
        resident_since_s=facts.arrivals.since_s,
        last_used_s=max((one for one in last_s if one is not None), default=facts.arrivals.since_s),
        pinned=any(one.name in facts.models.pinned for one in models),
        penalty_s=min(MAX_PENALTY_S, max(0.0, from_source_s - from_disk_s)),
        arrivals_per_s=sum(facts.arrivals.rate_per_s(one.name, facts.now_s) for one in models),
    )
