"""Chains in commands and records: from whom each node takes the parts of a model, by ``policy.multicast``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pilotlight.common.messages.hold import Peer
from pilotlight.policy.instance import STARTING
from pilotlight.policy.multicast import Chain, chains_of
from pilotlight.policy.types import Digest, Model, NodeFacts, NodeId, Placement, Snapshot
from pilotlight.scheduler.book import Entry

Upstreams = Mapping[tuple[NodeId, Digest], tuple[Peer, ...]]
"""By node and model."""


def upstreams_of(entries: Iterable[Entry], nodes: Mapping[NodeId, NodeFacts]) -> Upstreams:
    """Whom each node asks for the parts that it is to fetch. Made of rows and reports alone, so that every leader makes the same."""
    listed = [entry for entry in entries if entry.instance.state in STARTING]
    models = {entry.model.digest: entry.model for entry in listed}
    told: dict[tuple[NodeId, Digest], tuple[Peer, ...]] = {}
    for digest, model in models.items():
        plan = chains_of(model, nodes.values(), [entry.instance for entry in listed])
        for node_id, upstreams in plan.upstreams.items():
            told[node_id, digest] = tuple(_peer_of(nodes[one]) for one in upstreams)
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A new instance's places in the chains of its model."""

    placements: tuple[Placement, ...]
    chains: tuple[Chain, ...]
    """Those that its nodes joined."""
    reasons: tuple[str, ...]


def joined(model: Model, placements: Iterable[Placement], seen: Snapshot) -> Joined:
    """Put the nodes of a new instance into the chains of its model, where they have to fetch anything."""
    newcomers = tuple(placements)
    plan = chains_of(model, seen.nodes, seen.instances, newcomers)
    joining = [node_id for node_id in dict.fromkeys(one.node_id for one in newcomers) if node_id in plan.ahead]
    return Joined(
        placements=tuple(replace(one, upstreams=plan.ahead.get(one.node_id, ())) for one in newcomers),
        chains=tuple(chain for chain in plan.chains if not set(joining).isdisjoint(chain.members)),
        reasons=tuple(
            f"{node_id} takes the parts from {', then '.join((*plan.upstreams[node_id], model.uri))}" for node_id in joining
        ),
    )


def _peer_of(node: NodeFacts) -> Peer:
    return Peer(node_id=node.node_id, host=node.dataplane_host, port=node.dataplane_port)
