"""The leader's instances: rows, what they were started from, and starts that are not yet rows.

Books are immutable and indexed. A change makes new books that share what did not change, so that a
decision log can keep the books of every tick. They note what changed since the last tick, so that
the next one looks at that alone.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pilotlight.policy.cluster import WorkerView
from pilotlight.policy.control.table import Table
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import BRINGING, ENDED, SERVING, STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, Placement

REMEMBER_ENDED_S = 60.0
"""Ended instances are kept so long: failures slow the next start down, late phases still find their
cold start."""

USED_AGAIN_S = 0.05
"""Reports of one use differ by their way here. Each stage that is idle beside one that is not would
else have changed with every report of its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One instance."""

    instance: Instance
    model: Model
    """As it was when the instance was planned: the row of the model may change or go."""
    trace_parent: str = ""
    tentative: bool = False
    """Room is being asked for: it takes part in decisions, but there is no row and no command yet.
    """
    seen_on: frozenset[WorkerId] = frozenset()
    """Workers that were seen to hold their stage."""

    @property
    def is_row(self) -> bool:
        """It is written down, and has not ended."""
        return not self.tentative and self.instance.state not in ENDED


Ids = tuple[InstanceId, ...]
Key = TypeVar("Key", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Every instance that lives or has just ended."""

    records: Table[InstanceId, Record] = field(default_factory=Table["InstanceId", "Record"])
    by_model: Table[ModelName, Ids] = field(default_factory=Table["ModelName", "Ids"])
    by_digest: Table[Digest, Ids] = field(default_factory=Table["Digest", "Ids"])
    by_worker: Table[WorkerId, Ids] = field(default_factory=Table["WorkerId", "Ids"])
    """Without those that have ended: hundreds a worker where many starts follow each other."""
    by_node: Table[NodeId, Ids] = field(default_factory=Table["NodeId", "Ids"])
    """The same."""
    bringing: Table[NodeId, Ids] = field(default_factory=Table["NodeId", "Ids"])
    """Of these the few for which the node brings parts."""
    touched: Mapping[InstanceId, Record | None] = field(
        default_factory=dict[InstanceId, "Record | None"]
    )
    """What was put or forgotten since the last tick, and what it was then; None: it was not there.
    """

    def put(self, *records: Record) -> "Books":
        """Books with these in the place of those of the same instances.

        Costs what is put, and one copy of what was touched since the last tick.
        """
        if not records:
            return self
        news, touched = dict[InstanceId, Record](), dict(self.touched)
        moved: list[Record] = []
        for record in records:
            instance_id = record.instance.instance_id
            known = news.get(instance_id) or self.records.find(instance_id)
            touched.setdefault(instance_id, known)
            news[instance_id] = record
            if (
                known is None
                or _places(known) != _places(record)
                or _brings(known) != _brings(record)
            ):
                moved.append(record)
                if known is not None:
                    moved.append(known)
        kept = self.records.put(news)
        if not moved:
            return replace(self, records=kept, touched=touched)
        return _indexed(kept, self, moved, touched)

    def without(self, instance_ids: Iterable[InstanceId]) -> "Books":
        """Books that have forgotten some instances."""
        found = (self.records.find(one) for one in instance_ids)
        gone = [one for one in found if one is not None]
        if not gone:
            return self
        touched = dict(self.touched)
        for record in gone:
            touched.setdefault(record.instance.instance_id, record)
        kept = self.records.put({}, [one.instance.instance_id for one in gone])
        return _indexed(kept, self, gone, touched)

    def settled(self) -> "Books":
        """The same books, with nothing noted as changed."""
        return replace(self, touched={}) if self.touched else self

    def get(self, instance_id: InstanceId) -> Record | None:
        """One record."""
        return self.records.find(instance_id)

    def rows(self) -> tuple[Record, ...]:
        """Records that are rows and have not ended, in no order."""
        return tuple(one for one in self.records.values() if one.is_row)

    def of_model(self, model: ModelName) -> tuple[Record, ...]:
        """Rows of one model that start or serve."""
        found = (self.records[instance_id] for instance_id in self.by_model.get(model, ()))
        return tuple(
            one for one in found if one.is_row and one.instance.state in STARTING | SERVING
        )

    def of_digest(self, digest: Digest) -> tuple[Record, ...]:
        """Rows of models with one digest, in the order in which they were planned."""
        return tuple(
            one for key in self.by_digest.get(digest, ()) if (one := self.records[key]).is_row
        )

    def on_worker(self, worker_id: WorkerId) -> tuple[Record, ...]:
        """Rows with a stage on one worker."""
        return tuple(
            one for key in self.by_worker.get(worker_id, ()) if (one := self.records[key]).is_row
        )

    def bringing_on(self, node_id: NodeId) -> tuple[Record, ...]:
        """Rows with a stage on one node that are on their way, or grow."""
        return tuple(
            one for key in self.bringing.get(node_id, ()) if (one := self.records[key]).is_row
        )

    def instances(self) -> tuple[Instance, ...]:
        """What decisions look at: rows, starts under way, and what has just ended."""
        return tuple(one.instance for one in self.records.values())


