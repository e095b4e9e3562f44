"""Emptying nodes: what leaves when, by example and as safety rules over random worlds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import (
    Copy,
    HeldStage,
    Liveness,
    NodeFacts,
    Tier,
    Transfer,
    WorkerFacts,
)
from pilotlight.policy.drain import DrainRules, copies_to_strike, leaving, plan_drain, staying
from pilotlight.policy.ids import (
    DecisionId,
    Digest,
    Epoch,
    Generation,
    InstanceId,
    NodeId,
    WorkerId,
)
from pilotlight.policy.model import Stage
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.placement import PlacementRules, candidates
from pilotlight.policy.plan import Instance, InstanceState, NodeDrain, Placement, Snapshot
from pilotlight.policy.scaling import ScalingRules, plan_scaling
from pilotlight.policy.testing import NOW_S, demand, held, model, node
from pilotlight.policy.testing import worker as a_worker

S = InstanceState
RULES = DrainRules()
OLD, NEW = NodeId("n0"), NodeId("n1")


def worker(
    index: int, node_id: NodeId, *held_stages: HeldStage, memory_bytes: int = 1000
) -> WorkerFacts:
    return replace(
        a_worker(index, held_stages=held_stages, memory_bytes=memory_bytes), node_id=node_id
    )


def instance(
    name: str = "m",
    on: int = 0,
    node_id: NodeId = OLD,
    state: InstanceState = S.READY,
    *,
    in_flight: int = 0,
    idle_s: float = 100.0,
    since_s: float = 100.0,
    instance_id: str = "i",
) -> Instance:
    placement = Placement(
        worker_id=WorkerId(f"w{on}"), node_id=node_id, stage=Stage(0, 4), device_bytes=100
    )
    return Instance(
        instance_id=InstanceId(instance_id),
        model=model(name).name,
        digest=model(name).digest,
        state=state,
        generation=Generation(1),
        epoch=Epoch(1),
        placements=(placement,),
        decision_id=DecisionId("d"),
        state_since_s=NOW_S - since_s,
        last_used_s=NOW_S - idle_s,
        in_flight=in_flight,
        served=state is S.READY,
    )


def world(
    *instances: Instance, age_s: float = 1.0, room: bool = True, waiting: int = 0, **bounds: float
) -> Snapshot:
    """A node that drains, and another beside it that has room or has none."""
    elsewhere = worker(1, NEW, memory_bytes=1000 if room else 10)
    return Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=(model("m", **bounds),),
        nodes=(node(draining=True), replace(node(), node_id=NEW)),
        workers=(worker(0, OLD, held("m", "i")), elsewhere),
        instances=instances,
        demand=(demand("m", waiting),) if waiting else (),
        drains=(NodeDrain(node_id=OLD, age_s=age_s),),
    )


def outcome(snapshot: Snapshot) -> tuple[str, str]:
    """What becomes of the one instance, and why."""
    plan = plan_drain(snapshot, RULES)
    if plan.drains:
        assert not plan.wanted
        return "drains", plan.drains[0].reason
    return ("wanted" if plan.wanted else "stays"), plan.held[0].reason


def test_nothing_drains_where_nothing_is_asked_for() -> None:
    snapshot = replace(world(instance(in_flight=1)), drains=())
    assert plan_drain(snapshot, RULES) == plan_drain(replace(snapshot, instances=()), RULES)
    assert staying(snapshot) == snapshot


@pytest.mark.parametrize(
    ("snapshot", "expected", "why"),
    [
        (replace(world(instance(in_flight=1)), models=()), "drains", "deleted"),  # 1
        (
            world(instance(in_flight=1), instance(on=1, node_id=NEW, instance_id="j")),
            "drains",
            "serves elsewhere",
        ),  # 2
        (world(instance(in_flight=1), age_s=30.0), "drains", "no replacement served"),  # 3
        (world(instance()), "drains", "nobody needs it"),  # 4
        (world(instance(state=S.LOADING)), "drains", "nobody needs it"),
        (
            world(
                instance(in_flight=1), instance(on=1, node_id=NEW, state=S.LOADING, instance_id="j")
            ),
            "wanted",
            "starts",
        ),  # 5
        (world(instance(in_flight=1)), "wanted", "asked for"),  # 6
        (world(instance(idle_s=5.0)), "wanted", "asked for"),
        (world(instance(), waiting=1), "wanted", "asked for"),
        (world(instance(), min_instances=1), "wanted", "asked for"),
        (world(instance(state=S.LOADING), waiting=1), "wanted", "asked for"),
        (
            world(instance(state=S.LOADING), waiting=1, room=False),
            "stays",
            "no room elsewhere",
        ),  # 7
        (world(instance(idle_s=0.5, since_s=0.5), room=False), "stays", "no room elsewhere"),
        (world(instance(in_flight=1), room=False), "drains", "no room elsewhere"),  # 8
    ],
)
def test_each_rule(snapshot: Snapshot, expected: str, why: str) -> None:
    found, reason = outcome(snapshot)
    assert found == expected
    assert why in reason


def test_a_replacement_fits_within_the_bounds() -> None:
    """An instance that leaves does not count: with at most one instance the replacement is still
    started, and is not drained.
    """
    snapshot = world(instance(in_flight=1), waiting=1, max_instances=1)
    assert [start.model for start in plan_scaling(staying(snapshot), ScalingRules()).starts] == [
        "m"
    ]
    both = world(
        instance(in_flight=1),
        instance(on=1, node_id=NEW, state=S.LOADING, instance_id="j", idle_s=0.0),
        max_instances=1,
    )
    assert plan_scaling(staying(both), ScalingRules()).drains == ()


def test_copies_are_struck_when_nobody_needs_them() -> None:
    def copy(name: str, tier: Tier = Tier.HOST, leases: int = 0) -> Copy:
        return Copy(
            digest=Digest(name), node_id=OLD, tier=tier, parts=(0,), size_bytes=1, leases=leases
        )

    copies = (
        copy("idle"),
        copy("read", leases=1),
        copy("needed"),
        copy("coming"),
        copy("deep", Tier.DISK),
    )
    facts = replace(
        node(copies=copies),
        transfers=(Transfer(digest=Digest("coming"), source="s", done_bytes=0, total_bytes=1),),
    )
    assert copies_to_strike(facts, {Digest("needed")}) == ("idle",)


# safety rules

NODES = st.integers(1, 4)


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    """Nodes with a worker or two, of which some drain; instances anywhere, in any state."""
    count = draw(NODES)
    node_ids = [NodeId(f"n{number}") for number in range(count)]
    draining = draw(st.sets(st.sampled_from(node_ids)))
    names = [f"m{number}" for number in range(draw(st.integers(1, 3)))]
    nodes: list[NodeFacts] = []
    workers: list[WorkerFacts] = []
    instances: list[Instance] = []
    for number, node_id in enumerate(node_ids):
        liveness = draw(
            st.sampled_from([Liveness.ALIVE, Liveness.ALIVE, Liveness.SUSPECT, Liveness.DEAD])
        )
        nodes.append(
            replace(node(draining=node_id in draining, liveness=liveness), node_id=node_id)
        )
        memory = draw(st.sampled_from([10, 150, 1000]))
        stages: list[HeldStage] = []
        for slot in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(names))
            one = instance(
                name,
                number,
                node_id,
                draw(st.sampled_from(list(S))),
                in_flight=draw(st.integers(0, 2)),
                idle_s=draw(st.sampled_from([0.0, 5.0, 100.0])),
                since_s=draw(st.sampled_from([0.0, 5.0, 100.0])),
                instance_id=f"i{number}-{slot}",
            )
            instances.append(one)
            stages.append(held(name, one.instance_id))
        workers.append(worker(number, node_id, *stages, memory_bytes=memory))
    return Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=tuple(
            model(name, min_instances=draw(st.integers(0, 1)))
            for name in names
            if draw(st.booleans())
        ),
        nodes=tuple(nodes),
        workers=tuple(workers),
        instances=tuple(instances),
        demand=tuple(
            demand(name, draw(st.integers(1, 3))) for name in names if draw(st.booleans())
        ),
        drains=tuple(
            NodeDrain(node_id=node_id, age_s=draw(st.sampled_from([0.0, 10.0, 29.0])))
            for node_id in sorted(draining)
        ),
    )


@given(worlds())
def test_nothing_is_ever_placed_on_a_node_that_drains(snapshot: Snapshot) -> None:
    draining = {drain.node_id for drain in snapshot.drains}
    for one in snapshot.models:
        found = candidates(one, one.spec.whole, snapshot, PlacementRules())
        assert not draining & {
            candidate.node.node_id for candidate in (*found.fitting, *found.makeable)
        }
        scheme = choose_scheme(one, snapshot, SchemeRules()).scheme
        assert scheme is None or not draining & {
            placement.node_id for placement in scheme.placements
        }


@given(worlds())
def test_a_drain_ends_whatever_happens_elsewhere(snapshot: Snapshot) -> None:
    """At the latest when it has waited long enough, everything that is left on the node is on its
    way out.
    """
    late = replace(
        snapshot,
        drains=tuple(replace(drain, age_s=RULES.replace_within_s) for drain in snapshot.drains),
    )
    plan = plan_drain(late, RULES)
    assert {drain.instance_id for drain in plan.drains} == {
        one.instance_id for one in leaving(late)
    }
    assert plan.wanted == ()


@given(worlds())
def test_only_what_leaves_is_drained_and_each_is_decided_once(snapshot: Snapshot) -> None:
    plan = plan_drain(snapshot, RULES)
    gone = [one.instance_id for one in leaving(snapshot)]
    drained = [drain.instance_id for drain in plan.drains]
    assert len(drained) == len(set(drained))
    assert set(drained) <= set(gone)
    assert len(plan.drains) + len(plan.held) == len(gone)
    models = [one.model for one in plan.wanted]
    assert len(models) == len(set(models))
    assert set(models) <= {one.name for one in snapshot.models}


@given(worlds())
def test_a_used_instance_stays_until_its_replacement_serves_while_there_is_room(
    snapshot: Snapshot,
) -> None:
    plan = plan_drain(snapshot, RULES)
    drained = {drain.instance_id for drain in plan.drains}
    gone = leaving(snapshot)
    registered = {one.name: one for one in snapshot.models}
    for one in gone:
        used = one.in_flight > 0 and one.model in registered
        serves = any(
            other.model == one.model and other.state is S.READY and other not in gone
            for other in snapshot.instances
        )
        consolidates = any(
            other.model == one.model and other.state is S.CONSOLIDATING and other not in gone
            for other in snapshot.instances
        )
        if used and not serves and not consolidates:
            found = candidates(registered[one.model], Stage(0, 4), snapshot, PlacementRules())
            assert (one.instance_id not in drained) or not (found.fitting or found.makeable)
