"""One pass of control: facts and memory in, a plan out. Pure; the scheduler and the simulator drive it alike.

1. reports: what they show of each instance (``reconcile``)
2. nothing more while the bus is lost, the term is not announced, or too little was heard to command
3. operators: evictions drain
4. nodes that drain are emptied; what is still needed is wanted elsewhere, as if somebody waited for it (``drain``)
5. models that have too many instances, or too few (``scaling``)
6. whose turn it is, and who makes room (``turns``)
7. where each start goes (``parallelism``); a refused one is tried elsewhere, then later
8. holds: who is told what, on change, every second, and when a report disagrees (``holds``)
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.policy.control.books import Books, Record, refreshed
from pilotlight.policy.control.holds import disagreement, fetches_of, stages_of, upstreams_of
from pilotlight.policy.control.plan import (
    Backing,
    ControlFacts,
    ControlRules,
    Memory,
    NodeTold,
    Plan,
    Refusal,
    RefusedStart,
    StartOrder,
    Told,
    WorkerTold,
)
from pilotlight.policy.control.reconcile import Change, drain_of, moved, reconcile
from pilotlight.policy.drain import plan_drain, staying
from pilotlight.policy.parallelism import SchemeChoice, choose_scheme
from pilotlight.policy.scaling import Drain, Start, plan_scaling
from pilotlight.policy.turns import plan_turns
from pilotlight.policy.types import (
    DecisionId,
    Demand,
    Generation,
    Instance,
    InstanceId,
    InstanceState,
    Liveness,
    Model,
    ModelName,
    NodeId,
    Snapshot,
    WorkerId,
)

NO_ROOM, NO_WORKER = "no_room", "no_worker"
"""Codes of the taxonomy (``common.errors``)."""
EVICTED = "an operator evicts the model"


def tick(facts: ControlFacts, memory: Memory, rules: ControlRules) -> Plan:
    """Decide everything that is to be decided now.

    Args:
        facts: What is known.
        memory: What the tick before handed on.
        rules: Figures of the decisions.
    """
    asked = facts.demand
    demand = _with_wanted(asked, memory.wanted, rules)
    used = refreshed(facts.books, facts.workers.values(), {one.model for one in demand}, facts.now_s)
    changes = reconcile(used.rows(), facts.workers, facts.now_s, rules.reconcile)  # 1
    drafted = _Draft(used, facts)
    for change in changes:
        drafted.books = _moved(drafted.books, change, facts)
    if facts.term.deaf or not facts.term.announced or not has_learned(facts, drafted.books, rules):  # 2
        return Plan(books=used, memory=memory, changes=changes)
    evicted = {model: drafted.evict(model) for model in facts.evict}  # 3
    emptied = plan_drain(drafted.snapshot(asked), rules.drain)  # 4
    wanted = {one.model: one.reason for one in emptied.wanted}
    drafted.drain(emptied.drains)
    demand = _with_wanted(asked, wanted, rules)
    scaled = plan_scaling(staying(drafted.snapshot(demand)), rules.scaling)  # 5
    drafted.drain(scaled.drains)
    blocked = frozenset(model for model, one in memory.backing.items() if one.code != NO_ROOM)
    wanted_more = [start.model for start in scaled.starts]
    turns = plan_turns(staying(drafted.snapshot(demand)), wanted_more, rules.turns, blocked)  # 6
    drafted.drain(turns.drains)
    starts = {start.model: start for start in scaled.starts}
    waited_for = {one.model for one in demand} | set(starts)
    tries = _Tries(facts, memory, rules, waited_for)
    for turn in turns.turns:  # 7
        tries.begin(starts[turn.model], turn.left, drafted, demand, wanted)
    tell = _tell(drafted.books, facts, memory, rules)  # 8
    return Plan(
        books=used,
        memory=Memory(
            wanted=wanted,
            backing=tries.backing,
            tries=tries.tries,
            told_nodes=tell.told_nodes,
            told_workers=tell.told_workers,
        ),
        tell_nodes=tuple(tell.nodes),
        tell_workers=tuple(tell.workers),
        changes=changes,
        drain=tuple(drafted.drains),
        evicted=evicted,
        start=tuple(tries.orders),
        refuse=tuple(tries.refused),
        longest_wait_s=turns.longest_wait_s,
    )


def has_learned(facts: ControlFacts, books: Books, rules: ControlRules) -> bool:
    """Whether enough was heard to command: a worker must not be told to drop what its leader has merely not heard of."""
    term, now_s = facts.term, facts.now_s
    if now_s - term.listening_since_s < rules.learn_s:
        return False
    # A standby has listened all along: what it knows is as new as what a leader knows.
    stood_by = term.started_s - term.listening_since_s >= rules.learn_s
    if now_s - term.started_s >= (rules.learned_s if stood_by else rules.learn_s):
        return True
    placed = (facts.workers.get(one.worker_id) for record in books.rows() for one in record.instance.placements)
    if stood_by:
        return all(view is not None and view.facts.liveness is Liveness.ALIVE for view in placed)
    return all(view is not None and view.heard_s >= term.started_s for view in placed)


class _Draft:
    """Books while a tick changes them."""

    def __init__(self, books: Books, facts: ControlFacts) -> None:
        self.books = books
        self.facts = facts
        self.drains: list[Drain] = []

    def drain(self, drains: Iterable[Drain]) -> None:
        for drain in drains:
            record = self.books.get(drain.instance_id)
            if record is None or not record.is_row or record.instance.state is InstanceState.DRAINING:
                continue
            self.drains.append(drain)
            self.books = _moved(self.books, drain_of(drain), self.facts)

    def evict(self, model: ModelName) -> tuple[InstanceId, ...]:
        rows = [self.books.records[one] for one in self.books.by_model.get(model, ()) if self.books.records[one].is_row]
        ids = tuple(row.instance.instance_id for row in rows)
        self.drain(Drain(instance_id=instance_id, model=model, reason=EVICTED) for instance_id in ids)
        return ids

    def snapshot(self, demand: tuple[Demand, ...]) -> Snapshot:
        facts = self.facts
        return Snapshot(
            now_s=facts.now_s,
            epoch=facts.term.epoch,
            models=tuple(facts.models.values()),
            nodes=tuple(facts.nodes.values()),
            workers=tuple(view.facts for view in facts.workers.values()),
            instances=self.books.instances(),
            demand=demand,
            estimates=facts.estimates,
            drains=facts.drains,
        )


class _Tries:
    """Starts: where each goes, and what comes of refusals.

    1. a start of the model is asking for room already: it is waited for
    2. its attempt was refused everywhere, or nobody could grant: it waits, the longer the more attempts were refused
    3. while it waits, only a change of the workers ends that early
    4. some worker may take it: room is asked for there, leaving out those that refused in this attempt
    5. none may: the attempt is refused
    """

    def __init__(self, facts: ControlFacts, memory: Memory, rules: ControlRules, waited_for: set[ModelName]) -> None:
        self._facts = facts
        self._rules = rules
        self.orders: list[StartOrder] = []
        self.refused: list[RefusedStart] = []
        # Refusals of models that nobody waits for any more count no longer.
        over = set(facts.started)
        self.backing = {model: one for model, one in memory.backing.items() if model in waited_for and model not in over}
        self.tries = {model: one for model, one in memory.tries.items() if model in waited_for and model not in over}
        for refusal in facts.refusals:
            if refusal.model in waited_for:
                self.tries[refusal.model] = (*self.tries.get(refusal.model, ()), refusal)

    def begin(
        self, start: Start, left: frozenset[WorkerId], draft: _Draft, demand: tuple[Demand, ...], wanted: Mapping[ModelName, str]
    ) -> None:
        """Take up one model's turn. ``left``: workers whose room is kept for others."""
        model = self._facts.models.get(start.model)
        if model is None or any(draft.books.records[one].tentative for one in draft.books.by_model.get(model.name, ())):  # 1
            return
        tried = self.tries.get(model.name, ())
        if not tried and not self._may_try(model.name):  # 3
            return
        reason = start.reason if model.name in self._facts.awaited else wanted.get(model.name, start.reason)
        seen = slice_for(model, draft.snapshot(demand))
        choice = choose_scheme(model, seen, self._rules.scheme, left.union(one.worker_id for one in tried))
        over = len(tried) >= self._rules.max_tries or any(one.transient for one in tried)
        if choice.scheme is None or over:  # 2, 5
            self.tries.pop(model.name, None)
            self._refuse(model, reason, choice, seen, tried)
            return
        trace = next((one.trace_parent for one in demand if one.model == model.name), "")
        seen_s = self._facts.demand_seen_s.get(model.name, self._facts.now_s)
        self.orders.append(
            StartOrder(model=model, reason=reason, choice=choice, seen=seen, demand_seen_s=seen_s, trace_parent=trace)
        )
        # What follows in this tick counts it; the books that are kept get it from whoever asks for its room.
        draft.books = draft.books.put(_tentative(model, choice, self._facts, reason))

    def _may_try(self, model: ModelName) -> bool:
        waits = self.backing.get(model)
        now_s = self._facts.now_s
        if waits is None or now_s >= waits.retry_at_s:
            return True
        return waits.world_version != self._facts.world_version and now_s - waits.at_s >= self._rules.retry_at_once_s

    def _refuse(self, model: Model, reason: str, choice: SchemeChoice, seen: Snapshot, tried: tuple[Refusal, ...]) -> None:
        """Say why nothing is started, and wait before the next attempt."""
        if tried:
            code, message = tried[-1].code, tried[-1].message
        else:
            code, message = NO_WORKER if choice.no_worker_ever else NO_ROOM, choice.reason
        # Byte counts and ages differ from attempt to attempt; what makes a refusal a new one is who refused and how.
        essence = f"{code} {sorted((one.worker_id, one.code) for one in tried)}"
        before = self.backing.get(model.name)
        recorded = before.recorded if before is not None else frozenset[str]()
        attempts = before.attempts + 1 if before is not None else 1
        self.backing[model.name] = Backing(
            attempts=attempts,
            at_s=self._facts.now_s,
            retry_at_s=self._facts.now_s + retry_pause_s(model.name, attempts, self._rules),
            world_version=self._facts.world_version,
            code=code,
            recorded=recorded | {essence},
        )
        reasons = [reason, choice.reason, *(f"{one.worker_id}: {one.reason}" for one in choice.rejected)]
        reasons += [f"{one.worker_id}: {one.code}: {one.message}" for one in tried]
        self.refused.append(
            RefusedStart(
                model=model.name, code=code, message=message, reasons=tuple(reasons), seen=seen, record=essence not in recorded
            )
        )


