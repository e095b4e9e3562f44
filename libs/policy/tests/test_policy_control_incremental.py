"""Control looks at what changed, and says what a look at everything says."""

import math
from dataclasses import replace

import pytest
from cluster_story import START_S, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_story import LoadedCluster
from plain_control import NO_FETCHES, Said, plain_tick, said

from pilotlight.policy.arrivals import ArrivalCount, ArrivalWindows, CounterLife
from pilotlight.policy.coldstart.chosen import ChoiceRules
from pilotlight.policy.coldstart.servers import StartRules
from pilotlight.policy.control.focus import Focus, Visited
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Plan
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.control.starts import AHEAD
from pilotlight.policy.control.testing import COPIES, TICK_S, LargeCluster, Size
from pilotlight.policy.control.tick import tick
from pilotlight.policy.ids import GatewayId
from pilotlight.policy.parallelism import CONSIDERED
from pilotlight.policy.scaling import ScalingRules
from pilotlight.policy.testing import NOW_S, demand
from pilotlight.policy.turns import TurnRules

RULES = ControlRules(
    scaling=ScalingRules(instance_requests=4, forecast=True),
    reconcile=ReconcileRules(term_started_s=START_S - 400, hold_deadline_s=3.0),
    turns=TurnRules(line_limit=3),
    repeat_limit=2,
    explained_workers=0,
)
ONE_STAGE = StartRules(max_stages=1)
"""What the scheduler asks for unless groups are wanted."""


def chosen(plan: Plan) -> Said:
    """What a plan says, but for what its choices were compared with: of all workers, or a few."""
    told = said(plan)
    return replace(told, start=tuple((*one[:3], *one[4:6], *one[7:]) for one in told.start))


def indexed(plan: Plan) -> tuple[object, ...]:
    """The index of a plan, as far as it follows from the facts alone."""
    index = plan.memory.index
    if index is None:
        return ()
    rooms = index.rooms
    tables = (rooms.slots, index.copies.there, index.homes.there, index.holding.there)
    return (
        *map(dict, tables),
        rooms.shapes,
        rooms.sizes,
        rooms.busy,
        rooms.leaving,
        dict(index.chains),
    )


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 64]))
@settings(max_examples=25, deadline=None)
def test_a_tick_says_what_a_look_at_everything_says(seed: int, line_limit: int) -> None:
    cluster, rules = Cluster.of(seed), replace(RULES, turns=TurnRules(line_limit=line_limit))
    memory = plain = Memory()
    for _ in range(30):
        cluster.happen()
        facts = cluster.facts()
        plan, expected = tick(facts, memory, rules), plain_tick(facts, plain, rules)
        assert said(plan) == said(expected)
        assert indexed(plan) == indexed(tick(replace(facts, changed=None), memory, rules)), (
            "mended, and made anew"
        )
        memory, plain = plan.memory, expected.memory
        cluster.carry_out(plan)


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_it_says_the_same_under_the_policy_that_the_scheduler_asks(seed: int) -> None:
    """A choice among a shortlist is that among all workers, by the same books of fetches."""
    cluster = Cluster.of(seed)
    rules = replace(RULES, scheme=replace(RULES.scheme, choice=ChoiceRules(start=ONE_STAGE)))
    memory = plain = Memory()
    for _ in range(30):
        cluster.happen()
        facts = cluster.facts()
        plan = tick(facts, memory, rules)
        index = plan.memory.index
        fetches = index.fetches if index is not None else NO_FETCHES
        expected = plain_tick(facts, plain, rules, fetches)
        assert chosen(plan) == chosen(expected)
        memory, plain = plan.memory, expected.memory
        cluster.carry_out(plan)


