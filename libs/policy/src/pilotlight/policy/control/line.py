"""Which of the models that wait a tick looks at.

A start takes a millisecond or more and a tick begins a few, so thousands may wait. Those that no
tick could serve yet must cost it next to nothing, or each tick is slower than the one before and
begins fewer.
"""

import heapq
from dataclasses import replace

from pilotlight.policy.control.plan import NO_ROOM, Backing, ControlFacts, ControlRules, Memory
from pilotlight.policy.ids import ModelName
from pilotlight.policy.request import Demand

Waiter = tuple[float, ModelName, Demand]
"""In the order of the line."""


def shortened(
    facts: ControlFacts, memory: Memory, rules: ControlRules, aged_s: float = 0.0
) -> ControlFacts:
    """The facts without the demand that a tick leaves alone, but for its names: what is written
    down of a tick need not have thousands of ages.

    Said of them again, it changes nothing.

    Args:
        facts: What is known.
        memory: Who was refused, and when.
        rules: How long the line is.
        aged_s: Since when the demand is as it is told; that of the facts is as of now.
    """
    demand = looked_at(facts, memory, rules, aged_s)
    if len(demand) == len(facts.demand):
        return replace(facts, demand=_aged(demand, aged_s)) if aged_s else facts
    names = {one.model for one in demand}
    return replace(
        facts,
        demand=_aged(demand, aged_s),
        demand_seen_s={
            name: seen_s for name in names if (seen_s := facts.demand_seen_s.get(name)) is not None
        },
        awaited=facts.awaited & names,
        asked=facts.asked.union(one.model for one in facts.demand if one.model not in names),
    )


def _aged(demand: tuple[Demand, ...], by_s: float) -> tuple[Demand, ...]:
    return tuple(one.aged(by_s) for one in demand) if by_s else demand


def looked_at(
    facts: ControlFacts, memory: Memory, rules: ControlRules, aged_s: float = 0.0
) -> tuple[Demand, ...]:
    """The demand that a tick looks at.

    1. of models that have instances, or whose attempt to start is under way: all
    2. of the others the first of the line, as ``turns.plan_turns`` orders them: room is kept for
       these, whether they may be tried now or not
    3. behind them as many as a tick begins, of those that may be tried now: first who was tried,
       or came, longest ago, so that everybody has a try at what those before it cannot use

    Args:
        facts: What is known; its demand is of all models.
        memory: Who was refused, and when.
        rules: How long the line is.
        aged_s: How much older demand is than it says.
    """
    if len(facts.demand) <= rules.turns.line_limit:
        return facts.demand
    found, fresh, refused = _sorted_out(facts, memory, rules, aged_s)  # 1
    room = (one for one in refused if memory.backing[one[1]].code == NO_ROOM)
    line = heapq.nsmallest(rules.turns.line_limit, (*fresh, *room))  # 2
    ahead = {name for _, name, _ in line}
    now_s, most = facts.now_s - aged_s, facts.most_starts(rules)
    # No more of these than are ahead come before those that are looked for.
    oldest = heapq.nsmallest(
        most + len(ahead), [(now_s - one[2].oldest_age_s, one) for one in fresh]
    )
    behind = [(since_s, one) for since_s, one in oldest if one[1] not in ahead] + [
        (backing.at_s, one)
        for one in refused
        if one[1] not in ahead and may_try(backing := memory.backing[one[1]], facts, rules)
    ]
    others = heapq.nsmallest(most, behind)  # 3
    return (*found, *(one for _, _, one in line), *(one for _, (_, _, one) in others))


def _sorted_out(
    facts: ControlFacts, memory: Memory, rules: ControlRules, aged_s: float
) -> tuple[list[Demand], list[Waiter], list[Waiter]]:
    """The demand that is looked at in any case; of what else waits, who was not refused yet, and
    who was.
    """
    models, backing, patience_s = facts.models, memory.backing, rules.turns.patience_s
    known = facts.books.by_model.among(one.model for one in facts.demand)
    known |= memory.tries.keys() | {one.model for one in facts.refusals}
    found, fresh, refused = list[Demand](), list[Waiter](), list[Waiter]()
    patience: dict[float, float] = {}
    for one in facts.demand:
        name = one.model
        if name in known:
            found.append(one)
        elif name in models and one.waiting > 0:
            model = models[name]
            slo_ms = model.slo.ttft_ms
            if slo_ms not in patience:  # Of thousands of models, few promise different times.
                patience[slo_ms] = max(patience_s(model), 1e-9)
            waits = -(one.oldest_age_s + aged_s) / patience[slo_ms], name, one
            (refused if name in backing else fresh).append(waits)
    return found, fresh, refused


def may_try(waits: Backing | None, facts: ControlFacts, rules: ControlRules) -> bool:
    """Whether a model that was refused, or was not, may be tried now: its pause is over, or what
    could take it has changed.
    """
    if waits is None or facts.now_s >= waits.retry_at_s:
        return True
    return (
        waits.world_version != facts.world_version
        and facts.now_s - waits.at_s >= rules.retry_at_once_s
    )
