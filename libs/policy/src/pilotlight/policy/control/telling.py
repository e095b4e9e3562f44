"""Which holds are sent now: those that changed, those that a report contradicts, and some that were
sent long ago.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from pilotlight.policy.cluster import NodeFacts, Tier
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.focus import Dues, Visited
from pilotlight.policy.control.holds import (
    Essence,
    PartFetch,
    disagreement,
    essences_of,
    fetches_of,
    members_of,
    reached_at,
    stages_of,
)
from pilotlight.policy.control.index import Chained, Index
from pilotlight.policy.control.look import Look
from pilotlight.policy.control.plan import ControlFacts, Holds, Memory, NodeTold, Told, WorkerTold
from pilotlight.policy.control.table import Table
from pilotlight.policy.ids import Digest, NodeId, WorkerId
from pilotlight.policy.instance import BRINGING
from pilotlight.policy.model import Model
from pilotlight.policy.multicast import chains_of
from pilotlight.policy.plan import Instance, Placement

Key = TypeVar("Key", bound=str)
Message = TypeVar("Message")
Said = tuple[object, ...]
"""What makes a message another one than that before."""
NO_UPSTREAMS: Mapping[NodeId, tuple[NodeId, ...]] = {}
ALONE = Chained((), NO_UPSTREAMS)
"""Of a model that one node brings, and of which no other has anything: there is nobody to ask,
whatever becomes of that node. Most starts are such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What is sent, and what is remembered of it."""

    tell: Holds
    repeat: Holds
    told_nodes: Table[NodeId, Told]
    told_workers: Table[WorkerId, Told]
    repeated_s: float
    index: Index
    """The draft's, with chains and times of this tick."""
    visited: Visited


def telling(draft: Draft, memory: Memory, look: Look) -> Telling:
    """Tell receivers whose hold changed; tell again those whose report disagrees, and those that
    were told longest ago.

    Args:
        draft: The world, with what was decided in this tick.
        memory: What was told before.
        look: Whose reports or instances may have changed.
    """
    index, decided = draft.index, draft.decided
    workers, nodes = look.workers | decided.workers, look.nodes | decided.nodes
    digests = look.digests | {one.instance.digest for one in draft.moved.values()}
    facts, rules, books = draft.facts, draft.rules, draft.books
    chains, rechained = _chained(draft, index, nodes, digests)
    repeated = rules.repeated(facts.now_s - memory.repeated_s)
    late_s = facts.now_s - rules.repeat_s

    def fetches(node_id: NodeId) -> NodeTold:
        here = {one.instance.digest for one in books.bringing_on(node_id)}
        upstreams = {
            (node_id, one): chains[one].upstreams.get(node_id, ()) for one in here if one in chains
        }
        return NodeTold(node_id=node_id, fetches=fetches_of(node_id, books, upstreams))

    to_nodes = _Receivers[NodeId, NodeTold](
        memory.told_nodes, index.nodes_due, facts.now_s, facts.told_nodes
    )
    for node_id in sorted(nodes | rechained):
        if node_id in facts.nodes or node_id in books.by_node:
            to_nodes.look(node_id, fetches, _said(fetches(node_id).fetches), disputed=False)
        else:
            to_nodes.forget(node_id)
    to_workers = _Receivers[WorkerId, WorkerTold](
        memory.told_workers, index.workers_due, facts.now_s, facts.told_workers
    )
    # Each stage of a group connects to the one behind it: what one reports concerns the others.
    workers |= {
        one.worker_id
        for instance_id in draft.seen(look.instances)
        for one in members_of(books.records[instance_id].instance)
    }

    def holds(worker_id: WorkerId) -> WorkerTold:
        return WorkerTold(worker_id=worker_id, holds=stages_of(worker_id, books))

    for worker_id in sorted(workers):
        if worker_id in facts.workers or worker_id in books.by_worker:
            wanted = essences_of(worker_id, books)
            disputed = _is_disputed(worker_id, [one for one, _ in wanted], draft, memory)
            to_workers.look(worker_id, holds, _reached(wanted, facts), disputed=disputed)
        else:
            to_workers.forget(worker_id)
    for node_id in to_nodes.late(late_s, repeated):
        fetched = fetches(node_id)
        to_nodes.again(node_id, fetched, _said(fetched.fetches))
    for worker_id in to_workers.late(late_s, repeated):
        said = _reached(essences_of(worker_id, books), facts)
        to_workers.again(worker_id, holds(worker_id), said)
    return Telling(
        tell=Holds(nodes=tuple(to_nodes.tell), workers=tuple(to_workers.tell)),
        repeat=Holds(nodes=tuple(to_nodes.repeat), workers=tuple(to_workers.repeat)),
        told_nodes=to_nodes.told,
        told_workers=to_workers.told,
        repeated_s=facts.now_s if repeated else memory.repeated_s,
        index=replace(
            draft.indexed, chains=chains, nodes_due=to_nodes.dues, workers_due=to_workers.dues
        ),
        visited=Visited(workers=to_workers.visited, nodes=to_nodes.visited),
    )


