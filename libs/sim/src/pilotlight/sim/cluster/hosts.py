"""Nodes: their host pools and fetches, as their loaders would report them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import Copy, FetchPriority, Liveness, NodeFacts, Tier, Transfer
from pilotlight.policy.coldstart.contention import LinkName, disk, incoming, outgoing
from pilotlight.policy.coldstart.facts import DISK
from pilotlight.policy.control.holds import PartFetch
from pilotlight.policy.ids import Digest, Generation, InstanceId, NodeId
from pilotlight.policy.liveness import liveness_of
from pilotlight.policy.model import Model
from pilotlight.sim.cluster.build import REMOTE
from pilotlight.sim.cluster.disks import Disk
from pilotlight.sim.cluster.network import Flow, Network

UNLIMITED_BYTES_PER_S = 1e12
"""Of a flow that no link bounds."""


@dataclass(slots=True, eq=False)
class Fetch:
    """Parts of a model on their way to a node, for an instance."""

    model: Model
    parts: frozenset[int]
    source: str
    began_s: float
    ahead: bool = False
    """Nothing waits for it: it yields to fetches of starts."""
    flow: Flow | None = None
    """None: it has not begun, or waits for its source to have everything."""
    peer: "Host | None" = None
    """The node that gives it; None: the store does."""
    ended: bool = False
    after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """What waits for it."""

    @property
    def total_bytes(self) -> int:
        """Of its parts."""
        return sum(self.model.spec.part_bytes[part] for part in self.parts)


@dataclass(slots=True, eq=False)
class Host:
    """One node."""

    node_id: NodeId
    nic_bytes_per_s: float
    pool_bytes: int
    network: Network
    changed: Callable[[NodeId], None]
    caches: bool
    """Keeps what was fetched when nothing needs it any more."""
    peers: bool
    """Gives it to other nodes."""
    delay_s: float = 0.0
    """A fetch begins so long after it was commanded."""
    disk: Disk | None = None
    """Its disk tier, if it has one. It outlives the node's death."""
    copies: dict[Digest, frozenset[int]] = field(default_factory=dict[Digest, "frozenset[int]"])
    """The model that was used the longest ago is first."""
    fetches: dict[tuple[InstanceId, Generation], Fetch] = field(
        default_factory=dict["tuple[InstanceId, Generation]", Fetch]
    )
    order: Callable[[NodeFacts], Iterable[Digest]] | None = None
    """What may go, the least worth first; None: what was brought the longest ago goes first."""
    _used_s: dict[Digest, float] = field(default_factory=dict[Digest, float])
    """When each copy was last wanted."""
    _models: dict[Digest, Model] = field(default_factory=dict[Digest, Model])
    _last: NodeFacts | None = None
    """What it said last, while it is dead."""
    _died_s: float = 0.0
    _needed: Counter[Digest] = field(default_factory=Counter["Digest"])
    _waiting: dict[Digest, list[tuple[frozenset[int], Callable[[], None]]]] = field(
        default_factory=dict["Digest", "list[tuple[frozenset[int], Callable[[], None]]]"]
    )

    # Copies.

    def need(self, model: Model) -> None:
        """Something reads a model's copy until ``let_go``."""
        self._models[model.digest] = model
        self._needed[model.digest] += 1
        self._used_s[model.digest] = self.network.events.now_s

    def let_go(self, digest: Digest) -> None:
        """It does not any more."""
        self._needed[digest] -= 1
        self._used_s[digest] = self.network.events.now_s
        if self._needed[digest] <= 0:
            del self._needed[digest]
            if not self.caches and self.copies.pop(digest, None) is not None:
                self.changed(self.node_id)

    def when_there(self, model: Model, parts: Iterable[int], call: Callable[[], None]) -> None:
        """Call when the pool has parts of a model; at once when it has."""
        wanted = frozenset(parts)
        if wanted <= self.copies.get(model.digest, frozenset()):
            call()
        else:
            self._waiting.setdefault(model.digest, []).append((wanted, call))

    def has(self, digest: Digest, parts: frozenset[int]) -> bool:
        """Whether parts are in the pool."""
        return parts <= self.copies.get(digest, frozenset())

    def _add(self, model: Model, parts: frozenset[int]) -> None:
        digest = model.digest
        self._models[digest] = model
        had = self.copies.pop(digest, frozenset())
        self.copies[digest] = had | parts
        self._make_room()
        self.changed(self.node_id)
        waiting = self._waiting.pop(digest, [])
        later = [one for one in waiting if not self.has(digest, one[0])]
        if later:
            self._waiting[digest] = later
        for wanted, call in waiting:
            if self.has(digest, wanted):
                call()
        if not self._needed[digest] and not self.caches:
            self.copies.pop(digest, None)

    def _make_room(self) -> None:
        """What is needed stays."""
        used = sum(map(self._size, self.copies))
        if used <= self.pool_bytes:
            return
        for digest in [one for one in self._in_order() if not self._needed[one]]:
            if used <= self.pool_bytes:
                return
            used -= self._size(digest)
            del self.copies[digest]

    def _in_order(self) -> Iterable[Digest]:
        if self.order is None:
            return self.copies
        facts, now_s = self.facts(), self.network.events.now_s
        copies = (
            replace(one, idle_s=now_s - self._used_s[one.digest])
            for one in facts.copies
            if one.tier is Tier.HOST
        )
        return self.order(replace(facts, copies=tuple(copies)))

    def _size(self, digest: Digest) -> int:
        parts = self._models[digest].spec.part_bytes
        return sum(parts[part] for part in self.copies[digest])

    # Fetches.

    def obey(
        self,
        told: Iterable[PartFetch],
        source_of: Callable[[InstanceId], str],
        hosts: dict[NodeId, "Host"],
    ) -> None:
        """Fetch what is wanted and not there; give up what is not wanted any more.

        Args:
            told: All that the node is to bring.
            source_of: What the start of an instance has chosen as this node's source; empty: it has
                not.
            hosts: All nodes.
        """
        if self._last is not None:
            return
        wanted = {(one.instance_id, one.generation): one for one in told}
        for key in [one for one in self.fetches if one not in wanted]:
            self._give_up(key)
        for key, one in wanted.items():
            if key in self.fetches:
                continue
            had = self.copies.get(one.model.digest, frozenset())
            running = [
                other
                for other in self.fetches.values()
                if other.model.digest == one.model.digest and not other.ended
            ]
            coming = frozenset(part for other in running for part in other.parts)
            missing = frozenset(one.parts) - had - coming
            if one.priority is FetchPriority.COLD_START:
                for other in running:
                    if not other.parts.isdisjoint(one.parts):
                        self._hurry(other)
            named = source_of(one.instance_id)
            source = named or self._source_of(one, missing, hosts)
            ahead = one.priority is FetchPriority.PREFETCH
            fetch = Fetch(one.model, missing, source, self.network.events.now_s, ahead)
            self.fetches[key] = fetch
            self.need(one.model)
            self.network.events.after(
                self.delay_s, lambda key=key, fetch=fetch: self._begin(key, fetch, hosts)
            )

    def _source_of(
        self, one: PartFetch, missing: frozenset[int], hosts: dict[NodeId, "Host"]
    ) -> str:
        """Where parts come from for which no start chose a source: the nearest that has them."""
        if self._on_disk(one.model.digest, missing):
            return DISK
        givers = (peer for peer in one.upstreams if hosts[peer].could_give(one.model, missing))
        return next(givers, REMOTE)

    def _on_disk(self, digest: Digest, parts: frozenset[int]) -> bool:
        return self.disk is not None and self.disk.has(digest, parts)

    def could_give(self, model: Model, parts: frozenset[int]) -> bool:
        """Whether parts are here, or on their way."""
        return self.has(model.digest, parts) or self._coming(model.digest, parts) is not None

    def _coming(self, digest: Digest, parts: frozenset[int]) -> Fetch | None:
        return next(
            (
                one
                for one in self.fetches.values()
                if one.model.digest == digest and not one.ended and parts <= one.parts
            ),
            None,
        )

    def _begin(
        self,
        key: tuple[InstanceId, Generation],
        fetch: Fetch,
        hosts: dict[NodeId, "Host"],
    ) -> None:
        if self.fetches.get(key) is not fetch:
            return
        if not fetch.parts:
            fetch.ended = True
            self.changed(self.node_id)
            return
        peer = hosts.get(NodeId(fetch.source))
        if peer is not None and not peer.could_give(fetch.model, fetch.parts):
            peer = None
        if fetch.source == DISK and not self._on_disk(fetch.model.digest, fetch.parts):
            fetch.source = REMOTE
        fetch.peer = peer
        self._receive(fetch, fetch.total_bytes)

    def _hurry(self, fetch: Fetch) -> None:
        """A start waits for what was fetched ahead, here and where it comes from."""
        fetch.ahead = False
        if fetch.flow is not None:
            self.network.hurry(fetch.flow)
        if fetch.peer is not None:
            before = fetch.peer._coming(fetch.model.digest, fetch.parts)
            if before is not None and before.ahead:
                fetch.peer._hurry(before)

    def _receive(self, fetch: Fetch, size_bytes: float) -> None:
        giver = REMOTE if fetch.peer is None else fetch.peer.node_id
        links: tuple[LinkName, ...] = (incoming(self.node_id), outgoing(giver))
        if fetch.source == DISK:
            links = (disk(self.node_id),)
        fetch.flow = self.network.start(
            links,
            size_bytes,
            lambda: self._arrived(fetch),
            UNLIMITED_BYTES_PER_S,
            yields=fetch.ahead,
        )
        if not fetch.ahead:
            self._hurry(fetch)
        self.changed(self.node_id)

    def _arrived(self, fetch: Fetch) -> None:
        """The last byte is there; from a node that is still receiving not before it has it."""
        peer = fetch.peer
        before = None if peer is None else peer._coming(fetch.model.digest, fetch.parts)
        fetch.flow = None
        if before is not None and not before.ended:
            before.after.append(lambda: self._end(fetch))
        else:
            self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        if fetch.ended:
            return
        fetch.ended = True
        if self.disk is not None:
            self.disk.keep(fetch.model, fetch.parts)
        self._add(fetch.model, fetch.parts)
        for call in fetch.after:
            call()

    def _give_up(self, key: tuple[InstanceId, Generation]) -> None:
        fetch = self.fetches.pop(key)
        if fetch.flow is not None:
            self.network.stop(fetch.flow)
        if not fetch.ended:
            fetch.ended = True
            for call in fetch.after:
                call()
        self.let_go(fetch.model.digest)
        self.changed(self.node_id)

    # Failures.

    def die(self) -> None:
        """Lose the pool and all fetches. Those that are given something by this node go on first
        (``lose_source``).
        """
        self._last, self._died_s = self.facts(), self.network.events.now_s
        for fetch in self.fetches.values():
            fetch.ended = True
            if fetch.flow is not None:
                self.network.stop(fetch.flow)
        self.fetches.clear()
        self.copies.clear()
        self._needed.clear()
        self._waiting.clear()

    def revive(self) -> None:
        """Be there again, with an empty pool."""
        self._last = None
        self.changed(self.node_id)

    def lose_source(self, lost: "Host") -> None:
        """Take from the store what a node that dies has not given, or has not got itself."""
        now_s = self.network.events.now_s
        for fetch in self.fetches.values():
            if fetch.peer is not lost or fetch.ended:
                continue
            before = lost._coming(fetch.model.digest, fetch.parts)
            flows = (fetch.flow, None if before is None else before.flow)
            left = max(one.left_at(now_s) for one in flows if one is not None)
            if fetch.flow is not None:
                self.network.stop(fetch.flow)
            fetch.peer, fetch.source = None, REMOTE
            self._receive(fetch, min(left, fetch.total_bytes))

    # Reports.

    @property
    def is_fetching(self) -> bool:
        """Whether bytes are on their way."""
        return any(one.flow is not None for one in self.fetches.values())

    def facts(self) -> NodeFacts:
        """What its loader reports; of a node that is dead the last report, as old as that is."""
        now_s = self.network.events.now_s
        if self._last is not None:
            return replace(self._last, liveness=liveness_of(now_s - self._died_s))
        copies = tuple(
            Copy(
                digest=digest,
                node_id=self.node_id,
                tier=Tier.HOST,
                parts=tuple(sorted(parts)),
                size_bytes=self._size(digest),
                leases=self._needed[digest],
            )
            for digest, parts in self.copies.items()
        )
        transfers = tuple(
            Transfer(
                digest=one.model.digest,
                source=one.source,
                done_bytes=math.floor(one.total_bytes - one.flow.left_at(now_s)),
                total_bytes=one.total_bytes,
                model=one.model.name,
                bytes_per_s=one.flow.bytes_per_s,
                age_s=now_s - one.began_s,
            )
            for one in self.fetches.values()
            if one.flow is not None
        )
        return NodeFacts(
            node_id=self.node_id,
            host=self.node_id,
            liveness=Liveness.ALIVE,
            nic_bytes_per_s=self.nic_bytes_per_s,
            pool_bytes=self.pool_bytes,
            pool_free_bytes=max(0, self.pool_bytes - sum(one.size_bytes for one in copies)),
            copies=copies if self.disk is None else copies + self.disk.copies_of(self.node_id),
            transfers=transfers,
            links=() if self.disk is None else (self.disk.link,),
            dataplane_host=self.node_id if self.peers else "",
            dataplane_port=1 if self.peers else 0,
        )
