"""Chains: near the best that any order gives, stable, without cycles, and complete."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.ids import NodeId
from pilotlight.policy.multicast import (
    MAX_UPSTREAMS,
    ChainPlan,
    Source,
    Target,
    plan_chains,
)
from pilotlight.policy.testing import members, nodes_named

MODEL_BYTES = 128
"""In units, for plans whose unit is 1."""


def source(name: str, speed: float = 1.0, parts: Sequence[int] = (0,)) -> Source:
    return Source(node_id=NodeId(name), parts=frozenset(parts), bytes_per_s=speed)


def target(
    name: str, speed: float = 1.0, parts: Sequence[int] = (0,), upstreams: str | None = None
) -> Target:
    told = nodes_named(upstreams) if upstreams is not None else None
    return Target(node_id=NodeId(name), parts=frozenset(parts), bytes_per_s=speed, upstreams=told)


def planned(
    sources: Sequence[Source], targets: Sequence[Target], size: int = MODEL_BYTES
) -> ChainPlan:
    """A plan of a model of one part, whose size and unit are as told."""
    return plan_chains((size,), sources, targets, unit_bytes=1)


def told(plan: ChainPlan, targets: Sequence[Target]) -> list[Target]:
    """The targets as the next plan finds them: they have joined."""
    return [replace(one, upstreams=plan.ahead[one.node_id]) for one in targets]


def makespan(plan: ChainPlan) -> float:
    return max(chain.finish_s[-1] if chain.finish_s else 0.0 for chain in plan.chains)


# How long a plan takes, by an implementation of its own: unit after unit, hop after hop.


def replayed_s(speeds: Sequence[float], size: int) -> list[float]:
    """When each member of a chain has everything.

    ``speeds`` begin with the source's; a member forwards whole units, one at a time.
    """
    had_at = [0.0] * size
    finished: list[float] = []
    for before, after in itertools.pairwise(speeds):
        free_at, arrived = 0.0, []
        for at in had_at:
            free_at = max(free_at, at) + 1 / min(before, after)
            arrived.append(free_at)
        had_at = arrived
        finished.append(free_at)
    return finished


def every_plan(sources: int, targets: int) -> Iterator[list[list[int]]]:
    """Every way to put the targets, in every order, on the sources' chains."""
    for order in itertools.permutations(range(targets)):
        for cuts in itertools.combinations_with_replacement(range(targets + 1), sources - 1):
            edges = [0, *cuts, targets]
            yield [list(order[start:stop]) for start, stop in itertools.pairwise(edges)]


def best_makespan(sources: Sequence[Source], targets: Sequence[Target], size: int) -> float:
    def takes(plan: list[list[int]]) -> float:
        chains = zip(sources, plan, strict=True)
        return max(
            replayed_s([first.bytes_per_s, *(targets[index].bytes_per_s for index in chain)], size)[
                -1
            ]
            for first, chain in chains
            if chain
        )

    return min(takes(plan) for plan in every_plan(len(sources), len(targets)))


speeds = st.sampled_from([1.0, 2.0, 4.0, 10.0])


@given(st.lists(speeds, min_size=2, max_size=6), st.integers(1, 20))
def test_predictions_are_what_units_take_hop_by_hop(chain: list[float], size: int) -> None:
    first, *rest = chain
    known: list[Target] = []
    for index, speed in enumerate(rest):
        plan = planned([source("s", first)], [*known, target(f"t{index}", speed)], size)
        known = told(plan, [*known, target(f"t{index}", speed)])
    (one,) = planned([source("s", first)], known, size).chains
    assert one.members == tuple(f"t{index}" for index in range(len(rest)))
    assert one.finish_s == pytest.approx(replayed_s(chain, size))