def retry_pause_s(model: ModelName, attempts: int, rules: ControlRules) -> float:
    """The pause after so many refused attempts, at least 1: exponential, with jitter that follows from the model's name, so that a log can
    be replayed.
    """
    ceiling_s = min(rules.retry_limit_s, rules.retry_first_s * 2.0 ** min(attempts - 1, 32))
    drawn = hashlib.blake2b(f"{model} {attempts}".encode(), digest_size=8).digest()
    return ceiling_s * (0.5 + 0.5 * int.from_bytes(drawn) / 2**64)


def slice_for(model: Model, snapshot: Snapshot) -> Snapshot:
    """What a decision over one model looks at: everything but other models' demand, copies and estimates."""
    named = {held.model for worker in snapshot.workers for held in worker.held}
    return replace(
        snapshot,
        models=tuple(one for one in snapshot.models if one.name == model.name or one.name in named),
        nodes=tuple(
            replace(node, copies=tuple(copy for copy in node.copies if copy.digest == model.digest)) for node in snapshot.nodes
        ),
        demand=tuple(one for one in snapshot.demand if one.model == model.name),
        estimates=tuple(one for one in snapshot.estimates if one.model == model.name),
    )


def _with_wanted(asked: tuple[Demand, ...], wanted: Mapping[ModelName, str], rules: ControlRules) -> tuple[Demand, ...]:
    waited_for = {one.model for one in asked}
    more = (
        Demand(model=model, waiting=1, oldest_age_s=0.0, deadline_in_s=rules.drain.replace_within_s)
        for model in wanted
        if model not in waited_for
    )
    return (*asked, *more)


