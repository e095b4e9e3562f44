"""From what is known of the cluster to what a choice looks at: servers with their offers.

::

    parts of the model that a node misses can come from        over
      its disk                                                 disk:node
      a node that has them in its host pool                    out:peer, in:node
      a node that receives them (the end of a chain)           out:peer, in:node, not before it has them
      what the model was registered from                       out:source, in:node
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pilotlight.policy.cluster import (
    PEER_LINK,
    Copy,
    DeviceKind,
    Liveness,
    NodeFacts,
    OriginKind,
    Tier,
)
from pilotlight.policy.coldstart.contention import LinkName, disk, incoming, outgoing
from pilotlight.policy.coldstart.servers import Offer, Server
from pilotlight.policy.coldstart.timings import WARM, Timings
from pilotlight.policy.cost import known_rate, transfer_s
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.model import Model
from pilotlight.policy.multicast import MAX_UPSTREAMS
from pilotlight.policy.placement import Candidate

DISK = "disk"
"""The source of what a node has on its own disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """The request that predictions are made for, as far as nobody says what waits."""

    prompt_tokens: int = 512
    context_tokens: int = 1024
    batch: int = 1
    """Requests that decode together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What offers are made from."""

    nodes: Mapping[NodeId, NodeFacts]
    timings: Timings = field(default_factory=Timings)
    usual: Usual = field(default_factory=Usual)
    max_peers: int = MAX_UPSTREAMS
    """Peers that a node is offered, the fastest first."""
    bare: bool = False
    """Every start makes its process anew: workers that are up have nothing of it."""


def servers_for(
    model: Model, candidates: Iterable[Candidate], facts: ClusterFacts
) -> tuple[Server, ...]:
    """The servers of a choice, in the order of the candidates.

    1. a worker that is up has its process, context and libraries (design 6.1)
    2. times of the model on its kind of device, learned or by size
    3. room is what is free, and what eviction can free

    Args:
        model: Which is to be started.
        candidates: Workers that may take it or a stage of it (``placement.candidates``).
        facts: The nodes, and what was learned.
    """
    timings, usual = facts.timings, facts.usual
    peers = _peers(model, facts)
    computed: dict[tuple[DeviceKind, float], tuple[float, float]] = {}
    offered: dict[NodeId, tuple[frozenset[int], tuple[Offer, ...]]] = {}
    servers: list[Server] = []
    for candidate in candidates:
        worker, node = candidate.worker, candidate.node
        device, node_id = worker.device, node.node_id
        is_warm = worker.engine_up and not facts.bare  # 1
        start = WARM if is_warm else timings.start_times(node_id, device.kind)
        reported = known_rate(device.load_bytes_per_s)
        reads = known_rate(device.memory_bytes_per_s) or timings.memory_bytes_per_s(
            node_id, device.kind, reported
        )
        if (device.kind, reads) not in computed:  # 2; devices of one kind are mostly alike
            computed[device.kind, reads] = (
                timings.prefill_s(model, device.kind, reads, usual.prompt_tokens),
                timings.decode_s(model, device.kind, reads, usual.batch, usual.context_tokens),
            )
        prefill_s, decode_s = computed[device.kind, reads]
        if node_id not in offered:
            present = _parts(_copies(node, model.digest, Tier.HOST))
            offered[node_id] = present, _offers(model, node, peers, facts)
        present, offers = offered[node_id]
        servers.append(
            Server(
                worker_id=worker.worker_id,
                node_id=node_id,
                free_bytes=candidate.free_bytes + candidate.evictable_bytes,  # 3
                granule_bytes=device.granule_bytes,
                load_bytes_per_s=timings.load_bytes_per_s(node_id, device.kind, reported),
                context_s=start.before_load_s,
                libraries_s=start.libraries_s,
                init_s=timings.init_s(model.name, device.kind),
                prefill_s=prefill_s,
                decode_s=decode_s,
                present=present,
                offers=offers,
                own_bus=device.kind is DeviceKind.CUDA,
            )
        )
    return tuple(servers)