@settings(deadline=None)
@given(
    st.lists(speeds, min_size=1, max_size=3),
    st.lists(speeds, min_size=1, max_size=4),
    st.sampled_from([1, 2, 8, 64]),
)
def test_no_other_plan_is_done_earlier_by_more_than_a_unit_takes(
    source_speeds: list[float], target_speeds: list[float], size: int
) -> None:
    sources = [source(f"s{index}", speed) for index, speed in enumerate(source_speeds)]
    targets = [target(f"t{index}", speed) for index, speed in enumerate(target_speeds)]
    plan = planned(sources, targets, size)
    speed_of = {str(one.node_id): one.bytes_per_s for one in (*sources, *targets)}
    chains = [
        [speed_of[str(node_id)] for node_id in (chain.source, *chain.members)]
        for chain in plan.chains
    ]
    took_s = max(replayed_s(chain, size)[-1] for chain in chains)
    assert took_s <= best_makespan(sources, targets, size) * (1 + 1 / size) * (1 + 1e-9)


def test_a_chain_takes_little_longer_than_one_transfer() -> None:
    """BlitzScale, Fig. 13 (a): time does not depend on how many there are."""
    one = planned([source("s")], [target("t0")])
    seven = planned([source("s")], [target(f"t{index}") for index in range(7)])
    assert makespan(seven) / makespan(one) == pytest.approx(1 + 6 / MODEL_BYTES)


def test_the_fastest_come_first() -> None:
    """BlitzScale, Fig. 13 (b): behind a slow node all nodes are slow."""
    plan = planned([source("s", 2.0)], [target("slow", 1.0), target("fast", 2.0)])
    assert members(plan) == {"s": ("fast", "slow")}
    assert plan.chains[0].finish_s[0] == MODEL_BYTES / 2


def test_each_source_begins_a_chain_and_they_end_at_about_the_same_time() -> None:
    plan = planned(
        [source("a"), source("b"), source("c")], [target(f"t{index}") for index in range(8)]
    )
    assert members(plan) == {"a": ("t0", "t3", "t6"), "b": ("t1", "t4", "t7"), "c": ("t2", "t5")}
    assert plan.upstreams[NodeId("t6")] == nodes_named("t3 t0 a b")
    ends = [chain.finish_s[-1] for chain in plan.chains]
    assert max(ends) - min(ends) <= 1.0


def test_where_nobody_has_anything_one_fetches_from_the_models_own_source_for_all() -> None:
    plan = planned([], [target(f"t{index}") for index in range(6)])
    assert members(plan) == {None: ("t0", "t1", "t2", "t3", "t4", "t5")}
    assert plan.upstreams[NodeId("t0")] == ()
    assert plan.upstreams[NodeId("t5")] == nodes_named("t4 t3 t2 t1")


def test_parts_that_the_predecessor_has_not_come_from_who_has_them() -> None:
    """Stages of a pipeline lie on different nodes, and a whole copy is to be made of them."""
    sources = [
        source("all", 1.0, (0, 1, 2)),
        source("first", 9.0, (0,)),
        source("last", 8.0, (2,)),
        source("middle", 7.0, (1,)),
    ]
    whole = plan_chains((10, 10, 10), sources[1:], [target("t", 1.0, (0, 1, 2))], unit_bytes=1)
    assert whole.upstreams[NodeId("t")] == nodes_named("first last middle")
    # A node that has everything is worth more than a fast one.
    assert members(
        plan_chains((10, 10, 10), sources, [target("t", 1.0, (0, 1, 2))], unit_bytes=1)
    ) == {"all": ("t",)}
    # Two that want different parts have nothing for one another.
    apart = plan_chains(
        (10, 10, 10), [], [target("t0", 1.0, (0,)), target("t1", 1.0, (1, 2))], unit_bytes=1
    )
    assert [(chain.source, chain.members) for chain in apart.chains] == [
        (None, ("t0",)),
        (None, ("t1",)),
    ]
    # The tail has but one part of two; the source of its chain has the other.
    behind = plan_chains(
        (10, 10),
        [source("s", 1.0, (0, 1))],
        [target("t0", 1.0, (0,), "s"), target("t1", 1.0, (0, 1), "t0 s")],
    )
    assert behind.upstreams[NodeId("t1")] == nodes_named("t0 s")


