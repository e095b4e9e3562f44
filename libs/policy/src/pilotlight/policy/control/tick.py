"""One pass of control: facts and memory in, a plan out.

Pure; the scheduler and the simulator drive it alike.

1. reports: what they show of each instance (``reconcile``), and which group has a lost stage
   brought by another worker (``repairing``)
2. nothing more while the bus is lost, the term is not announced, or too little was heard to command
3. operators: evictions drain
4. nodes that drain are emptied; what is still needed is wanted elsewhere, as if a request waited
   for it (``drain``)
5. how many instances groups are to become (``targets``)
6. models that have too many instances, or too few (``scaling``)
7. which model's turn it is, and which instance makes room (``turns``)
8. where each start goes (``starts``); a refused one is tried elsewhere, then later
9. groups whose stages are ready become whole instances, or shorter pipelines (``growing``)
10. holds: told on change, when a report disagrees, and from time to time (``telling``)

Each step looks at what changed since the last tick, at what falls due by time alone, at models with
demand, and at what the last tick decided. Of models that wait and have no instance it looks at the
first of the line and a few behind them (``line``). Everything else is at rest: the same policies,
asked again, would say nothing new. A tick without an index in its memory, and one that is not told
what changed, look at everything.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pilotlight.policy.cluster import Liveness
from pilotlight.policy.coldstart.policies import StartPolicy
from pilotlight.policy.control.books import Books
from pilotlight.policy.control.choosing import choose_among
from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.focus import Dues, Focus
from pilotlight.policy.control.growing import plan_growth
from pilotlight.policy.control.index import Index
from pilotlight.policy.control.line import looked_at
from pilotlight.policy.control.look import Look, instances_due, models_due
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Plan
from pilotlight.policy.control.reconcile import reconcile, retargeted
from pilotlight.policy.control.repairing import Spares, with_repairs
from pilotlight.policy.control.shortlist import for_start
from pilotlight.policy.control.starts import Tries
from pilotlight.policy.control.telling import telling
from pilotlight.policy.control.turning import turns_of
from pilotlight.policy.drain import DrainPlan, plan_drain, staying
from pilotlight.policy.ids import InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Drain, plan_scaling
from pilotlight.policy.targets import plan_targets

EVICTED = "an operator evicts the model"


def tick(facts: ControlFacts, memory: Memory, rules: ControlRules) -> Plan:
    """Decide everything that is to be decided now.

    Args:
        facts: What is known.
        memory: What the tick before handed on.
        rules: Figures of the decisions.
    """
    everybody = facts.demand
    facts = replace(facts, demand=looked_at(facts, memory, rules))
    left_out = facts.asked
    if len(facts.demand) < len(everybody):
        left_out = left_out.union(one.model for one in everybody)
    look = Look(facts, memory)
    used = look.read(_with_wanted(facts.demand, memory.wanted, rules))
    records = look.records(used)
    changes = reconcile(
        (one for one in records if one.is_row), facts.workers, facts.now_s, rules.reconcile
    )  # 1
    draft = Draft(used, facts, look.index or _anew(memory), rules)
    deaf = facts.term.deaf or not facts.term.announced
    if not deaf and any(one.lost for one in changes):
        spares = Spares(books=used, workers=facts.workers, nodes=facts.nodes, room=draft.free_on)
        changes = with_repairs(changes, spares)
    draft.move(changes, placed=False)
    if deaf or not has_learned(facts, draft.books, rules):  # 2
        plan = Plan(books=used.settled(), memory=replace(memory, index=None), changes=changes)
    else:
        draft.hear(look.workers, look.nodes, look.instances)
        plan = replace(
            _decided(look, draft, memory, left_out), books=used.settled(), changes=changes
        )
    return replace(plan, visited=replace(plan.visited, instances=len(records)))


def _decided(look: Look, draft: Draft, memory: Memory, left_out: frozenset[ModelName]) -> Plan:
    """Steps 3 to 10.

    Args:
        look: What is looked at.
        draft: The world.
        memory: What the tick before handed on.
        left_out: Models with demand that is not looked at, among others.
    """
    facts, rules, used = draft.facts, draft.rules, draft.books
    # Those of starts that this tick decides are booked by the next one, under their own names.
    fetches = draft.fetches
    evicted = {model: _evict(model, draft) for model in facts.evict}  # 3
    emptied = _emptied(draft)  # 4
    wanted = {one.model: one.reason for one in emptied.wanted}
    draft.drain(emptied.drains)
    demand = _with_wanted(facts.demand, wanted, rules)
    waited_for = {one.model for one in demand}
    models = look.models | draft.decided.models | waited_for
    seen = staying(draft.slice(models, demand=demand))
    retargets = (
        plan_targets(seen, rules.scaling, draft.most_targets) if rules.consolidate else ()
    )  # 5
    if retargets:
        draft.move(retargeted(one) for one in retargets)
        seen = staying(draft.slice(models, demand=demand))
    scaled = plan_scaling(seen, rules.scaling, memory.surplus_since_s)  # 6
    surplus_since_s = {
        name: since_s for name, since_s in memory.surplus_since_s.items() if name not in models
    } | dict(scaled.surplus_since_s)
    draft.drain(scaled.drains)
    starts = {start.model: start for start in scaled.starts}
    turns = turns_of(starts, draft, demand, memory)  # 7
    draft.drain(turns.drains)
    tries = Tries(
        facts,
        memory,
        rules,
        lambda model: model in waited_for or model in starts or model in left_out,
        partial(choose_among, draft=draft),
    )
    tries.take(turns.turns, scaled.starts, draft, demand, wanted)  # 8
    changed = (draft.books.records[one] for one in draft.seen(look.instances))
    choice = rules.scheme.choice
    shorter = choice is not None and choice.policy is StartPolicy.PILOTLIGHT
    grown = plan_growth(changed, draft.free_on, shorter=shorter) if rules.consolidate else ()  # 9
    told = telling(draft, memory, look)  # 10
    restless = draft.decided | Focus(
        models=frozenset(
            {
                *starts,
                *(one.model for one in scaled.held),
                *scaled.busy,
                *(one.model for one in seen.instances if len(one.placements) > 1),
            }
        )
    )
    index = replace(
        told.index,
        models_due=told.index.models_due.put(models_due(models, seen, rules, surplus_since_s)),
        instances_due=told.index.instances_due.put(
            instances_due(look.instances, used, facts, rules)
        ),
        asked=frozenset(waited_for),
        drained=frozenset(one.node_id for one in facts.drains),
        restless=restless,
        fetches=fetches,
    )
    return Plan(
        books=draft.books,
        memory=Memory(
            wanted=wanted,
            backing=tries.backing,
            tries=tries.tries,
            surplus_since_s=surplus_since_s,
            told_nodes=told.told_nodes,
            told_workers=told.told_workers,
            repeated_s=told.repeated_s,
            index=index,
        ),
        drain=tuple(draft.drains),
        evicted=evicted,
        start=tuple(tries.orders),
        retarget=retargets,
        grow=grown,
        refuse=tuple(tries.refused),
        tell=told.tell,
        repeat=told.repeat,
        longest_wait_s=turns.longest_wait_s,
        visited=replace(
            told.visited, models=len(models), places=turns.places, candidates=tries.looked_at
        ),
    )


def _anew(memory: Memory) -> Index:
    """Nothing is known but what was told, and when."""
    return Index(
        workers_due=Dues[WorkerId]().put(
            {one: told.at_s for one, told in memory.told_workers.items()}
        ),
        nodes_due=Dues[NodeId]().put({one: told.at_s for one, told in memory.told_nodes.items()}),
    )


def has_learned(facts: ControlFacts, books: Books, rules: ControlRules) -> bool:
    """Whether enough was heard to command: a worker must not be told to drop what its leader has
    merely not heard of.
    """
    term, now_s = facts.term, facts.now_s
    if now_s - term.listening_since_s < rules.learn_s:
        return False
    # A standby has listened all along: what it knows is as new as what a leader knows.
    stood_by = term.started_s - term.listening_since_s >= rules.learn_s
    if now_s - term.started_s >= (rules.learned_s if stood_by else rules.learn_s):
        return True
    placed = (
        facts.workers.get(one.worker_id)
        for record in books.rows()
        for one in record.instance.placements
    )
    if stood_by:
        return all(view is not None and view.facts.liveness is Liveness.ALIVE for view in placed)
    return all(view is not None and view.heard_s >= term.started_s for view in placed)


def _evict(model: ModelName, draft: Draft) -> tuple[InstanceId, ...]:
    """Drain all instances of a model."""
    rows = [
        record
        for key in draft.books.by_model.get(model, ())
        if (record := draft.books.records[key]).is_row
    ]
    ids = tuple(row.instance.instance_id for row in rows)
    draft.drain(Drain(instance_id=instance_id, model=model, reason=EVICTED) for instance_id in ids)
    return ids


def _emptied(draft: Draft) -> DrainPlan:
    """What leaves nodes that drain. Costs what is there."""
    books, models, rules = draft.books, draft.facts.models, draft.rules.drain
    keys = {key for drain in draft.facts.drains for key in books.by_node.get(drain.node_id, ())}
    leaving = {
        one.model
        for key in keys
        if (one := books.records[key].instance).state in STARTING | SERVING
    }
    if not leaving:
        return DrainPlan()
    workers = {
        one
        for name in leaving
        if name in models
        for one in for_start(models[name], draft, rules.placement, count=1)
    }
    return plan_drain(draft.slice(leaving, workers, demand=draft.facts.demand), rules)


def _with_wanted(
    asked: tuple[Demand, ...], wanted: Mapping[ModelName, str], rules: ControlRules
) -> tuple[Demand, ...]:
    waited_for = {one.model for one in asked}
    more = (
        Demand(model=model, waiting=1, oldest_age_s=0.0, deadline_in_s=rules.drain.replace_within_s)
        for model in wanted
        if model not in waited_for
    )
    return (*asked, *more)
