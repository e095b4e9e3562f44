"""Control without an index: every step looks at everything.

What ``control.tick`` says must be what this says.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from pilotlight.policy.coldstart.chosen import KnownStarts
from pilotlight.policy.coldstart.contention import FetchBooks
from pilotlight.policy.control.books import Books, Record, forget_at_s, refreshed
from pilotlight.policy.control.fetches import newcomers
from pilotlight.policy.control.holds import disagreement, fetches_of, stages_of, upstreams_of
from pilotlight.policy.control.line import looked_at
from pilotlight.policy.control.plan import (
    NO_ROOM,
    ControlFacts,
    ControlRules,
    Holds,
    Memory,
    NodeTold,
    Plan,
    Refusal,
    Told,
    WorkerTold,
)
from pilotlight.policy.control.reconcile import Change, drain_of, moved, reconcile
from pilotlight.policy.control.starts import Tries
from pilotlight.policy.control.table import Table
from pilotlight.policy.control.tick import EVICTED, has_learned
from pilotlight.policy.drain import plan_drain, staying
from pilotlight.policy.ids import InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import SchemeChoice, choose_scheme
from pilotlight.policy.plan import InstanceState, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Drain, plan_scaling
from pilotlight.policy.turns import plan_turns

Key = TypeVar("Key", bound=str)
NO_FETCHES = FetchBooks()


@dataclass(frozen=True)
class Said:
    """A plan, without the explanations of its decisions: of a large cluster they tell of a part."""

    records: dict[InstanceId, Record]
    changes: tuple[Change, ...]
    drain: tuple[Drain, ...]
    evicted: dict[ModelName, tuple[InstanceId, ...]]
    start: tuple[tuple[object, ...], ...]
    refuse: tuple[tuple[ModelName, str, str, bool], ...]
    tell: tuple[object, ...]
    repeat: tuple[object, ...]
    longest_wait_s: float
    wanted: dict[ModelName, str]
    backing: dict[ModelName, tuple[object, ...]]
    tries: dict[ModelName, tuple[Refusal, ...]]
    surplus_since_s: dict[ModelName, float]
    told_nodes: dict[NodeId, Told]
    told_workers: dict[WorkerId, Told]
    repeated_s: float


def said(plan: Plan) -> Said:
    """What a plan says."""
    memory = plan.memory
    return Said(
        records=dict(plan.books.records),
        changes=plan.changes,
        drain=plan.drain,
        evicted=dict(plan.evicted),
        start=tuple(
            (
                one.model.name,
                one.reason,
                one.choice.scheme,
                one.choice.considered,
                one.choice.meets_slo,
                one.choice.needs_eviction,
                one.choice.reason,
                one.demand_seen_s,
                one.trace_parent,
                one.ahead,
            )
            for one in plan.start
        ),
        refuse=tuple((one.model, one.code, one.message, one.record) for one in plan.refuse),
        tell=(plan.tell.nodes, plan.tell.workers),
        repeat=(plan.repeat.nodes, plan.repeat.workers),
        longest_wait_s=plan.longest_wait_s,
        wanted=dict(memory.wanted),
        backing={
            key: (one.attempts, one.at_s, one.retry_at_s, one.code)
            for key, one in memory.backing.items()
        },
        tries=dict(memory.tries),
        surplus_since_s=dict(memory.surplus_since_s),
        told_nodes=dict(memory.told_nodes),
        told_workers=dict(memory.told_workers),
        repeated_s=memory.repeated_s,
    )


def plain_tick(
    facts: ControlFacts,
    memory: Memory,
    rules: ControlRules,
    fetches: FetchBooks = NO_FETCHES,
) -> Plan:
    """Decide by a look at everything there is.

    Args:
        facts: What is known.
        memory: What the plain tick before handed on.
        rules: Figures of the decisions.
        fetches: The books of fetches, for a policy of ``coldstart``. They follow from one tick to
            the next: they are taken from the tick that is compared.
    """
    now_s, waiting = facts.now_s, {*facts.asked, *(one.model for one in facts.demand)}
    facts = replace(facts, demand=looked_at(facts, memory, rules))
    demand = _with_wanted(facts.demand, memory.wanted, rules)
    used = refreshed(facts.books, facts.workers.values(), {one.model for one in demand}, now_s)
    used = used.without(
        key for key, one in list(used.records.items()) if forget_at_s(one.instance) <= now_s
    )
    rows = sorted(
        (one for one in used.records.values() if one.is_row),
        key=lambda one: one.instance.instance_id,
    )
    changes = reconcile(rows, facts.workers, now_s, rules.reconcile)
    draft = _Draft(used, facts, fetches)
    draft.move(changes)
    if facts.term.deaf or not facts.term.announced or not has_learned(facts, draft.books, rules):
        return Plan(books=used, memory=memory, changes=changes)
    evicted = {model: draft.evict(model) for model in facts.evict}
    emptied = plan_drain(draft.snapshot(facts.demand), rules.drain)
    wanted = {one.model: one.reason for one in emptied.wanted}
    draft.drain(emptied.drains)
    demand = _with_wanted(facts.demand, wanted, rules)
    scaled = plan_scaling(staying(draft.snapshot(demand)), rules.scaling, memory.surplus_since_s)
    draft.drain(scaled.drains)
    blocked = frozenset(model for model, one in memory.backing.items() if one.code != NO_ROOM)
    starts = {start.model: start for start in scaled.starts}
    turns = plan_turns(staying(draft.snapshot(demand)), starts, rules.turns, blocked)
    draft.drain(turns.drains)
    waited_for = waiting | {one.model for one in demand} | set(starts)

    def choose(
        model: Model,
        excluded: frozenset[WorkerId],
        asked: tuple[Demand, ...],
        *,
        explained: bool,
        ahead: bool,
        instances: int,
    ) -> tuple[Snapshot, SchemeChoice]:
        seen = draft.snapshot(asked)
        asked_rules = replace(rules.scheme, evicts=not ahead)
        known = KnownStarts(timings=facts.timings, fetches=draft.fetches)
        return seen, choose_scheme(
            model, seen, asked_rules, excluded, known=known, instances=instances
        )

    tries = Tries(facts, memory, rules, waited_for.__contains__, choose)
    tries.take(turns.turns, scaled.starts, draft, demand, wanted)
    tell, repeat, told_nodes, told_workers = _tell(draft.books, facts, memory, rules)
    return Plan(
        books=used,
        memory=Memory(
            wanted=wanted,
            backing=tries.backing,
            tries=tries.tries,
            surplus_since_s=scaled.surplus_since_s,
            told_nodes=Table[NodeId, Told]().put(told_nodes),
            told_workers=Table[WorkerId, Told]().put(told_workers),
            repeated_s=now_s if rules.repeated(now_s - memory.repeated_s) else memory.repeated_s,
        ),
        changes=changes,
        drain=tuple(draft.drains),
        evicted=evicted,
        start=tuple(tries.orders),
        refuse=tuple(tries.refused),
        tell=tell,
        repeat=repeat,
        longest_wait_s=turns.longest_wait_s,
    )


class _Draft:
    """Books while the tick changes them."""

    def __init__(self, books: Books, facts: ControlFacts, fetches: FetchBooks) -> None:
        self.books = books
        self.fetches = fetches
        self.facts = facts
        self.drains: list[Drain] = []

    def move(self, changes: Iterable[Change]) -> None:
        for change in changes:
            record = self.books.get(change.instance_id)
            if record is not None and record.is_row:
                after = moved(record.instance, change, self.facts.term.epoch, self.facts.now_s)
                self.books = self.books.put(replace(record, instance=after))

    def drain(self, drains: Iterable[Drain]) -> None:
        for drain in drains:
            record = self.books.get(drain.instance_id)
            if (
                record is not None
                and record.is_row
                and record.instance.state is not InstanceState.DRAINING
            ):
                self.drains.append(drain)
                self.move((drain_of(drain),))

    def evict(self, model: ModelName) -> tuple[InstanceId, ...]:
        rows = [
            one
            for key in self.books.by_model.get(model, ())
            if (one := self.books.records[key]).is_row
        ]
        ids = tuple(row.instance.instance_id for row in rows)
        self.drain(
            Drain(instance_id=instance_id, model=model, reason=EVICTED) for instance_id in ids
        )
        return ids

    def put(self, *records: Record) -> None:
        self.books = self.books.put(*records)
        begun = [one for record in records if record.tentative for one in newcomers(record)]
        self.fetches = self.fetches.admit(begun, self.facts.now_s)

    def snapshot(self, demand: tuple[Demand, ...]) -> Snapshot:
        facts = self.facts
        return Snapshot(
            now_s=facts.now_s,
            epoch=facts.term.epoch,
            models=tuple(facts.models[name] for name in sorted(facts.models)),
            nodes=tuple(facts.nodes[node_id] for node_id in sorted(facts.nodes)),
            workers=tuple(facts.workers[worker_id].facts for worker_id in sorted(facts.workers)),
            instances=tuple(self.books.records[key].instance for key in sorted(self.books.records)),
            demand=demand,
            estimates=facts.estimates,
            arrivals=facts.arrivals,
            drains=facts.drains,
        )


def _with_wanted(
    asked: tuple[Demand, ...], wanted: Mapping[ModelName, str], rules: ControlRules
) -> tuple[Demand, ...]:
    waited_for = {one.model for one in asked}
    within_s = rules.drain.replace_within_s
    more = (
        Demand(model=one, waiting=1, oldest_age_s=0.0, deadline_in_s=within_s)
        for one in wanted
        if one not in waited_for
    )
    return (*asked, *more)


def _tell(
    books: Books, facts: ControlFacts, memory: Memory, rules: ControlRules
) -> tuple[Holds, Holds, dict[NodeId, Told], dict[WorkerId, Told]]:
    now_s = facts.now_s
    # In the order in which they were planned, which decides who asks whom.
    rows = (one for digest in books.by_digest for one in books.of_digest(digest))
    upstreams = upstreams_of(rows, facts.nodes)
    nodes = {
        one: fetches_of(one, books, upstreams) for one in sorted({*facts.nodes, *books.by_node})
    }
    workers = {one: stages_of(one, books) for one in sorted({*facts.workers, *books.by_worker})}
    told_nodes = {one: told for one, told in memory.told_nodes.items() if one in nodes}
    told_workers = {one: told for one, told in memory.told_workers.items() if one in workers}
    essences: dict[str, tuple[object, ...]] = {}
    essences |= {one: tuple(each.essence for each in fetches) for one, fetches in nodes.items()}
    essences |= {one: tuple(each.essence for each in holds) for one, holds in workers.items()}

    def is_disputed(worker_id: WorkerId) -> bool:
        told, view = told_workers[worker_id], facts.workers.get(worker_id)
        if view is None or view.heard_s - told.at_s <= rules.disagrees_again_s:
            return False
        return disagreement(workers[worker_id], view) is not None

    def news(told: Mapping[Key, Told], receivers: Iterable[Key]) -> list[Key]:
        return [one for one in receivers if one not in told or told[one].essence != essences[one]]

    repeated = rules.repeated(now_s - memory.repeated_s)

    def late(told: Mapping[Key, Told], but: Iterable[Key]) -> list[Key]:
        left = sorted((one.at_s, key) for key, one in told.items() if key not in but)
        return [key for at_s, key in left if at_s <= now_s - rules.repeat_s][:repeated]

    tell_nodes, tell_workers = news(told_nodes, nodes), news(told_workers, workers)
    disputed = [one for one in workers if one not in tell_workers and is_disputed(one)]
    repeat_nodes = late(told_nodes, tell_nodes)
    repeat_workers = [*disputed, *late(told_workers, (*tell_workers, *disputed))]
    told_nodes |= {
        one: Told(essence=essences[one], at_s=now_s) for one in (*tell_nodes, *repeat_nodes)
    }
    told_workers |= {
        one: Told(essence=essences[one], at_s=now_s) for one in (*tell_workers, *repeat_workers)
    }

    def holds(node_ids: Iterable[NodeId], worker_ids: Iterable[WorkerId]) -> Holds:
        return Holds(
            nodes=tuple(NodeTold(node_id=one, fetches=nodes[one]) for one in node_ids),
            workers=tuple(WorkerTold(worker_id=one, holds=workers[one]) for one in worker_ids),
        )

    return (
        holds(tell_nodes, tell_workers),
        holds(repeat_nodes, repeat_workers),
        told_nodes,
        told_workers,
    )