def link_capacities(nodes: Iterable[NodeFacts]) -> Mapping[LinkName, float]:
    """B of the links that nodes report, for the books: both directions of each node's network, and
    disks as far as they were probed or busy. What a model was registered from has no entry: what it
    gives is learned by node (``Timings.fetch_bytes_per_s``).
    """
    capacities: dict[LinkName, float] = {}
    for node in nodes:
        capacities[incoming(node.node_id)] = node.nic_bytes_per_s
        capacities[outgoing(node.node_id)] = node.nic_bytes_per_s
        for link in node.links:
            if link.kind is OriginKind.DISK and link.bytes_per_s > 0:
                capacities[disk(node.node_id)] = link.bytes_per_s
    return capacities


def source_of(model: Model) -> str:
    """What all models from one bucket, hub or host share: scheme and authority of the URI."""
    parts = urlsplit(model.uri)
    return f"{parts.scheme}://{parts.netloc}"


def link_bytes_per_s(node: NodeFacts, source: str) -> float | None:
    """What a node's link to a source gave when it was last busy, all fetches together; None: its
    loader has not said.

    Args:
        node: Which fetched.
        source: A node, or what models were registered from (``source_of``).
    """
    names = (source, f"{PEER_LINK}{source}")
    return next((one.bytes_per_s for one in node.links if one.name in names), None)


@dataclass(frozen=True, slots=True)
class _Peer:
    node: NodeFacts
    parts: frozenset[int] | None
    behind_s: float


def _peers(model: Model, facts: ClusterFacts) -> Sequence[_Peer]:
    """Nodes that have or receive parts, those with a copy first, the fastest first."""
    found: list[_Peer] = []
    for node in facts.nodes.values():
        if node.liveness is not Liveness.ALIVE or node.dataplane_port == 0:
            continue
        parts = _parts(_copies(node, model.digest, Tier.HOST))
        if parts:
            found.append(_Peer(node, parts, 0.0))
        for transfer in node.transfers:
            whole = transfer.total_bytes >= model.spec.total_bytes
            if transfer.digest == model.digest and whole and transfer.bytes_per_s:
                left_bytes = transfer.total_bytes - transfer.done_bytes
                found.append(_Peer(node, None, transfer_s(left_bytes, transfer.bytes_per_s)))
    return sorted(
        found, key=lambda one: (one.behind_s, -one.node.nic_bytes_per_s, one.node.node_id)
    )


def _offers(
    model: Model, node: NodeFacts, peers: Sequence[_Peer], facts: ClusterFacts
) -> tuple[Offer, ...]:
    into, timings = incoming(node.node_id), facts.timings
    offers: list[Offer] = []
    on_disk = _parts(_copies(node, model.digest, Tier.DISK))
    if on_disk:
        rate = next((one.bytes_per_s for one in node.links if one.kind is OriginKind.DISK), 0.0)
        learned = timings.rates.get((node.node_id, DISK))
        known = learned.value if learned is not None else rate
        if known > 0:
            links = (disk(node.node_id),)
            offers.append(Offer(source=DISK, links=links, bytes_per_s=known, parts=on_disk))
    others = (
        one
        for one in peers
        if one.node.node_id != node.node_id and one.node.node_id not in node.distrusted
    )
    for peer, _ in zip(others, range(facts.max_peers), strict=False):
        other = peer.node.node_id
        link_rate = min(node.nic_bytes_per_s, peer.node.nic_bytes_per_s)
        offers.append(
            Offer(
                source=other,
                links=(into, outgoing(other)),
                bytes_per_s=timings.fetch_bytes_per_s(node.node_id, other, link_rate),
                parts=peer.parts,
                behind_s=peer.behind_s,
            )
        )
    source = source_of(model)
    rate = timings.fetch_bytes_per_s(node.node_id, source, node.nic_bytes_per_s)
    offers.append(Offer(source=source, links=(into, outgoing(source)), bytes_per_s=rate))
    return tuple(offers)


def _copies(node: NodeFacts, digest: Digest, tier: Tier) -> Iterable[Copy]:
    return (one for one in node.copies if one.digest == digest and one.tier is tier)


def _parts(copies: Iterable[Copy]) -> frozenset[int]:
    return frozenset(part for copy in copies for part in copy.parts)