@pytest.mark.slow
def test_it_says_the_same_while_instances_come_and_go_by_load() -> None:
    ahead = surplus = 0
    for seed in range(20):
        cluster = LoadedCluster.of(seed)
        memory = plain = Memory()
        for _ in range(40):
            cluster.happen()
            facts = cluster.facts()
            plan, expected = tick(facts, memory, RULES), plain_tick(facts, plain, RULES)
            assert said(plan) == said(expected)
            memory, plain = plan.memory, expected.memory
            cluster.carry_out(plan)
            ahead += sum(one.ahead for one in plan.start)
            surplus += len(memory.surplus_since_s)
    assert ahead > 0
    assert surplus > 0


@pytest.mark.slow
@pytest.mark.parametrize("line_limit", [3, 64])
def test_it_says_the_same_while_many_models_wait_in_vain(line_limit: int) -> None:
    rules = replace(RULES, turns=TurnRules(line_limit=line_limit))
    refused = again = made_way = 0
    for seed in range(12):
        cluster = Cluster.of(seed)
        memory = plain = Memory()
        for at in range(30):
            if at % 10 == 0:
                cluster.press("abcdefghijklmnop")
            cluster.happen()
            facts = cluster.facts()
            plan, expected = tick(facts, memory, rules), plain_tick(facts, plain, rules)
            assert said(plan) == said(expected), f"seed {seed}, tick {at}"
            memory, plain = plan.memory, expected.memory
            cluster.carry_out(plan)
            refused += len(plan.refuse)
            again += sum(not one.record for one in plan.refuse)
            made_way += sum(one.makes_way_for is not None for one in plan.drain)
    assert again >= 200, "the same models are refused again and again"
    assert made_way > 0
    assert refused > again


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_a_log_of_facts_replays(seed: int) -> None:
    cluster, memory = Cluster.of(seed), Memory()
    log = list[tuple[ControlFacts, Memory, Said]]()
    for _ in range(20):
        cluster.happen()
        facts = cluster.facts()
        plan = tick(facts, memory, RULES)
        log.append((facts, memory, said(plan)))
        memory = plan.memory
        cluster.carry_out(plan)
    for facts, kept, expected in log:
        assert said(tick(facts, kept, RULES)) == expected, (
            "no memory was written to by a later tick"
        )


# What a tick looks at. Counts, not times: they are the same on any machine.

SMALL = Size(nodes=20, workers_per_node=4, models=200, instances=40)
LARGE = Size(nodes=80, workers_per_node=8, models=1600, instances=320)


def quiet(size: Size) -> LargeCluster:
    cluster = LargeCluster(size, rules=replace(LargeCluster(SMALL).rules, repeat_s=1e6))
    plan = cluster.tick()
    cluster.carry_out(plan)
    return cluster


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_with_nothing_new_nothing_is_looked_at(size: Size) -> None:
    assert quiet(size).tick().visited == Visited()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_one_change_looks_at_what_it_touches(size: Size) -> None:
    cluster = quiet(size)
    reported = cluster.tick(cluster.report(7))
    assert reported.visited == Visited(models=1, instances=1, workers=1, nodes=1)
    cluster.carry_out(reported)
    moved = cluster.tick(cluster.move(9))
    assert moved.visited == Visited(models=1, instances=1, workers=1, nodes=1)
    cluster.carry_out(moved)
    asked = cluster.tick(cluster.ask(3))
    assert len(asked.start) == 1
    assert asked.visited.models == 1
    assert asked.visited.instances == 0
    of_copies = COPIES * size.workers_per_node
    assert asked.visited.candidates <= of_copies + 2 * CONSIDERED, (
        "workers with copies, and the first of the one shape there is"
    )


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_other_single_changes_look_at_what_they_touch(size: Size) -> None:
    at_rest = quiet(size)
    cluster = at_rest.kept()
    worker_id = cluster.load(3)
    cluster.carry_out(cluster.tick(Focus(workers=frozenset({worker_id}))))
    assert cluster.tick(cluster.loaded(worker_id)).visited == Visited(
        models=1, instances=1, workers=1, nodes=1
    )
    cluster = at_rest.kept()
    assert cluster.tick(cluster.die(5)).visited == Visited(
        models=1, instances=1, workers=1, nodes=1
    )
    cluster = at_rest.kept()
    assert cluster.tick(cluster.register(0)).visited == Visited(models=1)
    cluster = at_rest.kept()
    visited = cluster.tick(cluster.drain(5)).visited
    # The node's instances and their models, and where these find room instead.
    there = size.instances // size.nodes
    assert (visited.models, visited.nodes) == (there, 1 + there)
    assert visited.places <= 2 * (there + 2) + size.workers_per_node
    assert visited.candidates <= there * (COPIES * size.workers_per_node + 2 * CONSIDERED)


