"""Which of the models that wait a tick looks at.

A start takes a millisecond or more and a tick begins a few, so thousands may wait. Those that no
tick could serve yet must cost it next to nothing, or each tick is slower than the one before and
begins fewer.
"""

import heapq
import math
from dataclasses import replace
from itertools import islice

from pilotlight.policy.control.plan import NO_ROOM, Backing, ControlFacts, ControlRules, Memory
from pilotlight.policy.control.waiters import Waiters
from pilotlight.policy.request import Demand


def shortened(
    facts: ControlFacts,
    memory: Memory,
    rules: ControlRules,
    aged_s: float = 0.0,
    waiters: Waiters | None = None,
) -> ControlFacts:
    """The facts without the demand that a tick leaves alone, but for its names: what is written
    down of a tick need not have thousands of ages.

    Said of them again, it changes nothing.

    Args:
        facts: What is known.
        memory: Who was refused, and when.
        rules: How long the line is.
        aged_s: Since when the demand is as it is told; that of the facts is as of now.
        waiters: The demand of the facts, sorted; None: nobody has.
    """
    demand = looked_at(facts, memory, rules, aged_s, waiters)
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
        asked=facts.asked
        | (waiters.names if waiters else {one.model for one in facts.demand}) - names,
    )


def _aged(demand: tuple[Demand, ...], by_s: float) -> tuple[Demand, ...]:
    return tuple(one.aged(by_s) for one in demand) if by_s else demand


def looked_at(
    facts: ControlFacts,
    memory: Memory,
    rules: ControlRules,
    aged_s: float = 0.0,
    waiters: Waiters | None = None,
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
        waiters: The demand of the facts, sorted; None: nobody has.
    """
    if len(facts.demand) <= rules.turns.line_limit:
        return facts.demand
    if waiters is None:
        waiters = Waiters(facts.demand, facts.models, rules.turns)
    known = facts.books.by_model.among(waiters.names)  # 1
    known |= waiters.names & (memory.tries.keys() | {one.model for one in facts.refusals})
    backing, now_s, most = memory.backing, facts.now_s - aged_s, facts.most_starts(rules)
    cold = (one for one in waiters.line(aged_s) if one[1] not in known)
    line = list(
        islice(
            (one for one in cold if one[1] not in backing or backing[one[1]].code == NO_ROOM),
            rules.turns.line_limit,
        )
    )  # 2
    ahead = {*known, *(name for _, name, _ in line)}
    fresh = (
        one
        for one in waiters.oldest(now_s, aged_s)
        if one[1][1] not in ahead and one[1][1] not in backing
    )
    refused = (
        (one.at_s, waiters.waiter(name, rules.turns, aged_s))
        for name, one in backing.items()
        if name not in ahead and waiters.waits_for(name) and may_try(one, facts, rules)
    )
    others = heapq.nsmallest(most, (*islice(fresh, most), *refused))  # 3
    found = (one for one in facts.demand if one.model in known) if known else ()
    return (*found, *(one for _, _, one in line), *(one for _, (_, _, one) in others))


def may_try(waits: Backing | None, facts: ControlFacts, rules: ControlRules) -> bool:
    """Whether a model that was refused, or was not, may be tried now: its pause is over, or what
    could take it has changed.
    """
    if waits is None or facts.now_s >= waits.retry_at_s:
        return True
    # As ``next_try_s`` adds it up: it would say the present moment again and again.
    return (
        waits.world_version != facts.world_version
        and facts.now_s >= waits.at_s + rules.retry_at_once_s
    )


def next_try_s(facts: ControlFacts, memory: Memory, rules: ControlRules) -> float:
    """When a tick is worth it by time alone: the first moment at which one of the models that are
    looked at may be tried because what could take it has changed, and was refused too shortly
    before. Infinite: there is none. The ends of other pauses are found in passing.

    Args:
        facts: What the last tick knew, with the demand that it looked at.
        memory: What it handed on.
        rules: How soon a change is answered.
    """
    refused = (memory.backing.get(one.model) for one in facts.demand)
    return min(
        (
            one.at_s + rules.retry_at_once_s
            for one in refused
            if one is not None
            and one.world_version != facts.world_version
            and not may_try(one, facts, rules)
        ),
        default=math.inf,
    )
