"""One copy of every model in memory, as long as there is room (BlitzScale, section 5.3).

A copy that a device holds counts: nothing is lost as long as it is there. What is missing is
fetched ahead, into free room alone and behind all that a cold start waits for, so it evicts nothing
and cannot thrash. When not all models fit, the most important ones have a copy; the others are
where they came from, or on a disk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pilotlight.policy.arrivals import NO_ARRIVALS, RecentArrivals
from pilotlight.policy.cluster import Liveness, NodeFacts, Tier
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.model import Model
from pilotlight.policy.pool import ParameterPool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopyRules:
    """Figures of the decision."""

    kept_free_share: float = 0.1
    """Of each host pool, for the next cold start: nothing is fetched ahead into it."""
    per_node: int = 1
    """Models that one node fetches ahead at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopyFacts:
    """What the decision looks at."""

    now_s: float
    models: tuple[Model, ...]
    """Those of which a copy is to stay in memory."""
    nodes: Mapping[NodeId, NodeFacts]
    """With what is promised to others left out of ``pool_free_bytes``."""
    leaving: frozenset[NodeId] = frozenset()
    """Nodes that an operator wants to be empty: their copies do not count."""
    going: Mapping[Digest, NodeId] = field(default_factory=dict[Digest, NodeId])
    """What is being fetched ahead already, and where."""
    refused: frozenset[tuple[NodeId, Digest]] = frozenset()
    """What came to nothing there lately."""
    arrivals: RecentArrivals = NO_ARRIVALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """One model that one node is to fetch ahead."""

    model: Model
    node_id: NodeId
    upstreams: tuple[NodeId, ...]
    """The nearest first; the model's own source comes after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopyPlan:
    """What is to be fetched ahead, and what has no room anywhere."""

    prefetches: tuple[Prefetch, ...] = ()
    left: tuple[Digest, ...] = ()
    """No node has room: the cluster is full."""
    waiting: tuple[Digest, ...] = ()
    """There is room, and other models go first."""


def plan_host_copies(
    facts: HostCopyFacts, pool: ParameterPool, rules: HostCopyRules
) -> HostCopyPlan:
    """Choose what is fetched ahead where.

    1. a checkpoint with all of its parts in the memory of a node that is alive and stays needs none
    2. nor does one that a node fetches for a start
    3. what is being fetched ahead goes on where it is, as long as its node is alive and stays
    4. the others by importance: those asked for most often for each byte, then the smaller ones
    5. each goes where the most bytes are left free, beyond the share that is kept; of equal nodes
       to the one whose copies are asked for least
    6. a node fetches no more than ``per_node`` ahead at a time

    Args:
        facts: Models and nodes.
        pool: Who has which copies.
        rules: Figures.
    """
    staying = {
        node_id: node
        for node_id, node in facts.nodes.items()
        if node.liveness is Liveness.ALIVE and not node.draining and node_id not in facts.leaving
    }
    free = {
        node_id: node.pool_free_bytes - int(rules.kept_free_share * node.pool_bytes)
        for node_id, node in staying.items()
    }
    fetched = {one.digest for node in staying.values() for one in node.transfers}
    lacking: dict[Digest, Model] = {}
    prefetches: list[Prefetch] = []
    at_node: dict[NodeId, int] = {}
    seen: set[Digest] = set()
    for model in facts.models:
        digest, where = model.digest, facts.going.get(model.digest)
        if digest in seen:
            continue
        seen.add(digest)
        if pool.whole_on(digest, model.spec) & staying.keys():  # 1
            continue
        if where is not None and where in staying and (where, digest) not in facts.refused:  # 3
            at_node[where] = at_node.get(where, 0) + 1
            prefetches.append(_prefetch(model, where, pool, facts))
        elif digest not in fetched:  # 2
            lacking[digest] = model
    asked = _asked_per_s(facts, staying.values())
    left: list[Digest] = []
    waiting: list[Digest] = []
    for model in sorted(lacking.values(), key=lambda one: _importance(one, facts)):  # 4
        fitting = [
            node_id
            for node_id, node in staying.items()
            if _room_bytes(model, node, pool) <= free[node_id]
            and (node_id, model.digest) not in facts.refused
        ]
        if not fitting:
            left.append(model.digest)
            continue
        idle = [one for one in fitting if at_node.get(one, 0) < rules.per_node]  # 6
        if not idle:
            waiting.append(model.digest)
            continue
        chosen = min(idle, key=lambda one: (-free[one], asked[one], one))  # 5
        free[chosen] -= _room_bytes(model, staying[chosen], pool)
        at_node[chosen] = at_node.get(chosen, 0) + 1
        prefetches.append(_prefetch(model, chosen, pool, facts))
    return HostCopyPlan(prefetches=tuple(prefetches), left=tuple(left), waiting=tuple(waiting))


def _prefetch(model: Model, node_id: NodeId, pool: ParameterPool, facts: HostCopyFacts) -> Prefetch:
    sources = pool.nearest(
        model.digest, range(len(model.spec.part_bytes)), model.spec, node_id, facts.nodes
    )
    upstreams = tuple(one.node_id for one in sources if one.node_id != node_id)
    return Prefetch(model=model, node_id=node_id, upstreams=upstreams)


def _importance(model: Model, facts: HostCopyFacts) -> tuple[float, int, str]:
    per_s = facts.arrivals.rate_per_s(model.name, facts.now_s)
    total_bytes = max(1, model.spec.total_bytes)
    return -per_s / total_bytes, total_bytes, model.name


def _room_bytes(model: Model, node: NodeFacts, pool: ParameterPool) -> int:
    """What the parts that are not there yet take."""
    there = {
        part
        for copy in pool.copies(model.digest)
        if copy.node_id == node.node_id and copy.tier is Tier.HOST
        for part in copy.parts
    }
    return node.pool_room_bytes(
        tuple(size for part, size in enumerate(model.spec.part_bytes) if part not in there)
    )


def _asked_per_s(facts: HostCopyFacts, nodes: Iterable[NodeFacts]) -> Mapping[NodeId, float]:
    rates: dict[Digest, float] = {}
    for model in facts.models:
        per_s = facts.arrivals.rate_per_s(model.name, facts.now_s)
        rates[model.digest] = rates.get(model.digest, 0.0) + per_s
    return {
        node.node_id: sum(
            rates.get(one.digest, 0.0) for one in node.copies if one.tier is Tier.HOST
        )
        for node in nodes
    }
