"""One copy of every model in memory, as long as there is room (BlitzScale, section 5.3).

A copy that a device holds counts: nothing is lost as long as it is there. What is missing is
fetched ahead, into free room alone and behind all that a cold start waits for. Room is made for it
only where a copy is one too many: another node has one, or none is to be kept. So no model loses
its last copy. When not all models fit, the most important ones have a copy; the others are where
they came from, or on a disk.

What is left free then has copies for forecasts: where a model's next instance may soon start, its
parts are in the node's memory already, if they have the room. That takes no device, and goes like
any other copy for what is worth more.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pilotlight.policy.arrivals import NO_ARRIVALS, RecentArrivals
from pilotlight.policy.cluster import Copy, Liveness, NodeFacts, Tier
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
    next_on: Mapping[Digest, frozenset[NodeId]] = field(
        default_factory=dict[Digest, "frozenset[NodeId]"]
    )
    """Models that may soon need another instance (``load.may_need_another``), and the nodes whose
    devices have free room for it."""
    needed: frozenset[tuple[NodeId, Digest]] = frozenset()
    """Copies in host pools that stay: pinned ones, and those of starts."""
    gone: frozenset[tuple[NodeId, Digest]] = frozenset()
    """Copies in host pools that are there no more, though reports still show them."""


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
    giving_way: tuple[tuple[NodeId, Digest], ...] = ()
    """Copies that are one too many: without them one of ``left`` has room."""


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
    7. then, in the same way, one more copy of each model that may soon need another instance, on
       one of the nodes that have room for that on a device; none where such a node has a copy in
       its host pool, or fetches it
    8. for the most important model that has no room anywhere, but would have without copies that
       are one too many, those give way on one node: where they are asked for least

    Args:
        facts: Models and nodes.
        pool: Who has which copies.
        rules: Figures.
    """
    draft = _Draft(facts, pool, rules)
    lacking: list[Model] = []
    forecast: list[Model] = []
    for model in _one_of_each(facts.models):
        if not pool.whole_on(model.digest, model.spec) & draft.staying.keys():  # 1
            if not draft.goes_on(model, draft.staying) and not draft.is_fetched(model):  # 2
                lacking.append(model)
        elif (nodes := draft.next_on(model)) and not draft.goes_on(model, nodes):  # 7
            forecast.append(model)
    left: list[Model] = []
    waiting: list[Digest] = []
    for model in sorted(lacking, key=lambda one: _importance(one, facts)):  # 4
        fitting = draft.fitting(model, draft.staying)
        if not fitting:
            left.append(model)
        elif not draft.place(model, fitting):
            waiting.append(model.digest)
    for model in sorted(forecast, key=lambda one: _importance(one, facts)):  # 7
        draft.place(model, draft.fitting(model, draft.next_on(model)))
    return HostCopyPlan(
        prefetches=tuple(draft.prefetches),
        left=tuple(model.digest for model in left),
        waiting=tuple(waiting),
        giving_way=next((found for one in left if (found := draft.giving_way(one))), ()),  # 8
    )


