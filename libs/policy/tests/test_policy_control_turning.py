"""The first turns of a line are those that a plan for all of it names."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.control.books import Record
from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.index import Index
from pilotlight.policy.control.plan import Memory
from pilotlight.policy.control.testing import PART_BYTES, LargeCluster, Size
from pilotlight.policy.control.turning import turns_of
from pilotlight.policy.drain import staying
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.scaling import Start
from pilotlight.policy.turns import TurnPlan, plan_turns

SIZE = Size(nodes=12, workers_per_node=4, models=120, instances=30)
AT_REST = LargeCluster(SIZE)


def drafted(cluster: LargeCluster) -> Draft:
    facts = replace(cluster.facts(None), starts_at_once=2)
    draft = Draft(cluster.books, facts, Index(), cluster.rules)
    draft.hear(set(cluster.workers), set(cluster.nodes), set(cluster.books.records))
    return draft


def starts_of(cluster: LargeCluster) -> dict[ModelName, Start]:
    return {one.model: Start(model=one.model, reason="it waits") for one in cluster.demand}


def by_everything(cluster: LargeCluster, draft: Draft) -> TurnPlan:
    everything = draft.slice(cluster.models, cluster.workers, demand=cluster.demand)
    return plan_turns(staying(everything), starts_of(cluster), cluster.rules.turns)


@given(st.integers(0, 2**32), st.integers(1, 70), st.sampled_from((1, 6, 64)))
@settings(max_examples=60, deadline=None)
def test_turns_are_those_of_a_look_at_everything(seed: int, count: int, line_limit: int) -> None:
    rng, cluster = random.Random(seed), AT_REST.kept()
    cluster.rules = replace(
        cluster.rules, turns=replace(cluster.rules.turns, line_limit=line_limit)
    )
    tight = rng.random()
    for key, view in cluster.workers.items():
        granule_bytes = rng.choice((1, 1, 1 << 20))
        device = replace(view.facts.device, granule_bytes=granule_bytes)
        if rng.random() < tight:
            device = replace(device, memory_bytes=rng.choice((1, 8, 15)) * PART_BYTES)
        cluster.workers[key] = replace(view, facts=replace(view.facts, device=device))
    cluster.ask(0, count=count)
    cluster.demand = tuple(
        replace(one, oldest_age_s=rng.choice((0.1, 2.0, 50.0))) for one in cluster.demand
    )
    draft = drafted(cluster)
    turned = turns_of(starts_of(cluster), draft, cluster.demand, Memory())
    found = TurnPlan(
        turns=tuple(turned.turns), drains=turned.drains, longest_wait_s=turned.longest_wait_s
    )
    assert found == by_everything(cluster, draft)


def test_of_a_line_with_room_for_all_the_first_turns_are_worked_out_alone() -> None:
    cluster = AT_REST.kept()
    cluster.ask(0, count=30)
    draft = drafted(cluster)
    expected = by_everything(cluster, draft)
    turned = turns_of(starts_of(cluster), draft, cluster.demand, Memory())
    asked = iter(turned.turns)
    assert [next(asked) for _ in range(4)] == list(expected.turns[:4])
    assert turned.places <= 5 * len(draft.rooms.shapes)
    compared = turned.places
    # What starts meanwhile is in the draft, not in what the others leave to each other.
    name = expected.turns[0].model
    one = replace(
        cluster.books.records[next(iter(cluster.books.records))].instance,
        instance_id=InstanceId("begun"),
        model=name,
        state=InstanceState.PLANNED,
    )
    draft.put(Record(instance=one, model=cluster.models[name], tentative=True))
    assert list(asked) == list(expected.turns[4:])
    assert turned.places >= compared
