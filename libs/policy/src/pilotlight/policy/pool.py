"""The parameter pool (BlitzScale, section 5.3): which copies of models there are, in whose memory.

Made of reports alone, so a cache that has just been started knows it as soon as it has heard of
every node and worker.
"""

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from pilotlight.policy.cluster import (
    PEER_LINK,
    HeldState,
    Liveness,
    NodeFacts,
    OriginKind,
    Tier,
    WorkerFacts,
)
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.model import ModelSpec, Stage

_LOADED = frozenset({HeldState.READY, HeldState.DRAINING})


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCopy:
    """Parameters of one model that lie in one memory."""

    digest: Digest
    node_id: NodeId
    tier: Tier
    holder: str
    """A worker's id on a device, a node's in a host pool."""
    parts: tuple[int, ...] = ()
    """In a host pool or on a disk: those that are complete and verified."""
    stage: Stage | None = None
    """On a device: the layers whose parts are there."""

    def has(self, parts: Collection[int], spec: ModelSpec) -> bool:
        """Whether all of some parts are in it."""
        there = self.parts if self.stage is None else spec.parts_of(self.stage)
        return set(parts) <= set(there)

    def is_whole(self, spec: ModelSpec) -> bool:
        """Whether all of the model is in it."""
        if self.stage is not None:
            return self.stage == spec.whole
        return len(self.parts) == len(spec.part_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSource:
    """Where a node can have parts of a model from."""

    node_id: NodeId
    tier: Tier
    bytes_per_s: float
    """What one transfer can expect; infinite on the node itself."""


class ParameterPool:
    """Copies by model and by holder. One owner."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[PooledCopy, ...]] = {}
        self._by_digest: defaultdict[Digest, dict[PooledCopy, None]] = defaultdict(dict)

    def hear_node(self, node_id: NodeId, node: NodeFacts | None) -> None:
        """Take what a node's host pool and disk hold; None: it is lost, with all of it."""
        copies = () if node is None else node.copies
        self._replace(
            f"node {node_id}",
            tuple(
                PooledCopy(
                    digest=one.digest,
                    node_id=node_id,
                    tier=one.tier,
                    holder=node_id,
                    parts=one.parts,
                )
                for one in copies
            ),
        )

    def hear_worker(self, worker_id: str, worker: WorkerFacts | None) -> None:
        """Take what a device holds, loaded; None: it is lost."""
        if worker is None:
            self._replace(f"worker {worker_id}", ())
            return
        self._replace(
            f"worker {worker_id}",
            tuple(
                PooledCopy(
                    digest=one.digest,
                    node_id=worker.node_id,
                    tier=Tier.DEVICE,
                    holder=worker_id,
                    stage=one.stage,
                )
                for one in worker.held
                if one.state in _LOADED
            ),
        )

    def copies(self, digest: Digest) -> tuple[PooledCopy, ...]:
        """Every copy of a model, whole or not."""
        return tuple(self._by_digest.get(digest, ()))

    @property
    def in_memory(self) -> frozenset[Digest]:
        """Models of which there is something in a host pool or on a device."""
        return frozenset(
            digest
            for digest, copies in self._by_digest.items()
            if any(copy.tier in (Tier.HOST, Tier.DEVICE) for copy in copies)
        )

    def tiers(self, digest: Digest) -> frozenset[Tier]:
        """In which tiers there is some copy of a model."""
        return frozenset(copy.tier for copy in self._by_digest.get(digest, ()))

    def whole_on(
        self, digest: Digest, spec: ModelSpec, tiers: Collection[Tier] = (Tier.HOST, Tier.DEVICE)
    ) -> frozenset[NodeId]:
        """Nodes in whose memory there is all of a model."""
        return frozenset(
            copy.node_id
            for copy in self._by_digest.get(digest, ())
            if copy.tier in tiers and copy.is_whole(spec)
        )

    def nearest(
        self,
        digest: Digest,
        parts: Collection[int],
        spec: ModelSpec,
        to: NodeId,
        nodes: Mapping[NodeId, NodeFacts],
    ) -> tuple[PoolSource, ...]:
        """Where a node can have some parts from, the nearest first.

        1. its own host pool, then its own disk
        2. host pools of other nodes that are alive and give chunks, the fastest first: what the
           link gave last, else the slower of both ends, shared with the transfers that run there

        A device of another node is no source: nothing reads it. The model's own source is asked
        when none of these can give a chunk.

        Args:
            digest: The model.
            parts: Their numbers.
            spec: Of the model.
            to: The node that wants them.
            nodes: By name, as they report.
        """
        found: list[PoolSource] = []
        for copy in self._by_digest.get(digest, ()):
            node = nodes.get(copy.node_id)
            if node is None or node.liveness is Liveness.DEAD or not copy.has(parts, spec):
                continue
            if copy.node_id == to and copy.tier in (Tier.HOST, Tier.DISK):  # 1
                found.append(PoolSource(node_id=to, tier=copy.tier, bytes_per_s=float("inf")))
            elif copy.node_id != to and copy.tier is Tier.HOST and node.dataplane_port:  # 2
                rate = _link_bytes_per_s(node, nodes.get(to))
                found.append(PoolSource(node_id=node.node_id, tier=Tier.HOST, bytes_per_s=rate))
        return tuple(
            sorted(
                found, key=lambda one: (-one.bytes_per_s, one.tier is not Tier.HOST, one.node_id)
            )
        )

    def again_bytes_per_s(
        self,
        digest: Digest,
        spec: ModelSpec,
        node: NodeFacts,
        nodes: Mapping[NodeId, NodeFacts],
        gone: Container[tuple[NodeId, Digest]] = (),
    ) -> float:
        """What a node would get of a model without the copy in its own host pool, from the fastest
        other whole copy; 0 without one that has been measured or can be estimated.

        Args:
            digest: The model.
            spec: Its own.
            node: Whose host pool it is.
            nodes: By name, as they report.
            gone: Copies in host pools that are there no more, though reports still show them.
        """
        rates = [0.0]
        for source in self.nearest(digest, range(len(spec.part_bytes)), spec, node.node_id, nodes):
            if source.tier is Tier.DISK:
                rates += [one.bytes_per_s for one in node.links if one.kind is OriginKind.DISK]
            elif source.node_id != node.node_id and (source.node_id, digest) not in gone:
                rates.append(source.bytes_per_s)
        return max(rates)

    def _replace(self, holder: str, copies: Iterable[PooledCopy]) -> None:
        now = tuple(copies)
        before = self._of.get(holder, ())
        if now == before:
            return
        for copy in before:
            known = self._by_digest[copy.digest]
            known.pop(copy, None)
            if not known:
                del self._by_digest[copy.digest]
        for copy in now:
            self._by_digest[copy.digest][copy] = None
        if now:
            self._of[holder] = now
        else:
            self._of.pop(holder, None)


def _link_bytes_per_s(source: NodeFacts, to: NodeFacts | None) -> float:
    if to is None:
        return source.nic_bytes_per_s
    for link in to.links:
        if link.kind is OriginKind.PEER and link.name == PEER_LINK + source.node_id:
            return link.bytes_per_s
    return min(source.nic_bytes_per_s, to.nic_bytes_per_s) / (1 + len(to.transfers))