def _indexed(
    records: Table[InstanceId, Record],
    before: Books,
    moved: Iterable[Record],
    touched: Mapping[InstanceId, Record | None],
) -> Books:
    """Books of ``records``: the indexes of ``before``, mended where ``moved`` records are, or
    were.
    """
    models, digests = dict[ModelName, Ids](), dict[Digest, Ids]()
    workers, nodes, bringing = dict[WorkerId, Ids](), dict[NodeId, Ids](), dict[NodeId, Ids]()
    for record in moved:
        instance_id = record.instance.instance_id
        current = records.find(instance_id)
        places = _places(current) if current is not None else ()
        there = current is not None
        brings = current is not None and _brings(current)
        _mend(before.by_model, models, record.instance.model, instance_id, present=there)
        _mend(before.by_digest, digests, record.instance.digest, instance_id, present=there)
        for one in record.instance.placements:
            on_worker = any(place.worker_id == one.worker_id for place in places)
            _mend(before.by_worker, workers, one.worker_id, instance_id, present=on_worker)
            on_node = any(place.node_id == one.node_id for place in places)
            _mend(before.by_node, nodes, one.node_id, instance_id, present=on_node)
            _mend(before.bringing, bringing, one.node_id, instance_id, present=on_node and brings)
    return Books(
        records=records,
        by_model=_mended(before.by_model, models),
        by_digest=_mended(before.by_digest, digests),
        by_worker=_mended(before.by_worker, workers),
        by_node=_mended(before.by_node, nodes),
        bringing=_mended(before.bringing, bringing),
        touched=touched,
    )


def _places(record: Record) -> tuple[Placement, ...]:
    """Where an instance takes room: nowhere, once it has ended."""
    return () if record.instance.state in ENDED else record.instance.placements


def _brings(record: Record) -> bool:
    """Whether its nodes bring parts."""
    return record.instance.state in BRINGING


def _mend(
    index: Table[Key, Ids],
    news: dict[Key, Ids],
    key: Key,
    instance_id: InstanceId,
    *,
    present: bool,
) -> None:
    """Instances keep the order in which they came.

    Args:
        index: As it was.
        news: What is another one in it.
        key: Under which an instance is listed.
        instance_id: Of the instance.
        present: Whether it is to be.
    """
    listed = news[key] if key in news else index.find(key) or ()
    if present == (instance_id in listed):
        return
    others = tuple(one for one in listed if one != instance_id)
    news[key] = (*others, instance_id) if present else others


def _mended(index: Table[Key, Ids], news: Mapping[Key, Ids]) -> Table[Key, Ids]:
    return index.put(
        {key: ids for key, ids in news.items() if ids},
        [key for key, ids in news.items() if not ids],
    )


def refreshed(
    books: Books, views: Iterable[WorkerView], waited_for: Iterable[ModelName], now_s: float
) -> Books:
    """Bring what reports say of use into the instances.

    ``last_used_s`` of an instance that serves is the end of its last request, or the last report
    that showed requests in flight. Of one that starts it is the last moment at which requests
    waited for it.

    Args:
        books: As they are.
        views: Workers with new reports, and those whose instances changed; others add nothing.
        waited_for: Models for which requests wait.
        now_s: The time, in seconds.
    """
    changed: dict[InstanceId, Record] = {}
    find = books.records.find
    for view in views:
        worker_id, facts_s = view.facts.worker_id, view.facts_s
        for held in view.facts.held:
            known = changed.get(held.instance_id) or find(held.instance_id)
            if known is None or known.instance.state in ENDED:
                continue
            record, instance = known, known.instance
            if worker_id not in record.seen_on:
                record = replace(record, seen_on=record.seen_on | {worker_id})
            if instance.state in SERVING and worker_id == instance.lead:
                used_s = view.heard_s if held.in_flight > 0 else facts_s - held.idle_s
                used_s = max(instance.state_since_s, used_s)
                differs = abs(used_s - instance.last_used_s) > USED_AGAIN_S
                if differs or held.in_flight != instance.in_flight:
                    used = replace(instance, in_flight=held.in_flight, last_used_s=used_s)
                    record = replace(record, instance=used)
            if record is not known:
                changed[held.instance_id] = record
    for model in waited_for:
        for instance_id in books.by_model.get(model, ()):
            record = changed.get(instance_id) or books.records[instance_id]
            if record.instance.state in STARTING and record.instance.last_used_s != now_s:
                used = replace(record.instance, last_used_s=now_s)
                changed[instance_id] = replace(record, instance=used)
    return books.put(*changed.values())


def forget_at_s(instance: Instance) -> float:
    """When an instance that has ended is forgotten; infinite while it lives."""
    return instance.state_since_s + REMEMBER_ENDED_S if instance.state in ENDED else math.inf