def test_a_report_of_many_stages_looks_at_those_that_are_told_otherwise() -> None:
    cluster = quiet(Size(nodes=1, workers_per_node=1, models=40, instances=20))
    reported = cluster.tick(cluster.report(7))
    assert reported.visited.instances == 10, "it, and those whose requests go on"
    cluster.carry_out(reported)
    cluster.carry_out(cluster.tick())
    assert cluster.tick(cluster.die(7)).visited.instances == 20


def crowded(size: Size, waiting: int, load_s: float) -> LargeCluster:
    """For some models requests have waited for long, and in vain. ``load_s``: as for ``crowd``."""
    cluster = quiet(size)
    cluster.crowd(load_s=load_s)
    cluster.ask(0, count=waiting, age_s=100.0)
    return cluster


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("waiting", [1, 100])
def test_models_that_wait_in_vain_cost_no_look_at_busy_workers(size: Size, waiting: int) -> None:
    cluster = crowded(size, waiting, load_s=1000.0)
    line_limit, more = cluster.rules.turns.line_limit, cluster.rules.starts_at_once
    looked_at = min(waiting, line_limit + more)
    plan = cluster.tick()
    assert len(plan.refuse) == looked_at
    cluster.carry_out(plan)
    for _ in range(4):
        plan = cluster.tick()
        # Those that were tried last are looked at once more: to forget that they asked.
        assert plan.visited.models <= looked_at + more
        assert plan.visited.places == 0, "nothing could make room, whatever was compared"
        cluster.carry_out(plan)
    plan = cluster.tick(cluster.report(6))
    assert len(plan.refuse) == looked_at, "the first of the line are tried again, and some others"
    assert plan.visited.models <= looked_at + more + 1
    assert plan.visited.places <= 4, "the roomiest: the one that reported, and its like"
    assert plan.visited.candidates <= waiting


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_few_workers_are_compared_for_who_makes_way(size: Size) -> None:
    cluster = crowded(size, 1, load_s=0.0)
    plan = cluster.tick()
    assert len(plan.drain) == 1
    assert plan.visited.places <= 4
    assert plan.visited.models == 1