class _Draft:
    """What is fetched ahead so far, and what that leaves free."""

    def __init__(self, facts: HostCopyFacts, pool: ParameterPool, rules: HostCopyRules) -> None:
        self._facts, self._pool, self._rules = facts, pool, rules
        self.staying = {
            node_id: node
            for node_id, node in facts.nodes.items()
            if node.liveness is Liveness.ALIVE
            and not node.draining
            and node_id not in facts.leaving
        }
        self.prefetches: list[Prefetch] = []
        self._free = {
            node_id: node.pool_free_bytes - int(rules.kept_free_share * node.pool_bytes)
            for node_id, node in self.staying.items()
        }
        self._fetched: dict[Digest, set[NodeId]] = {}
        for node_id, node in self.staying.items():
            for one in node.transfers:
                self._fetched.setdefault(one.digest, set()).add(node_id)
        self._at_node: dict[NodeId, int] = {}
        self._rates = _asked_per_s(facts)
        self._asked = {node_id: self._asked_on(node) for node_id, node in self.staying.items()}

    def is_fetched(self, model: Model) -> bool:
        """Rule 2."""
        return model.digest in self._fetched

    def next_on(self, model: Model) -> frozenset[NodeId]:
        """Rule 7: the nodes of which one is to have the next copy, if one is to."""
        nodes = self._facts.next_on.get(model.digest, frozenset()) & self.staying.keys()
        there = self._pool.whole_on(model.digest, model.spec, (Tier.HOST,))
        coming = self._fetched.get(model.digest, set()) - {self._facts.going.get(model.digest)}
        return frozenset() if nodes & (there | coming) else nodes

    def goes_on(self, model: Model, nodes: Collection[NodeId]) -> bool:
        """Rule 3, where it is one of some nodes."""
        where = self._facts.going.get(model.digest)
        if where is None or where not in nodes or (where, model.digest) in self._facts.refused:
            return False
        self._take(model, where)
        return True

    def fitting(self, model: Model, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """Of some nodes, those that have room, and where nothing came to nothing lately."""
        return tuple(
            node_id
            for node_id in nodes
            if _room_bytes(model, self.staying[node_id], self._pool) <= self._free[node_id]
            and (node_id, model.digest) not in self._facts.refused
        )

    def place(self, model: Model, fitting: Iterable[NodeId]) -> bool:
        """Rules 5 and 6; whether one of the nodes may fetch it now."""
        per_node = self._rules.per_node
        idle = [one for one in fitting if self._at_node.get(one, 0) < per_node]  # 6
        if not idle:
            return False
        chosen = min(idle, key=lambda one: (-self._free[one], self._asked[one], one))  # 5
        self._free[chosen] -= _room_bytes(model, self.staying[chosen], self._pool)
        self._take(model, chosen)
        return True

    def giving_way(self, model: Model) -> tuple[tuple[NodeId, Digest], ...]:
        """Rule 8: copies of one node, on which nothing is fetched ahead; none where none help."""
        found: list[tuple[float, int, NodeId, tuple[Digest, ...]]] = []
        for node_id, node in self.staying.items():
            if (node_id, model.digest) in self._facts.refused or node_id in self._at_node:
                continue
            missing_bytes = _room_bytes(model, node, self._pool) - self._free[node_id]
            chosen: list[Copy] = []
            for copy in sorted(self._spare_on(node), key=self._importance_of):
                if missing_bytes <= 0:
                    break
                if copy.digest != model.digest:
                    chosen.append(copy)
                    missing_bytes -= copy.size_bytes
            for copy in reversed(chosen.copy()):
                if missing_bytes + copy.size_bytes <= 0:
                    chosen.remove(copy)
                    missing_bytes += copy.size_bytes
            if missing_bytes <= 0:
                asked = sum(self._rates.get(one.digest, 0.0) for one in chosen)
                size_bytes = sum(one.size_bytes for one in chosen)
                found.append((asked, size_bytes, node_id, tuple(one.digest for one in chosen)))
        if not found:
            return ()
        _, _, where, digests = min(found)
        return tuple((where, digest) for digest in digests)

    def _spare_on(self, node: NodeFacts) -> Iterable[Copy]:
        """Copies in a host pool without which every model that is to have one still does."""
        kept = {model.digest: model for model in self._facts.models}
        stays = self._facts.needed | self._facts.gone
        fetched = {one.digest for one in node.transfers}
        for copy in node.copies:
            here = (node.node_id, copy.digest)
            is_free = copy.tier is Tier.HOST and not copy.leases and copy.digest not in fetched
            if not is_free or here in stays:
                continue
            model = kept.get(copy.digest)
            if model is None or (
                self._elsewhere(model, node.node_id)
                and node.node_id not in self._facts.next_on.get(copy.digest, ())
            ):
                yield copy

    def _elsewhere(self, model: Model, node_id: NodeId) -> bool:
        """Whether another node that stays has all of a model in its host pool."""
        whole = self._pool.whole_on(model.digest, model.spec, (Tier.HOST,))
        return any(
            one != node_id and one in self.staying and (one, model.digest) not in self._facts.gone
            for one in whole
        )

    def _importance_of(self, copy: Copy) -> tuple[float, Digest]:
        return self._rates.get(copy.digest, 0.0) / max(1, copy.size_bytes), copy.digest

    def _asked_on(self, node: NodeFacts) -> float:
        there = (one.digest for one in node.copies if one.tier is Tier.HOST)
        return sum(self._rates.get(digest, 0.0) for digest in there)

    def _take(self, model: Model, node_id: NodeId) -> None:
        self._at_node[node_id] = self._at_node.get(node_id, 0) + 1
        self.prefetches.append(_prefetch(model, node_id, self._pool, self._facts))


def _one_of_each(models: Iterable[Model]) -> Iterable[Model]:
    """The first model of each checkpoint."""
    found: dict[Digest, Model] = {}
    for model in models:
        found.setdefault(model.digest, model)
    return found.values()


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


def _asked_per_s(facts: HostCopyFacts) -> Mapping[Digest, float]:
    rates: dict[Digest, float] = {}
    for model in facts.models:
        per_s = facts.arrivals.rate_per_s(model.name, facts.now_s)
        rates[model.digest] = rates.get(model.digest, 0.0) + per_s
    return rates
