"""Of thousands of models that wait a tick looks at a few, and no one of them waits in vain."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_control import said

from pilotlight.policy.control.focus import NOTHING
from pilotlight.policy.control.line import looked_at, may_try, next_try_s, shortened
from pilotlight.policy.control.plan import NO_ROOM, Backing, ControlFacts, ControlRules, Memory
from pilotlight.policy.control.testing import LargeCluster, Size
from pilotlight.policy.control.tick import tick
from pilotlight.policy.control.waiters import Waiters
from pilotlight.policy.ids import ModelName
from pilotlight.policy.turns import TurnRules

SMALL = Size(nodes=10, workers_per_node=2, models=300, instances=10)
OTHER = "no_worker"


def refused(at_s: float, retry_at_s: float, code: str = NO_ROOM, version: int = 0) -> Backing:
    return Backing(attempts=1, at_s=at_s, retry_at_s=retry_at_s, world_version=version, code=code)


def by_hand(facts: ControlFacts, memory: Memory, rules: ControlRules) -> set[ModelName]:
    """What the docstring of ``looked_at`` says, by sorting everybody."""
    limit = rules.turns.line_limit
    names = {one.model for one in facts.demand}
    if len(names) <= limit:
        return names
    warm = {name for name in names if name in facts.books.by_model}
    ages_s = {one.model: one.oldest_age_s for one in facts.demand}
    cold = sorted(
        names - warm,
        key=lambda name: (-ages_s[name] / rules.turns.patience_s(facts.models[name]), name),
    )
    backing = memory.backing
    line = [name for name in cold if name not in backing or backing[name].code == NO_ROOM][:limit]
    behind = [
        name for name in cold if name not in line and may_try(backing.get(name), facts, rules)
    ]
    behind.sort(
        key=lambda name: backing[name].at_s if name in backing else facts.now_s - ages_s[name]
    )
    return {*warm, *line, *behind[: rules.starts_at_once]}


@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_it_is_the_first_of_the_line_and_who_was_tried_longest_ago(
    random: Random, line_limit: int, starts_at_once: int
) -> None:
    cluster = CLUSTER.kept()
    cluster.ask(0, count=random.randint(0, 40))
    warm = [
        replace(one, model=name)
        for one, name in zip(cluster.demand[:3], cluster.models, strict=False)
    ]
    cluster.demand = (
        *(replace(one, oldest_age_s=random.choice([0.1, 1.0, 5.0])) for one in cluster.demand),
        *warm,
    )
    now_s = cluster.now_s
    memory = Memory(
        backing={
            one.model: refused(
                at_s=now_s - random.choice([0.05, 0.2, 3.0]),
                retry_at_s=now_s + random.choice([-0.1, 0.5]),
                code=random.choice([NO_ROOM, OTHER]),
                version=cluster.version - random.choice([0, 1]),
            )
            for one in cluster.demand
            if random.random() < 0.6
        }
    )
    rules = replace(
        cluster.rules, turns=TurnRules(line_limit=line_limit), starts_at_once=starts_at_once
    )
    facts = cluster.facts(NOTHING)
    found = looked_at(facts, memory, rules)
    assert {one.model for one in found} == by_hand(facts, memory, rules)
    assert len({one.model for one in found}) == len(found)
    short = shortened(facts, memory, rules)
    assert looked_at(short, memory, rules) == found
    assert short is facts or short.demand == found
    assert {*short.asked, *(one.model for one in short.demand)} == {
        one.model for one in facts.demand
    }
    assert shortened(short, memory, rules) == short


def test_a_tick_of_shortened_facts_says_the_same() -> None:
    cluster = CLUSTER.kept()
    cluster.rules = replace(
        cluster.rules, turns=TurnRules(line_limit=8), starts_at_once=2, retry_first_s=0.01
    )
    cluster.crowd()
    cluster.ask(0, count=40, age_s=1.0)
    refusals = 0
    for _ in range(6):
        facts = replace(cluster.facts(NOTHING), demand_seen_s={ModelName("m00010"): 1.0})
        short = shortened(facts, cluster.memory, cluster.rules)
        assert len(short.demand) < len(facts.demand)
        plan, again = (tick(one, cluster.memory, cluster.rules) for one in (facts, short))
        assert said(plan) == said(again)
        refusals += len(plan.refuse)
        cluster.carry_out(plan)
    assert refusals > 8, "who was refused is remembered, whether it is looked at or not"


CLUSTER = LargeCluster(SMALL)


def test_everybody_starts_in_the_end_with_room() -> None:
    cluster = CLUSTER.kept()
    cluster.ask(0, count=200)
    waiting, started = {one.model for one in cluster.demand}, set[ModelName]()
    for _ in range(200):
        plan = cluster.tick()
        assert said(plan) == said(cluster.tick(None)), "as a look at everything says"
        assert plan.visited.models <= 64 + 3 * 8
        assert len({one.model.name for one in plan.start} & started) == 0
        started |= {one.model.name for one in plan.start}
        cluster.carry_out(plan)
        cluster.demand = tuple(one for one in cluster.demand if one.model not in started)
        if started == waiting:
            return
    pytest.fail(f"{len(waiting - started)} models were never started")


def test_everybody_is_tried_in_turn_without_room() -> None:
    """Those behind a line that nothing fits for are tried, and keep their pauses meanwhile."""
    cluster = CLUSTER.kept()
    cluster.crowd(load_s=1000.0)
    cluster.ask(0, count=200, age_s=100.0)
    waiting, tried = {one.model for one in cluster.demand}, set[ModelName]()
    for _ in range(40):
        cluster.version += 1
        plan = cluster.tick()
        assert said(plan) == said(cluster.tick(None)), "as a look at everything says"
        assert len(plan.refuse) <= 64 + 8
        tried |= {one.model for one in plan.refuse}
        cluster.carry_out(plan)
        assert tried == plan.memory.backing.keys()
    assert tried == waiting


@given(st.randoms(use_true_random=False), st.floats(0.0, 5.0))
@settings(max_examples=30, deadline=None)
def test_who_was_sorted_a_while_ago_is_in_the_same_order(random: Random, aged_s: float) -> None:
    """Of models that promise different times the one overtakes the other as both wait."""
    cluster = CLUSTER.kept()
    cluster.ask(0, count=60)
    for one in cluster.demand:
        slo = replace(cluster.models[one.model].slo, ttft_ms=random.choice([500, 2000, 8000]))
        cluster.models[one.model] = replace(cluster.models[one.model], slo=slo)
    rules = replace(cluster.rules, turns=TurnRules(line_limit=8), starts_at_once=3)
    # Ages that differ by less than what floats tell apart later would be of no order then.
    ages_s = (random.randrange(9000) / 1000 for _ in cluster.demand)
    told = tuple(
        replace(one, oldest_age_s=age_s) for one, age_s in zip(cluster.demand, ages_s, strict=True)
    )
    cluster.demand = told
    then = cluster.facts(NOTHING)
    waiters = Waiters(told, then.models, rules.turns)
    assert waiters.are_of(told, then.models)
    assert not waiters.are_of(told[1:], then.models)
    short = shortened(then, Memory(), rules, aged_s, waiters)
    now = replace(then, demand=tuple(one.aged(aged_s) for one in told))
    assert [one.model for one in short.demand] == [
        one.model for one in looked_at(now, Memory(), rules)
    ]
    assert {*short.asked, *(one.model for one in short.demand)} == waiters.names


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_change_behind_a_refusal_is_answered_as_soon_as_it_may_be(random: Random) -> None:
    cluster = CLUSTER.kept()
    cluster.ask(0, count=5)
    cluster.version = 1
    rules, now_s = cluster.rules, cluster.now_s
    once_s = rules.retry_at_once_s
    memory = Memory(
        backing={
            one.model: refused(
                at_s=(at_s := now_s - random.choice([0.0, random.random(), 2.0]) * once_s),
                retry_at_s=at_s + random.choice([0.5, 8.0]) * once_s,
                version=random.randint(0, 1),
            )
            for one in cluster.demand
            if random.random() < 0.7
        }
    )
    facts = cluster.facts(None)

    def tried(at_s: float) -> set[ModelName]:
        """Those that a change lets be tried by then."""
        then = replace(facts, now_s=at_s)
        return {
            name
            for name, one in memory.backing.items()
            if one.world_version != 1 and may_try(one, then, rules)
        }

    next_s = next_try_s(facts, memory, rules)
    if next_s == math.inf:
        assert tried(now_s) == tried(now_s + 1.01 * once_s)
    else:
        assert now_s < next_s <= now_s + 1.001 * once_s
        assert tried(next_s) > tried(now_s)