def _moved(books: Books, change: Change, facts: ControlFacts) -> Books:
    record = books.get(change.instance_id)
    if record is None or not record.is_row:
        return books
    return books.put(replace(record, instance=moved(record.instance, change, facts.term.epoch, facts.now_s)))


def _tentative(model: Model, choice: SchemeChoice, facts: ControlFacts, reason: str) -> Record:
    assert choice.scheme is not None
    instance = Instance(
        instance_id=InstanceId(f"start of {model.name}"),
        model=model.name,
        digest=model.digest,
        state=InstanceState.PLANNED,
        generation=Generation(1),
        epoch=facts.term.epoch,
        placements=choice.scheme.placements,
        decision_id=DecisionId(""),
        state_since_s=facts.now_s,
        last_used_s=facts.now_s,
        reason=reason,
    )
    return Record(instance=instance, model=model, tentative=True)


@dataclass(slots=True, kw_only=True)
class _Tell:
    told_nodes: dict[NodeId, Told]
    told_workers: dict[WorkerId, Told]
    nodes: list[NodeTold] = field(default_factory=list[NodeTold])
    workers: list[WorkerTold] = field(default_factory=list[WorkerTold])


def _tell(books: Books, facts: ControlFacts, memory: Memory, rules: ControlRules) -> _Tell:
    """Tell everyone whose hold changed, who was told a second ago, or whose report disagrees."""
    now_s = facts.now_s
    node_ids, worker_ids = {*facts.nodes, *books.by_node}, {*facts.workers, *books.by_worker}
    tell = _Tell(
        told_nodes={one: told for one, told in memory.told_nodes.items() if one in node_ids},
        told_workers={one: told for one, told in memory.told_workers.items() if one in worker_ids},
    )

    def due(told: Told | None, essence: tuple[object, ...]) -> bool:
        return told is None or told.essence != essence or now_s - told.at_s >= rules.repeat_s

    upstreams = upstreams_of(books.rows(), facts.nodes)
    for node_id in node_ids:
        fetches = fetches_of(node_id, books, upstreams)
        essence = tuple(one.essence for one in fetches)
        if due(tell.told_nodes.get(node_id), essence):
            tell.told_nodes[node_id] = Told(essence=essence, at_s=now_s)
            tell.nodes.append(NodeTold(node_id=node_id, fetches=fetches))
    for worker_id in worker_ids:
        holds = stages_of(worker_id, books)
        essence = tuple(one.essence for one in holds)
        told, view = tell.told_workers.get(worker_id), facts.workers.get(worker_id)
        disputed = (
            told is not None
            and view is not None
            and view.heard_s - told.at_s > rules.disagrees_again_s
            and disagreement(holds, view) is not None
        )
        if disputed or due(told, essence):
            tell.told_workers[worker_id] = Told(essence=essence, at_s=now_s)
            tell.workers.append(WorkerTold(worker_id=worker_id, holds=holds))
    return tell