def test_of_more_than_can_be_named_those_are_that_have_what_is_missing() -> None:
    fast = [source(f"fast{index}", 9.0, (0,)) for index in range(6)]
    sources = [*fast, source("slow", 1.0, (1,)), source("slowest", 0.5, (2,))]
    plan = plan_chains((30, 10, 10), sources, [target("t", 9.0, (0, 1, 2))], unit_bytes=1)
    assert plan.upstreams[NodeId("t")] == nodes_named("fast0 fast1 slow slowest")


def test_two_that_lost_those_before_them_may_meet_at_one_node() -> None:
    plan = planned([source("s")], [target("t0", upstreams="s"), target("t1", upstreams="gone s")])
    assert [(chain.source, chain.members) for chain in plan.chains] == [
        ("s", ("t0",)),
        ("s", ("t1",)),
    ]
    assert plan.upstreams[NodeId("t1")] == ("s",)


def test_a_node_that_has_some_parts_and_joins_for_others_is_not_before_itself() -> None:
    some = source("n", parts=(0,))
    known = [
        target("t0", parts=(0,), upstreams="n"),
        target("n", parts=(1,), upstreams="t0"),
        target("t1", parts=(0, 1)),
    ]
    plan = plan_chains((10, 10), [some], known, unit_bytes=1)
    for upstreams in plan.ahead.values():
        assert len(set(upstreams)) == len(upstreams)
    again = plan_chains(
        (10, 10), [some], [known[0], target("n", parts=(1, 0), upstreams=None)], unit_bytes=1
    )
    assert "n" not in again.ahead[NodeId("n")]


def test_a_dead_member_is_skipped_and_a_finished_one_begins_a_chain() -> None:
    sources, targets = [source("s")], [target(f"t{index}") for index in range(4)]
    plan = planned(sources, targets)
    known = told(plan, targets)
    dead = planned(sources, [one for one in known if one.node_id != "t1"])
    assert members(dead) == {"s": ("t0", "t2", "t3")}
    assert dead.upstreams[NodeId("t2")] == nodes_named("t0 s")
    finished = planned([*sources, source("t1")], [one for one in known if one.node_id != "t1"])
    assert members(finished) == {"s": ("t0",), "t1": ("t2", "t3")}
    assert finished.upstreams[NodeId("t2")] == plan.upstreams[NodeId("t2")]
    late = planned([*sources, source("t1"), source("t3")], [*known[0:1], known[2], target("late")])
    assert members(late) == {"s": ("t0",), "t1": ("t2",), "t3": ("late",)}, (
        "a node that has finished is a source at once"
    )
    orphaned = planned([source("other")], known[3:])
    assert members(orphaned) == {None: ("t3",)}
    assert orphaned.upstreams[NodeId("t3")] == ("other",)


def test_who_comes_back_is_behind_those_that_were_behind_it() -> None:
    """A node that lost its instance and starts another must not wait for one that waits for it."""
    known = [
        target("t0", upstreams="s"),
        target("t1", upstreams="t0 s"),
        target("t2", upstreams="t1 t0 s"),
    ]
    again = planned([source("s")], [known[0], known[2], target("t1")])
    assert members(again) == {"s": ("t0", "t2", "t1")}
    assert again.upstreams[NodeId("t2")] == nodes_named("t0 s")
    assert again.upstreams[NodeId("t1")] == nodes_named("t2 t0 s")


# Whatever happens


