"""What one tick keeps for the next, so that it need not look at everything again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pilotlight.policy.cluster import NodeFacts, Tier, WorkerView
from pilotlight.policy.coldstart.contention import FetchBooks
from pilotlight.policy.control.focus import NOTHING, Dues, Focus
from pilotlight.policy.control.rooms import Rooms
from pilotlight.policy.control.table import Table
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId, WorkerId

One = TypeVar("One", bound=str)
Other = TypeVar("Other", bound=str)


@dataclass(frozen=True)
class Links(Generic[One, Other]):
    """Which names belong together, looked up from both sides. Immutable."""

    there: Table[One, frozenset[Other]] = field(default_factory=Table["One", "frozenset[Other]"])
    back: Table[Other, frozenset[One]] = field(default_factory=Table["Other", "frozenset[One]"])

    def of(self, one: One) -> frozenset[Other]:
        """What belongs to one."""
        return self.there.find(one) or frozenset()

    def to(self, other: Other) -> frozenset[One]:
        """To what another one belongs."""
        return self.back.find(other) or frozenset()

    def put(self, updates: Mapping[One, frozenset[Other]]) -> "Links[One, Other]":
        """With other names for some."""
        news = {one: others for one, others in updates.items() if self.of(one) != others}
        if not news:
            return self
        back: dict[Other, set[One]] = {}
        for one, others in news.items():
            for other in others ^ self.of(one):
                ones = back.setdefault(other, set(self.to(other)))
                if other in others:
                    ones.add(one)
                else:
                    ones.discard(one)
        return Links(
            _put(self.there, news),
            _put(self.back, {other: frozenset(ones) for other, ones in back.items()}),
        )


def _put(
    table: Table[One, frozenset[Other]], news: Mapping[One, frozenset[Other]]
) -> Table[One, frozenset[Other]]:
    return table.put(
        {one: others for one, others in news.items() if others},
        [one for one, others in news.items() if not others],
    )


@dataclass(frozen=True, slots=True)
class Chained:
    """The chains of one model while it starts somewhere."""

    facts: tuple[object, ...]
    """What they were planned from: they are planned again when that has changed."""
    upstreams: Mapping[NodeId, tuple[NodeId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Immutable, so that the same memory gives the same plan."""

    rooms: Rooms = field(default_factory=Rooms)
    views: Table[WorkerId, WorkerView] = field(default_factory=Table["WorkerId", WorkerView])
    """Workers as they were at the last look at each, ..."""
    nodes: Table[NodeId, NodeFacts] = field(default_factory=Table["NodeId", NodeFacts])
    """... and nodes."""
    copies: Links[NodeId, Digest] = field(default_factory=Links["NodeId", "Digest"])
    """Nodes and the models of which their host pools have parts."""
    homes: Links[WorkerId, NodeId] = field(default_factory=Links["WorkerId", "NodeId"])
    holding: Links[WorkerId, ModelName] = field(default_factory=Links["WorkerId", "ModelName"])
    """Workers and the models that they report to hold."""
    chains: Mapping[Digest, Chained] = field(default_factory=dict["Digest", Chained])
    models_due: Dues[ModelName] = field(default_factory=Dues["ModelName"])
    """When scaling could come out differently."""
    instances_due: Dues[InstanceId] = field(default_factory=Dues["InstanceId"])
    """When silence says something of them, or they are forgotten."""
    workers_due: Dues[WorkerId] = field(default_factory=Dues["WorkerId"])
    """When their holds are repeated."""
    nodes_due: Dues[NodeId] = field(default_factory=Dues["NodeId"])
    fetches: FetchBooks = field(default_factory=FetchBooks)
    """Of starts that are on their way, by their placements; empty where no policy asks for them."""
    asked: frozenset[ModelName] = frozenset()
    """Models that had demand."""
    drained: frozenset[NodeId] = frozenset()
    """Nodes that an operator wants to be empty."""
    restless: Focus = NOTHING
    """What the last tick decided something about: whether that has happened is looked at again."""


def host_digests(node: NodeFacts | None) -> frozenset[Digest]:
    """Models of which a node's host pool has parts; of a node that is gone none."""
    if node is None:
        return frozenset()
    # Of hundreds of copies, whenever one has come.
    return frozenset([copy.digest for copy in node.copies if copy.tier is Tier.HOST and copy.parts])
