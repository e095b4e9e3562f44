"""The leader's instances: rows, what they were started from, and starts that are not yet rows. Immutable, indexed.

A change makes new books that share what did not change, so that a decision log can keep the books of every tick.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pilotlight.policy.cluster import WorkerView
from pilotlight.policy.instance import ENDED, SERVING, STARTING
from pilotlight.policy.types import Instance, InstanceId, Model, ModelName, NodeId, WorkerId

REMEMBER_ENDED_S = 60.0
"""Ended instances are kept so long: failures slow the next start down, late phases still find their cold start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One instance."""

    instance: Instance
    model: Model
    """As it was when the instance was planned: the row of the model may change or go."""
    trace_parent: str = ""
    tentative: bool = False
    """Room is being asked for: it takes part in decisions, but there is no row and no command yet."""
    seen_on: frozenset[WorkerId] = frozenset()
    """Workers that were seen to hold their stage."""

    @property
    def is_row(self) -> bool:
        """It is written down, and has not ended."""
        return not self.tentative and self.instance.state not in ENDED


Ids = tuple[InstanceId, ...]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Every instance that lives or has just ended."""

    records: Mapping[InstanceId, Record] = field(default_factory=dict[InstanceId, Record])
    by_model: Mapping[ModelName, Ids] = field(default_factory=dict[ModelName, Ids])
    by_worker: Mapping[WorkerId, Ids] = field(default_factory=dict[WorkerId, Ids])
    by_node: Mapping[NodeId, Ids] = field(default_factory=dict[NodeId, Ids])

    def put(self, *records: Record) -> "Books":
        """Books with these in the place of those of the same instances. Costs one copy, however many they are."""
        if not records:
            return self
        kept = dict(self.records)
        newcomers: list[Record] = []
        for record in records:
            known = kept.get(record.instance.instance_id)
            kept[record.instance.instance_id] = record
            if known is None or known.instance.placements != record.instance.placements:
                newcomers.append(record)
        if not newcomers:
            return replace(self, records=kept)
        replaced = [self.records[one.instance.instance_id] for one in newcomers if one.instance.instance_id in self.records]
        return _indexed(kept, self, (*replaced, *newcomers))

    def without(self, instance_ids: Iterable[InstanceId]) -> "Books":
        """Books that have forgotten some instances."""
        gone = [self.records[instance_id] for instance_id in instance_ids if instance_id in self.records]
        if not gone:
            return self
        dropped = {one.instance.instance_id for one in gone}
        return _indexed({key: one for key, one in self.records.items() if key not in dropped}, self, gone)

    def get(self, instance_id: InstanceId) -> Record | None:
        """One record."""
        return self.records.get(instance_id)

    def rows(self) -> tuple[Record, ...]:
        """Records that are rows and have not ended."""
        return tuple(one for one in self.records.values() if one.is_row)

    def of_model(self, model: ModelName) -> tuple[Record, ...]:
        """Rows of one model that start or serve."""
        found = (self.records[instance_id] for instance_id in self.by_model.get(model, ()))
        return tuple(one for one in found if one.is_row and one.instance.state in STARTING | SERVING)

    def on_worker(self, worker_id: WorkerId) -> tuple[Record, ...]:
        """Rows with a stage on one worker."""
        return tuple(one for key in self.by_worker.get(worker_id, ()) if (one := self.records[key]).is_row)

    def on_node(self, node_id: NodeId) -> tuple[Record, ...]:
        """Rows with a stage on one node."""
        return tuple(one for key in self.by_node.get(node_id, ()) if (one := self.records[key]).is_row)

    def instances(self) -> tuple[Instance, ...]:
        """What decisions look at: rows, starts under way, and what has just ended."""
        return tuple(one.instance for one in self.records.values())


def _indexed(records: dict[InstanceId, Record], before: Books, touched: Iterable[Record]) -> Books:
    """Books of ``records``, with the indexes of ``before`` mended where ``touched`` records are, or were."""
    models, workers, nodes = dict(before.by_model), dict(before.by_worker), dict(before.by_node)
    for record in touched:
        instance_id = record.instance.instance_id
        current = records.get(instance_id)
        placements = current.instance.placements if current is not None else ()
        _mend(models, record.instance.model, instance_id, present=current is not None)
        for placement in record.instance.placements:
            _mend(
                workers, placement.worker_id, instance_id, present=any(one.worker_id == placement.worker_id for one in placements)
            )
            _mend(nodes, placement.node_id, instance_id, present=any(one.node_id == placement.node_id for one in placements))
    return Books(records=records, by_model=models, by_worker=workers, by_node=nodes)


def _mend(index: dict[Key, Ids], key: Key, instance_id: InstanceId, *, present: bool) -> None:
    others = tuple(one for one in index.get(key, ()) if one != instance_id)
    if present:
        index[key] = (*others, instance_id)
    elif others:
        index[key] = others
    else:
        index.pop(key, None)


def refreshed(books: Books, views: Iterable[WorkerView], waited_for: Iterable[ModelName], now_s: float) -> Books:
    """Bring what reports say of use into the instances, and forget what ended long ago.

    ``last_used_s`` of an instance that serves is the end of its last request, of one that starts the last moment at which somebody
    waited for it.
    """
    changed: dict[InstanceId, Record] = {}
    for view in views:
        for held in view.facts.held:
            record = changed.get(held.instance_id) or books.get(held.instance_id)
            if record is None or record.instance.state in ENDED:
                continue
            worker_id = view.facts.worker_id
            if worker_id not in record.seen_on:
                record = replace(record, seen_on=record.seen_on | {worker_id})
            if record.instance.state in SERVING and worker_id == record.instance.lead:
                used_s = max(record.instance.state_since_s, view.heard_s - held.idle_s)
                used_s = now_s if held.in_flight > 0 else used_s
                if (held.in_flight, used_s) != (record.instance.in_flight, record.instance.last_used_s):
                    record = replace(record, instance=replace(record.instance, in_flight=held.in_flight, last_used_s=used_s))
            if record is not books.get(held.instance_id):
                changed[held.instance_id] = record
    for model in waited_for:
        for instance_id in books.by_model.get(model, ()):
            record = changed.get(instance_id) or books.records[instance_id]
            if record.instance.state in STARTING:
                changed[instance_id] = replace(record, instance=replace(record.instance, last_used_s=now_s))
    books = books.put(*changed.values())
    return books.without(
        key
        for key, one in list(books.records.items())
        if one.instance.state in ENDED and now_s - one.instance.state_since_s >= REMEMBER_ENDED_S
    )
