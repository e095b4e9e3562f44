"""A new instance's places in the chains of its model, by ``policy.multicast``."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pilotlight.policy.cluster import NodeFacts
from pilotlight.policy.control.books import Record
from pilotlight.policy.model import Model
from pilotlight.policy.multicast import Chain, chains_of
from pilotlight.policy.plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A new instance's places in the chains of its model."""

    placements: tuple[Placement, ...]
    chains: tuple[Chain, ...]
    """Those that its nodes joined."""
    reasons: tuple[str, ...]


def joined(
    model: Model,
    placements: Iterable[Placement],
    nodes: Iterable[NodeFacts],
    there: Iterable[Record],
) -> Joined:
    """Put the nodes of a new instance into the chains of its model, where they have to fetch
    anything.

    Args:
        model: whose parts travel.
        placements: of the new instance.
        nodes: all that there are.
        there: rows of this model, in the order in which they joined.
    """
    newcomers = tuple(placements)
    plan = chains_of(model, nodes, [one.instance for one in there], newcomers)
    joining = [
        node_id
        for node_id in dict.fromkeys(one.node_id for one in newcomers)
        if node_id in plan.ahead
    ]
    return Joined(
        placements=tuple(
            replace(one, upstreams=plan.ahead.get(one.node_id, ())) for one in newcomers
        ),
        chains=tuple(chain for chain in plan.chains if not set(joining).isdisjoint(chain.members)),
        reasons=tuple(
            f"{node_id} takes the parts from {', then '.join((*plan.upstreams[node_id], model.uri))}"
            for node_id in joining
        ),
    )
