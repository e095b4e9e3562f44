"""The books of fetches (``coldstart.contention``), kept up with instances and reports.

They follow from placements and reports alone, so a new leader has the same, but for what it takes
for not yet fetched until the first report.
"""

import math
from collections.abc import Iterable, Mapping

from pilotlight.policy.cluster import NodeFacts, Tier
from pilotlight.policy.coldstart.contention import (
    FetchBooks,
    FetchKey,
    LinkName,
    Newcomer,
    disk,
    incoming,
    outgoing,
)
from pilotlight.policy.coldstart.facts import DISK, link_capacities
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.ids import InstanceId, NodeId, WorkerId
from pilotlight.policy.instance import STARTING
from pilotlight.policy.plan import Placement

CONTRADICTS = 0.1
"""Of a fetch's bytes: reports that differ by less from the books leave them as they are."""


def fetch_key(instance_id: InstanceId, worker_id: WorkerId) -> FetchKey:
    """What a stage's fetch is called."""
    return FetchKey(f"{instance_id}@{worker_id}")


def newcomers(record: Record) -> tuple[Newcomer, ...]:
    """The fetches of an instance that is on its way, as its placements have them."""
    instance = record.instance
    if instance.state not in STARTING:
        return ()
    return tuple(
        Newcomer(
            key=fetch_key(instance.instance_id, one.worker_id),
            links=_links(one),
            fetch_bytes=one.fetch_bytes,
            deadline_s=math.inf if one.fetch_deadline_s is None else one.fetch_deadline_s,
        )
        for one in instance.placements
        if one.fetch_bytes > 0
    )


def kept_up(
    fetches: FetchBooks,
    books: Books,
    before: Mapping[InstanceId, Record | None],
    looked_at: Iterable[InstanceId],
    nodes: Iterable[NodeFacts],
    now_s: float,
) -> FetchBooks:
    """The books of fetches after a look at some instances and nodes.

    1. bandwidths are those that nodes report
    2. fetches of instances that are not on their way any more, or were given up, have ended
    3. those of new ones begin
    4. a node that has all parts of a stage has ended its fetch; a report that contradicts what was
       computed replaces it

    Args:
        fetches: As they were.
        books: Instances now.
        before: What instances that changed were before.
        looked_at: Instances that may have changed.
        nodes: With new reports.
        now_s: The time, in seconds.
    """
    listed = list(nodes)
    fetches = fetches.with_capacities(link_capacities(listed), now_s)  # 1
    over: list[FetchKey] = []
    new: list[Newcomer] = []
    for instance_id in sorted({*looked_at, *before}):
        record = books.get(instance_id)
        wanted = newcomers(record) if record is not None else ()
        keys = {one.key for one in wanted}
        for known in (record, before.get(instance_id)):
            if known is not None:
                each = (fetch_key(instance_id, one.worker_id) for one in known.instance.placements)
                over += [key for key in each if key in fetches.fetches and key not in keys]
        if record is not None and before.get(instance_id) is None:
            new += [one for one in wanted if one.key not in fetches.fetches]
    if over:
        fetches = fetches.done(dict.fromkeys(over), now_s)  # 2
    if new:
        fetches = fetches.forward(sorted({link for one in new for link in one.links}), now_s)
        fetches = fetches.admit(new, now_s)  # 3
    return _reported(fetches, books, listed, now_s)  # 4


def _reported(
    fetches: FetchBooks, books: Books, nodes: Iterable[NodeFacts], now_s: float
) -> FetchBooks:
    over: list[FetchKey] = []
    for node in nodes:
        fetches, ended = _reported_of(fetches, books, node, now_s)
        over += ended
    return fetches.done(over, now_s) if over else fetches


def _reported_of(
    fetches: FetchBooks, books: Books, node: NodeFacts, now_s: float
) -> tuple[FetchBooks, list[FetchKey]]:
    """With what one node reports of fetches that go on, and those that have ended."""
    over: list[FetchKey] = []
    for record in books.bringing_on(node.node_id):
        for one in record.instance.placements:
            key = fetch_key(record.instance.instance_id, one.worker_id)
            known = fetches.fetches.get(key)
            if one.node_id != node.node_id or known is None:
                continue
            pending = _pending_bytes(node, record, one)
            if pending is None:
                continue
            if pending == 0:
                over.append(key)
            elif abs(pending - known.pending_at(now_s)) > CONTRADICTS * one.fetch_bytes:
                fetches = fetches.progress(key, pending, now_s)
    return fetches, over


def _pending_bytes(node: NodeFacts, record: Record, placement: Placement) -> float | None:
    """What a node still misses of a stage; None where its report does not say."""
    digest = record.instance.digest
    copies = [one for one in node.copies if one.digest == digest]  # Of hundreds, for each fetch.
    there = {part for one in copies if one.tier is Tier.HOST for part in one.parts}
    if there.issuperset(placement.parts_of(record.model.spec)):
        return 0.0
    found = [one for one in node.transfers if one.digest == digest]
    if len(found) != 1:
        return None
    return float(min(placement.fetch_bytes, found[0].total_bytes - found[0].done_bytes))


def _links(placement: Placement) -> tuple[LinkName, ...]:
    into = incoming(placement.node_id)
    if placement.source == DISK:
        return (disk(placement.node_id),)
    return (into, outgoing(NodeId(placement.source))) if placement.source else (into,)
