"""What one tick looks at, and when each of it is to be looked at again."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from pilotlight.policy.cluster import HeldStage, Liveness, WorkerView
from pilotlight.policy.control.books import Books, Record, forget_at_s, refreshed
from pilotlight.policy.control.focus import EARLY_S, Focus
from pilotlight.policy.control.index import Index
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory
from pilotlight.policy.control.reconcile import next_judgement_s
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.plan import Instance, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import next_change_s

PASSED_S = 10 * EARLY_S
"""What was due longer ago than this has had its look, and came to nothing."""


class Look:
    """Names of what may come out differently. Without an index that is everything.

    ``read`` takes in what reports say, and finds the names.
    """

    def __init__(self, facts: ControlFacts, memory: Memory) -> None:
        self._facts = facts
        self._memory = memory
        self.index = memory.index if facts.changed is not None else None
        self.models: set[ModelName] = set()
        self.instances: set[InstanceId] = set()
        self.workers: set[WorkerId] = set()
        self.nodes: set[NodeId] = set()
        self.digests: set[Digest] = set()

    def read(self, demand: Iterable[Demand]) -> Books:
        """The books with what reports say of use, and without what ended long ago."""
        facts, books = self._facts, self._facts.books
        if self.index is None or facts.changed is None:
            self._add_everything()
        else:
            self._add(facts.changed, self.index)
        self._add_touched(books)
        views = (
            view for one in sorted(self.workers) if (view := facts.workers.get(one)) is not None
        )
        books = refreshed(books, views, {one.model for one in demand}, facts.now_s)
        books = books.without(
            one
            for one in self.instances
            if one in books.records and forget_at_s(books.records[one].instance) <= facts.now_s
        )
        self._add_touched(books)
        for worker_id in self.workers:
            self.instances.update(self._told_otherwise(worker_id, books))
        return books

    def records(self, books: Books) -> list[Record]:
        """Instances that are looked at."""
        return [books.records[one] for one in sorted(self.instances) if one in books.records]

    def _told_otherwise(self, worker_id: WorkerId, books: Books) -> Iterable[InstanceId]:
        """Instances on a worker that may be judged otherwise than at the last look at it: of dozens
        a report tells something new of one or two.
        """
        here = books.by_worker.get(worker_id, ())
        known = self.index.views.find(worker_id) if self.index is not None else None
        view = self._facts.workers.get(worker_id)
        if known is None or view is None or not (_is_alive(known) and _is_alive(view)):
            return here
        if known.incarnation != view.incarnation:
            return here
        before = {one.instance_id: one for one in known.facts.held}
        now = before
        if view.facts.held is not known.facts.held:
            now = {one.instance_id: one for one in view.facts.held}
        return (
            one
            for one in here
            if one not in now
            or len(books.records[one].instance.placements) > 1
            or _is_another(before.get(one), now[one])
        )

    def _add_everything(self) -> None:
        facts, memory = self._facts, self._memory
        self.models |= {*facts.models, *facts.books.by_model}
        self.instances |= {*facts.books.records}
        self.workers |= {*facts.workers, *facts.books.by_worker, *memory.told_workers}
        self.nodes |= {*facts.nodes, *facts.books.by_node, *memory.told_nodes}
        self.digests |= {*facts.books.by_digest}

    def _add(self, changed: Focus, index: Index) -> None:
        facts, books, focus = self._facts, self._facts.books, changed | index.restless
        turned = index.drained ^ {one.node_id for one in facts.drains}
        leaving = {one for node_id in turned for one in books.by_node.get(node_id, ())}
        self.models |= {*focus.models, *index.asked, *index.models_due.until(facts.now_s)}
        self.models |= {books.records[one].instance.model for one in leaving}
        self.instances |= {*focus.instances, *index.instances_due.until(facts.now_s)}
        self.workers |= focus.workers
        # Whether a model is pinned says what eviction could free.
        self.workers.update(one for model in changed.models for one in index.holding.to(model))
        self.nodes |= focus.nodes | turned
        self.digests |= {
            books.records[one].instance.digest for one in focus.instances if one in books.records
        }

    def _add_touched(self, books: Books) -> None:
        for instance_id, before in books.touched.items():
            self.instances.add(instance_id)
            for record in (before, books.get(instance_id)):
                if record is not None:
                    self.models.add(record.instance.model)
                    self.digests.add(record.instance.digest)
                    self.workers.update(one.worker_id for one in record.instance.placements)
                    self.nodes.update(one.node_id for one in record.instance.placements)


def _is_alive(view: WorkerView) -> bool:
    return view.facts.liveness is Liveness.ALIVE


def _is_another(before: HeldStage | None, now: HeldStage) -> bool:
    """Whether a stage is told otherwise, as far as its instance is judged by that."""
    if before is None:
        return True
    return before is not now and (
        before.state,
        before.generation,
        before.in_flight,
        before.open,
        before.stage,
        before.loaded,
        before.reason,
    ) != (
        now.state,
        now.generation,
        now.in_flight,
        now.open,
        now.stage,
        now.loaded,
        now.reason,
    )


def instances_due(
    instances: Iterable[InstanceId], books: Books, facts: ControlFacts, rules: ControlRules
) -> Mapping[InstanceId, float]:
    """When instances are to be looked at if no report comes.

    Args:
        instances: Those that are asked for.
        books: The instances, as control believes them to be.
        facts: What this tick knows.
        rules: Deadlines and keep-alives.

    Returns:
        Seconds on the clock of ``facts.now_s``, by instance; infinite: never.
    """
    times: dict[InstanceId, float] = {}
    after_s = facts.now_s - PASSED_S
    for instance_id in instances:
        record = books.get(instance_id)
        judged_s = (
            next_judgement_s(record, facts.workers, after_s, rules.reconcile)
            if record is not None
            else math.inf
        )
        forget_s = forget_at_s(record.instance) if record is not None else math.inf
        times[instance_id] = min(judged_s, forget_s) - EARLY_S
    return times


def models_due(
    models: Iterable[ModelName],
    seen: Snapshot,
    rules: ControlRules,
    surplus_since_s: Mapping[ModelName, float],
) -> Mapping[ModelName, float]:
    """When models are to be looked at if nothing is asked for.

    Args:
        models: Those that are asked for.
        seen: The instances of theirs.
        rules: Keep-alives.
        surplus_since_s: Since when models have had an instance too many.

    Returns:
        Seconds on the clock of ``seen.now_s``, by model; infinite: never.
    """
    known = {model.name: model for model in seen.models}
    on = defaultdict[ModelName, list[Instance]](list)
    for instance in seen.instances:
        on[instance.model].append(instance)
    after_s = seen.now_s - PASSED_S
    return {
        name: next_change_s(
            known[name], on[name], after_s, rules.scaling, surplus_since_s.get(name, math.inf)
        )
        - EARLY_S
        if name in known and name in on
        else math.inf
        for name in models
    }