def checked(plan: ChainPlan, sources: Sequence[Source], targets: Sequence[Target]) -> None:
    waiting = {one.node_id: one for one in targets}
    offers = {one.node_id: one.parts for one in sources}
    placed = [member for chain in plan.chains for member in chain.members]
    assert sorted(placed) == sorted(waiting), "each target is in one chain, once"
    settled: set[NodeId] = {one.node_id for one in sources} - waiting.keys()
    for one in targets:
        upstreams = plan.upstreams[one.node_id]
        assert len(upstreams) == len(set(upstreams)) <= MAX_UPSTREAMS
        assert one.node_id not in upstreams
        for part in one.parts:
            having = {
                node_id
                for node_id, parts in offers.items()
                if part in parts and node_id not in waiting
            }
            accepting = {each.node_id for each in sources if each.accepting} & having
            offered = {
                node_id
                for node_id in upstreams
                if node_id in having or part in _wanted(waiting, node_id)
            }
            assert offered or not accepting, "a part that some node has is reached"
    # No circle of waiting: all of them can be put in an order in which each asks only those before
    # it.
    left = set(waiting)
    while left:
        ready = {
            node_id
            for node_id in left
            if all(
                one in settled or waiting[node_id].parts <= offers.get(one, frozenset())
                for one in plan.upstreams[node_id]
            )
        }
        assert ready, f"{left} wait for one another"
        settled |= ready
        left -= ready


def _wanted(waiting: dict[NodeId, Target], node_id: NodeId) -> frozenset[int]:
    return waiting[node_id].parts if node_id in waiting else frozenset()


PARTS = st.frozensets(st.integers(0, 2), min_size=1)


@settings(deadline=None)
@given(st.data())
def test_plans_hold_through_joins_ends_and_deaths(data: st.DataObject) -> None:
    part_bytes = (8, 8, 8)
    names = [NodeId(f"n{index}") for index in range(8)]
    sources: dict[NodeId, Source] = {}
    targets: dict[NodeId, Target] = {}
    speed_of = {name: data.draw(speeds) for name in names}
    for name in names[: data.draw(st.integers(0, 3))]:
        sources[name] = Source(node_id=name, parts=data.draw(PARTS), bytes_per_s=speed_of[name])
    for _ in range(data.draw(st.integers(1, 12))):
        before = plan_chains(part_bytes, sources.values(), targets.values(), unit_bytes=1)
        event, name = (
            data.draw(st.sampled_from(["join", "join", "join", "end", "die", "drain"])),
            data.draw(st.sampled_from(names)),
        )
        if event == "join" and name not in targets:
            held = sources[name].parts if name in sources else frozenset[int]()
            if not (wanted := data.draw(PARTS) - held):
                continue
            targets[name] = Target(node_id=name, parts=wanted, bytes_per_s=speed_of[name])
        elif event == "end" and name in targets:
            held = sources[name].parts if name in sources else frozenset[int]()
            sources[name] = Source(
                node_id=name, parts=held | targets.pop(name).parts, bytes_per_s=speed_of[name]
            )
        elif event == "die":
            sources.pop(name, None)
            targets.pop(name, None)
        elif event == "drain" and name in sources:
            sources[name] = replace(sources[name], accepting=False)
        plan = plan_chains(part_bytes, sources.values(), targets.values(), unit_bytes=1)
        checked(plan, list(sources.values()), list(targets.values()))
        if event == "join" and name not in before.ahead and name not in sources:
            without = [
                (chain.source, tuple(one for one in chain.members if one != name))
                for chain in plan.chains
            ]
            assert all((chain.source, chain.members) in without for chain in before.chains)
            assert all(name not in chain.members[:-1] for chain in plan.chains), (
                "a node that joins late is the last of a chain"
            )
        targets = {
            node_id: replace(one, upstreams=plan.ahead[node_id]) for node_id, one in targets.items()
        }
        again = plan_chains(part_bytes, sources.values(), targets.values(), unit_bytes=1)
        assert (again.chains, again.upstreams) == (plan.chains, plan.upstreams), (
            "planned again, it is the same"
        )
        for node_id, upstreams in before.upstreams.items():
            kept = [one for one in upstreams if one in plan.upstreams.get(node_id, ())]
            assert kept == [one for one in plan.upstreams.get(node_id, ()) if one in kept], (
                "and in the same order"
            )