def test_holds_are_repeated_a_few_at_a_time_until_all_were() -> None:
    cluster = quiet(SMALL)
    rules = replace(cluster.rules, repeat_s=1.0, repeat_limit=7, repeat_every_s=0.01)
    cluster.rules = rules
    repeated: list[str] = []
    cluster.now_s += 1.0
    for _ in range(-(-len(cluster.workers) // 7)):
        plan = cluster.tick()
        assert len(plan.repeat.workers) <= 7
        assert plan.visited.models == plan.visited.instances == 0
        repeated += [one.worker_id for one in plan.repeat.workers]
        cluster.memory, cluster.books = plan.memory, plan.books
        assert not cluster.tick().repeat.workers, "not with every tick, however many there are"
        cluster.now_s += rules.repeat_every_s
    assert sorted(repeated) == sorted(cluster.workers)


def test_ticks_that_follow_each_other_share_what_is_repeated() -> None:
    rules = replace(RULES, repeat_limit=32, repeat_every_s=0.2)
    assert rules.repeated(math.inf) == rules.repeated(0.25) == rules.repeated(0.2) == 32
    assert rules.repeated(0.1) == 16
    assert rules.repeated(0.003) == 0
    cluster = quiet(SMALL)
    cluster.rules = replace(rules, repeat_s=0.0)
    cluster.carry_out(cluster.tick())
    cluster.now_s += 0.05 - TICK_S
    plan = cluster.tick()
    assert len(plan.repeat.workers) == 8
    cluster.memory, cluster.books = plan.memory, plan.books
    cluster.now_s += 0.001
    assert cluster.tick().memory.repeated_s == plan.memory.repeated_s, "its share grows"


def test_what_falls_due_by_time_alone_is_looked_at_then() -> None:
    cluster = quiet(SMALL)
    cluster.models = {
        name: replace(one, scaling=replace(one.scaling, keep_alive_s=60.0))
        for name, one in cluster.models.items()
    }
    cluster.carry_out(cluster.tick(None))
    cluster.now_s = NOW_S + 59.0
    assert cluster.tick().visited == Visited()
    cluster.now_s = NOW_S + 60.0
    plan = cluster.tick()
    idle = [one for one in cluster.books.records.values() if one.instance.in_flight == 0]
    assert {drain.instance_id for drain in plan.drain} == {one.instance.instance_id for one in idle}
    assert plan.visited.models == len(idle)


def test_a_busy_model_gets_its_next_instance_by_arrivals_alone() -> None:
    """Nothing of the cluster changes when requests come faster: its models are looked at anyway."""
    cluster = quiet(SMALL)
    cluster.rules = replace(cluster.rules, scaling=ScalingRules(instance_requests=1, forecast=True))
    name = next(
        one.instance.model for one in cluster.books.records.values() if one.instance.in_flight
    )
    known = cluster.models[name]
    cluster.models = {
        **cluster.models,
        name: replace(known, scaling=replace(known.scaling, max_instances=2)),
    }
    cluster.carry_out(cluster.tick(None))
    windows = ArrivalWindows(NOW_S - 200)
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
    windows.hear(life, [ArrivalCount(model=name, total=100, idle_s=0.0)], NOW_S, NOW_S)
    told = replace(cluster.facts(Focus()), arrivals=windows.recent())
    plan = tick(told, cluster.memory, cluster.rules)
    assert [(one.model.name, one.ahead) for one in plan.start] == [(name, True)]
    assert not plan.start[0].choice.needs_eviction
    assert not cluster.tick().start, "nobody asks for it"


def test_a_start_ahead_that_finds_no_free_room_is_no_refusal() -> None:
    """It waits, and requests that come meanwhile do not wait for that."""
    cluster = LargeCluster(SMALL)
    cluster.rules = replace(cluster.rules, scaling=ScalingRules(instance_requests=1, forecast=True))
    cluster.crowd()
    record = next(one for one in cluster.books.records.values() if one.instance.in_flight)
    name = record.instance.model
    for other in cluster.models:
        bounds = replace(cluster.models[other].scaling, max_instances=2 if other == name else 1)
        cluster.models[other] = replace(cluster.models[other], scaling=bounds)
    windows = ArrivalWindows(NOW_S - 200)
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
    windows.hear(life, [ArrivalCount(model=name, total=100, idle_s=0.0)], cluster.now_s, NOW_S)
    told = replace(cluster.facts(None), arrivals=windows.recent())
    plan = tick(told, cluster.memory, cluster.rules)
    assert not plan.start
    assert not plan.refuse
    waits = plan.memory.backing[name]
    assert (waits.code, waits.attempts) == (AHEAD, 1)
    soon = replace(told, now_s=told.now_s + 0.01)
    assert tick(soon, plan.memory, cluster.rules).memory.backing[name] == waits, "not at once"
    asked = replace(soon, demand=(demand(name, waiting=20),), awaited=frozenset({name}))
    assert [one.model for one in tick(asked, plan.memory, cluster.rules).refuse] == [name]