def _said(orders: Iterable[PartFetch]) -> Said:
    return tuple(one.essence for one in orders)


def _reached(wanted: Iterable[tuple[Essence, Instance]], facts: ControlFacts) -> Said:
    """With the addresses of groups: a worker that learns of one can join its stage at once."""
    return tuple(
        (
            *one,
            *(
                reached_at(each, facts.nodes, facts.workers, one.instance_id)
                for each in members_of(instance)
            ),
        )
        for one, instance in wanted
    )


class _Receivers(Generic[Key, Message]):
    """Those of one kind, workers or nodes."""

    def __init__(
        self,
        told: Table[Key, Told],
        dues: Dues[Key],
        now_s: float,
        since: Mapping[Key, Told],
    ) -> None:
        """``since``: what was sent after the last tick."""
        self.tell: list[Message] = []
        self.repeat: list[Message] = []
        self.visited = 0
        self._told = told
        self._dues = dues
        self._now_s = now_s
        self._news = dict(since)
        self._gone: set[Key] = set()

    def look(
        self, key: Key, message: Callable[[Key], Message], said: Said, *, disputed: bool
    ) -> None:
        """Tell a receiver whose hold is another one, or whose report says that it did not hear of
        it.

        Args:
            key: The receiver.
            message: What it is to be told; mostly it was.
            said: The same in short.
            disputed: Its report contradicts it.
        """
        self.visited += 1
        before = self._news.get(key) or self._told.find(key)
        if before is None or before.essence != said:
            self.tell.append(message(key))
        elif disputed:
            self.repeat.append(message(key))
        else:
            return
        self._news[key] = Told(essence=said, at_s=self._now_s)

    def late(self, late_s: float, limit: int) -> list[Key]:
        """Some of those that were told no later than this, and not now."""
        if not limit:
            return []
        found = self._dues.until(late_s, limit + len(self._news) + len(self._gone))
        return [key for key in found if key not in self._news and key not in self._gone][:limit]

    def again(self, key: Key, message: Message, said: Said) -> None:
        """Repeat what a receiver is to hold."""
        self.visited += 1
        self.repeat.append(message)
        self._news[key] = Told(essence=said, at_s=self._now_s)

    def forget(self, key: Key) -> None:
        """It is gone, and nothing is placed there."""
        self._gone.add(key)

    @property
    def told(self) -> Table[Key, Told]:
        """The last hold of each."""
        return self._told.put(self._news, self._gone)

    @property
    def dues(self) -> Dues[Key]:
        """When each was told."""
        told = {key: one.at_s for key, one in self._news.items()}
        return self._dues.put(told | dict.fromkeys(self._gone, math.inf))


def _is_disputed(
    worker_id: WorkerId, holds: Sequence[Essence], draft: Draft, memory: Memory
) -> bool:
    told = draft.facts.told_workers.get(worker_id) or memory.told_workers.find(worker_id)
    view = draft.facts.workers.get(worker_id)
    if told is None or view is None or view.heard_s - told.at_s <= draft.rules.disagrees_again_s:
        return False
    return disagreement(holds, view) is not None


