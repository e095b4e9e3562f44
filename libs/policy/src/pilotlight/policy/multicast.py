"""Chains: through which nodes a model's parameters reach those that are to have them (BlitzScale,
section 5.1).

Pure.

::

    n0 (has them) ──> n1 ──> n2        each takes units from the one before it, which may be receiving them at that moment:
    n7 (has them) ──> n5 ──> n3        a chain of any length takes little longer than one transfer
    own source    ──> n4 ──> n6        only where no node has, or gets, what is wanted

A target that finishes is a source, and begins a chain with the nodes behind it. A node that joined
keeps its place: what it was told (``Placement.upstreams``) is all that a later plan needs, so that
plans do not change from one second, or one leader, to the next.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pilotlight.policy.cluster import Liveness, NodeFacts, Tier
from pilotlight.policy.cost import transfer_s
from pilotlight.policy.ids import NodeId
from pilotlight.policy.instance import BRINGING
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, Placement

UNIT_BYTES = 1024 * 1024
"""What a member forwards at once: it is one such behind its predecessor."""
MAX_UPSTREAMS = 4
"""Nodes that a target is told of. Behind them there is the model's own source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A node that has parts."""

    node_id: NodeId
    parts: frozenset[int]
    bytes_per_s: float
    accepting: bool = True
    """New targets may take parts from it; those that do already go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node that is to have parts which it has not."""

    node_id: NodeId
    parts: frozenset[int]
    bytes_per_s: float
    upstreams: tuple[NodeId, ...] | None = None
    """The nodes before it when it joined, the nearest first; None: it joins now."""
    accepting: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Nodes in the order in which parameters travel."""

    source: NodeId | None
    """None: the model's own source, wherever it was registered from."""
    members: tuple[NodeId, ...]
    finish_s: tuple[float, ...]
    """Of each member, if nothing of it had come yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """Chains of one model, and what each target is to be told."""

    chains: tuple[Chain, ...]
    """Those that have members."""
    ahead: Mapping[NodeId, tuple[NodeId, ...]]
    """The nodes before each target when it joined: to be kept with it."""
    upstreams: Mapping[NodeId, tuple[NodeId, ...]]
    """The nodes that each target asks, in order: its predecessor, then those before that one, then
    others that have parts. None of them waits for bytes that only the target could give it."""


@dataclass(slots=True)
class _Growing:
    """A chain to which targets are added at its end."""

    source: NodeId | None
    tail_bytes_per_s: float
    accepting: bool
    slowest_bytes_per_s: float = math.inf
    fill_s: float = 0.0
    """Until the first unit has come to the end."""
    members: list[NodeId] = field(default_factory=list[NodeId])
    finish_s: list[float] = field(default_factory=list[float])

    @property
    def tail(self) -> NodeId | None:
        return self.members[-1] if self.members else self.source

    def finish_of(self, target: Target, size_bytes: int, unit_bytes: int) -> float:
        """When a target would be done, at this chain's end: the first unit hop by hop, the rest at
        the slowest link's speed.
        """
        link = min(self.tail_bytes_per_s, target.bytes_per_s)
        first = min(unit_bytes, size_bytes)
        return (
            self.fill_s
            + transfer_s(first, link)
            + transfer_s(size_bytes - first, min(self.slowest_bytes_per_s, link))
        )

    def append(self, target: Target, size_bytes: int, unit_bytes: int) -> None:
        self.finish_s.append(self.finish_of(target, size_bytes, unit_bytes))
        link = min(self.tail_bytes_per_s, target.bytes_per_s)
        self.fill_s += transfer_s(min(unit_bytes, size_bytes), link)
        self.slowest_bytes_per_s = min(self.slowest_bytes_per_s, link)
        self.tail_bytes_per_s, self.accepting = target.bytes_per_s, target.accepting
        self.members.append(target.node_id)


def plan_chains(
    part_bytes: Sequence[int],
    sources: Iterable[Source],
    targets: Iterable[Target],
    *,
    limit: int = MAX_UPSTREAMS,
    unit_bytes: int = UNIT_BYTES,
) -> ChainPlan:
    """Plan one model's chains (BlitzScale, section 5.1).

    1. each source that waits for nothing begins a chain
    2. a target that joined before goes behind the nearest of those that were before it and are
       still there, else to the model's own source
    3. newcomers, the fastest link first: to the end of the chain that has most of what they want,
       and of those the one by which they are done first; to the model's own source if there is none
    4. ties are broken by node id, so that equal facts give equal plans

    Args:
        part_bytes: Of each part of the model.
        sources: Nodes that have parts.
        targets: Nodes that are to have parts, in the order in which they joined, each once.
        limit: Upstreams of a target at most.
        unit_bytes: What a node passes on at once: a chain is a unit longer with each node.
    """
    listed = list(targets)
    plan = _Plan(part_bytes, {one.node_id: one for one in sources}, listed, limit, unit_bytes)
    for target in listed:
        if target.upstreams is not None:
            plan.rejoin(target, target.upstreams)
    newcomers = [target for target in listed if target.upstreams is None]
    for target in sorted(newcomers, key=lambda one: -one.bytes_per_s):
        plan.join(target)
    return plan.made()


class _Plan:
    """A plan in the making."""

    def __init__(
        self,
        part_bytes: Sequence[int],
        sources: Mapping[NodeId, Source],
        targets: list[Target],
        limit: int,
        unit_bytes: int,
    ) -> None:
        self._part_bytes = part_bytes
        self._sources = sources
        self._sizes: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        """Bytes that two sets of parts have in common: there are few sets, and many pairs of nodes.
        """
        self._limit = limit
        self._unit_bytes = unit_bytes
        waiting = {target.node_id for target in targets}
        self._offers = {node_id: source.parts for node_id, source in sources.items()}
        for target in targets:
            self._offers[target.node_id] = target.parts | self._offers.get(
                target.node_id, frozenset()
            )
        free = sorted(
            (source for node_id, source in sources.items() if node_id not in waiting),
            key=lambda source: (-source.bytes_per_s, source.node_id),
        )
        self._free = {source.node_id: source for source in free}
        self._chains = [_Growing(one.node_id, one.bytes_per_s, one.accepting) for one in free]
        self._place = {
            source.node_id: chain for source, chain in zip(free, self._chains, strict=True)
        }
        """Nodes with a place in a chain: a node gets one only behind a node that has one."""
        self._ahead: dict[NodeId, tuple[NodeId, ...]] = {}
        self._upstreams: dict[NodeId, tuple[NodeId, ...]] = {}

    def rejoin(self, target: Target, ahead: tuple[NodeId, ...]) -> None:
        nearest = next((node_id for node_id in ahead if self._may_ask(target, node_id)), None)
        chain = self._place.get(nearest) if nearest is not None else None
        if chain is None or chain.tail != nearest:
            # Two that lost those before them may have met at one node.
            chain = self._opened(_Growing(nearest, self._speed_of(nearest), accepting=True))
        self._append(chain, target, ahead)

    def join(self, target: Target) -> None:
        best: tuple[tuple[int, float], _Growing] | None = None
        for chain in self._chains:
            if chain.tail is None or not chain.accepting:
                continue
            size_bytes = self._bytes_from(chain.tail, target)
            if not size_bytes or (best is not None and size_bytes < -best[0][0]):
                continue
            rank = (-size_bytes, chain.finish_of(target, size_bytes, self._unit_bytes))
            if best is None or rank < best[0]:
                best = rank, chain
        chain = (
            best[1] if best is not None else self._opened(_Growing(None, math.inf, accepting=True))
        )
        # A node that has some parts and is to have others may be both, the source of a chain and a
        # member of it.
        first = (
            (chain.source,) if chain.source not in (None, target.node_id, *chain.members) else ()
        )
        nearest = tuple(reversed(chain.members))[: self._limit - len(first)]
        self._append(chain, target, (*nearest, *first))

    def made(self) -> ChainPlan:
        chains = (
            Chain(source=one.source, members=tuple(one.members), finish_s=tuple(one.finish_s))
            for one in self._chains
            if one.members
        )
        return ChainPlan(chains=tuple(chains), ahead=self._ahead, upstreams=self._upstreams)

    def _opened(self, chain: _Growing) -> _Growing:
        self._chains.append(chain)
        return chain

    def _append(self, chain: _Growing, target: Target, ahead: tuple[NodeId, ...]) -> None:
        self._upstreams[target.node_id] = self._upstreams_of(target, ahead)
        self._ahead[target.node_id] = ahead
        wanted = target.parts if chain.tail is None else target.parts & self._offers[chain.tail]
        chain.append(target, self._size_of(wanted), self._unit_bytes)
        self._place[target.node_id] = chain

    def _upstreams_of(self, target: Target, ahead: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """The nodes that a target asks.

        1. its predecessor
        2. one that has what the predecessor will not have, the most of it first
        3. one that waits for no other node
        4. as many more as there is room for: those before it, the nearest first; then sources, the
           fastest first
        """
        before = [node_id for node_id in ahead if self._may_ask(target, node_id)]
        others = [
            node_id
            for node_id, source in self._free.items()
            if source.accepting and node_id not in before and source.parts & target.parts
        ]
        order = [*before, *others]
        chosen = before[:1]  # 1
        missing = target.parts - self._offered_by(chosen)
        while missing and len(chosen) < self._limit:  # 2
            gains = [(self._size_of(missing & self._offers[node_id]), node_id) for node_id in order]
            gain, node_id = max(gains, key=lambda one: one[0], default=(0, NodeId("")))
            if not gain:
                break
            chosen.append(node_id)
            missing -= self._offers[node_id]
        if not any(node_id in self._free for node_id in chosen):  # 3
            chosen += [node_id for node_id in order if node_id in self._free][:1]
        chosen += [node_id for node_id in order if node_id not in chosen][
            : max(0, self._limit - len(chosen))
        ]  # 4
        return tuple(node_id for node_id in order if node_id in chosen[: self._limit])

    def _offered_by(self, node_ids: Iterable[NodeId]) -> frozenset[int]:
        return frozenset[int]().union(*(self._offers[node_id] for node_id in node_ids))

    def _bytes_from(self, node_id: NodeId, target: Target) -> int:
        key = target.parts, self._offers[node_id]
        if key not in self._sizes:
            self._sizes[key] = self._size_of(key[0] & key[1])
        return self._sizes[key]

    def _size_of(self, parts: Iterable[int]) -> int:
        return sum(self._part_bytes[part] for part in parts)

    def _may_ask(self, target: Target, node_id: NodeId) -> bool:
        """Whether a node that was before a target has something for it, and does not wait for it:
        it joined earlier, or has it all.
        """
        if node_id in self._place:
            return self._bytes_from(node_id, target) > 0
        return node_id in self._sources and target.parts <= self._sources[node_id].parts

    def _speed_of(self, node_id: NodeId | None) -> float:
        if node_id is None:
            return math.inf
        known = self._sources.get(node_id)
        return known.bytes_per_s if known is not None else self._place[node_id].slowest_bytes_per_s


def chains_of(
    model: Model,
    nodes: Iterable[NodeFacts],
    instances: Iterable[Instance],
    newcomers: Iterable[Placement] = (),
) -> ChainPlan:
    """The chains of a model, from facts alone.

    A node takes part when its loader listens for others and is not dead. One that is silent, or
    drains, keeps the nodes behind it, and gets no new ones.

    Args:
        model: whose parts travel.
        nodes: every node, as last reported.
        instances: of this model, in the order in which they were planned.
        newcomers: placements of a start that is being decided: they join at the end of a chain.
    """
    there = {
        one.node_id: one
        for one in nodes
        if one.dataplane_port and one.liveness is not Liveness.DEAD
    }
    accepting = {
        node_id
        for node_id, one in there.items()
        if one.liveness is Liveness.ALIVE and not one.draining
    }
    held = {
        node_id: frozenset(
            part
            for copy in one.copies
            if copy.digest == model.digest and copy.tier is Tier.HOST
            for part in copy.parts
            if part < len(model.spec.part_bytes)
        )
        for node_id, one in there.items()
    }
    targets: dict[NodeId, Target] = {}
    starting = [one for one in instances if one.digest == model.digest and one.state in BRINGING]
    joined = [(placement, placement.upstreams) for one in starting for placement in one.placements]
    for placement, upstreams in (*joined, *((placement, None) for placement in newcomers)):
        node_id = placement.node_id
        if node_id not in there:
            continue
        known = targets.get(node_id)
        missing = frozenset(placement.parts_of(model.spec)) - held[node_id]
        if missing:
            targets[node_id] = Target(
                node_id=node_id,
                parts=missing | known.parts if known is not None else missing,
                bytes_per_s=there[node_id].nic_bytes_per_s,
                upstreams=known.upstreams if known is not None else upstreams,
                accepting=node_id in accepting,
            )
    sources = (
        Source(
            node_id=node_id,
            parts=parts,
            bytes_per_s=there[node_id].nic_bytes_per_s,
            accepting=node_id in accepting,
        )
        for node_id, parts in held.items()
        if parts
    )
    return plan_chains(model.spec.part_bytes, sources, targets.values())