def _chained(
    draft: Draft, index: Index, nodes: AbstractSet[NodeId], digests: AbstractSet[Digest]
) -> tuple[Mapping[Digest, Chained], frozenset[NodeId]]:
    """Chains of all models that start somewhere, and the nodes that are to ask others than before.

    A chain is planned again when its members, their links, or whole copies have changed; parts that
    arrive on their way change nothing.
    """
    looked_at = {
        *digests,
        *(digest for node_id in nodes for digest in _digests_at(node_id, draft, index)),
    }
    chains, asking = dict(index.chains), set[NodeId]()
    for digest in looked_at:
        starting = [one for one in draft.books.of_digest(digest) if one.instance.state in BRINGING]
        before = index.chains.get(digest)
        now = _planned(digest, starting, draft, before) if starting else None
        if now is before:
            continue
        was = before.upstreams if before is not None else NO_UPSTREAMS
        will = now.upstreams if now is not None else NO_UPSTREAMS
        asking.update(node_id for node_id in {*was, *will} if was.get(node_id) != will.get(node_id))
        if now is None:
            del chains[digest]
        else:
            chains[digest] = now
    return chains, frozenset(asking)


def _digests_at(node_id: NodeId, draft: Draft, index: Index) -> Iterable[Digest]:
    """Models in whose chains a node may be, or may have been."""
    chains = index.chains
    for copies in (index.copies.of(node_id), draft.copies.of(node_id)) if chains else ():
        # A node has hundreds of copies, and few models start anywhere.
        yield from (digest for digest in chains if digest in copies)
    yield from (one.instance.digest for one in draft.books.bringing_on(node_id))


def _planned(
    digest: Digest, starting: list[Record], draft: Draft, before: Chained | None
) -> Chained:
    known, model = draft.facts.nodes, starting[-1].model
    placements = [one for record in starting for one in record.instance.placements]
    members = {one.node_id for one in placements}
    there = members | draft.copies.to(digest)
    if len(there) == 1:
        return ALONE
    nodes = [known[node_id] for node_id in sorted(there) if node_id in known]
    parts = {one.node_id: _parts_of(digest, one) for one in nodes}
    whole = frozenset(range(len(model.spec.part_bytes)))
    if _is_progress_alone(
        [parts[one.node_id] for one in nodes if one.node_id not in members],
        whole,
        model,
        placements,
    ):
        parts = {
            node_id: held if held >= whole else frozenset[int]() for node_id, held in parts.items()
        }
    facts = (
        model,
        tuple((one.instance.state, one.instance.placements) for one in starting),
        tuple(
            (one.node_id, one.liveness, one.draining, one.dataplane_port, one.nic_bytes_per_s)
            for one in nodes
        ),
        tuple(parts.items()),
    )
    if before is not None and before.facts == facts:
        return before
    plan = chains_of(model, nodes, [one.instance for one in starting])
    return Chained(facts, {node_id: tuple(asked) for node_id, asked in plan.upstreams.items()})


def _is_progress_alone(
    sources: Iterable[frozenset[int]],
    whole: frozenset[int],
    model: Model,
    placements: Sequence[Placement],
) -> bool:
    """Whether the parts that members lack do not decide which nodes they ask: all of them want the
    whole model, all others have it, and each asks only such members as joined before it.
    """
    if any(held < whole for held in sources) or any(
        one.stage != model.spec.whole or one.held is not None for one in placements
    ):
        return False
    joined: dict[NodeId, int] = {}
    for at, placement in enumerate(placements):
        joined.setdefault(placement.node_id, at)
    return all(
        joined.get(asked, -1) < at
        for at, placement in enumerate(placements)
        for asked in placement.upstreams
    )


def _parts_of(digest: Digest, node: NodeFacts) -> frozenset[int]:
    """What a node's host pool has of a model."""
    return frozenset(
        part
        for copy in node.copies
        if copy.digest == digest and copy.tier is Tier.HOST
        for part in copy.parts
    )
