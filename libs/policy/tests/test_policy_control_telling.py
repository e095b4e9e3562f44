"""Chains are planned when they change, and nodes ask those that a plan from scratch would name."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_control import plain_tick, said

from pilotlight.policy.cluster import Liveness, NodeFacts
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.holds import Essence, essences_of, fetches_of
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Term, Told
from pilotlight.policy.control.reconcile import Change, ReconcileRules, moved
from pilotlight.policy.control.testing import LargeCluster, Size
from pilotlight.policy.control.tick import tick
from pilotlight.policy.ids import Epoch, NodeId, WorkerId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.model import Stage
from pilotlight.policy.multicast import chains_of
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.policy.testing import NOW_S, copy, instance, model, node

RULES = ControlRules(
    reconcile=ReconcileRules(term_started_s=NOW_S, hold_deadline_s=1e6), repeat_s=1e6
)
TERM = Term(
    epoch=Epoch(1), started_s=NOW_S - 10, listening_since_s=NOW_S - 20, deaf=False, announced=True
)
MODEL = replace(model(), scaling=replace(model().scaling, max_instances=9, min_instances=9))
WHOLE = tuple(range(len(MODEL.spec.part_bytes)))


def node_with(name: str, parts: tuple[int, ...] = (), **more: object) -> NodeFacts:
    copies = (replace(copy(), node_id=NodeId(name), parts=parts),) if parts else ()
    return replace(node(copies=copies), node_id=NodeId(name), dataplane_port=1, **more)


def facts_of(nodes: dict[NodeId, NodeFacts], books: Books, *changed: NodeId) -> ControlFacts:
    return ControlFacts(
        now_s=NOW_S,
        term=TERM,
        books=books,
        workers={},
        nodes=dict(nodes),
        models={MODEL.name: MODEL},
        changed=Focus(nodes=frozenset(changed)),
    )


def started(
    nodes: dict[NodeId, NodeFacts], names: list[NodeId], rng: random.Random | None = None
) -> Books:
    """Instances that fetch on each of some nodes, one after the other, in the chains of their
    model.
    """
    books = Books()
    for at, name in enumerate(names):
        one = instance(instance_id=f"i{at}", state=InstanceState.FETCHING, worker_id=f"w-{name}")
        place = replace(one.placements[0], node_id=name)
        instances = [record.instance for record in books.records.values()]
        ahead = chains_of(MODEL, nodes.values(), instances, (place,)).ahead.get(name, ())
        if rng is not None and rng.random() < 0.2:
            ahead = tuple(rng.sample(sorted(nodes), k=2))
        one = replace(one, placements=(replace(place, upstreams=ahead),))
        if rng is not None and rng.random() < 0.3:
            grown = replace(place, upstreams=ahead, held=Stage(rng.randint(0, 2), 3))
            one = replace(one, state=InstanceState.CONSOLIDATING, placements=(grown,))
        books = books.put(Record(instance=one, model=MODEL))
    return books


def test_parts_that_arrive_change_no_chain_and_a_whole_copy_does() -> None:
    nodes = {NodeId("n0"): node_with("n0", WHOLE)} | {
        NodeId(f"n{at}"): node_with(f"n{at}") for at in range(1, 5)
    }
    books = started(nodes, [NodeId(f"n{at}") for at in range(1, 5)])
    plan = tick(facts_of(nodes, books), Memory(), RULES)
    assert plan.memory.index is not None
    before = plan.memory.index.chains[MODEL.digest]
    assert before.upstreams["n2"][0] == "n1"
    nodes[NodeId("n1")] = node_with("n1", WHOLE[:3])
    arrived = tick(facts_of(nodes, plan.books, NodeId("n1")), plan.memory, RULES)
    assert arrived.memory.index is not None
    assert arrived.memory.index.chains[MODEL.digest] is before
    nodes[NodeId("n1")] = node_with("n1", WHOLE)
    finished = tick(facts_of(nodes, arrived.books, NodeId("n1")), arrived.memory, RULES)
    assert finished.memory.index is not None
    assert finished.memory.index.chains[MODEL.digest] is not before
    assert "n1" not in finished.memory.index.chains[MODEL.digest].upstreams


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_nodes_ask_whom_a_plan_from_scratch_names(seed: int) -> None:
    rng = random.Random(seed)
    nodes = {
        NodeId(f"n{at}"): node_with(f"n{at}", rng.choice(((), (), WHOLE, WHOLE[2:4])))
        for at in range(6)
    }
    books = started(nodes, rng.sample(sorted(nodes), k=rng.randint(1, 6)), rng)
    memory = plain = Memory()
    for _ in range(8):
        name = rng.choice(sorted(nodes))
        nodes[name] = node_with(
            name,
            WHOLE[: rng.choice((0, 1, 3, 5, 6))],
            liveness=rng.choice((Liveness.ALIVE,) * 4 + (Liveness.DEAD,)),
            nic_bytes_per_s=rng.choice((100.0, 200.0)),
        )
        facts = facts_of(nodes, books, name)
        plan, expected = tick(facts, memory, RULES), plain_tick(facts, plain, RULES)
        assert said(plan) == said(expected)
        memory, plain, books = plan.memory, expected.memory, plan.books


# Stages that grow


def stages_at(*stages: Stage) -> tuple[Placement, ...]:
    """One stage on each of the nodes n0, n1 and so on."""
    return tuple(
        Placement(
            worker_id=WorkerId(f"w{at}"), node_id=NodeId(f"n{at}"), stage=stage, device_bytes=1
        )
        for at, stage in enumerate(stages)
    )


def group() -> Instance:
    return replace(
        instance(state=InstanceState.READY), placements=stages_at(Stage(0, 2), Stage(2, 4))
    )


def changed(before: Instance, *events: InstanceEvent, to: tuple[Placement, ...] = ()) -> Instance:
    change = Change(
        instance_id=before.instance_id, events=events, reason="it consolidates", placements=to
    )
    return moved(before, change, Epoch(1), NOW_S)


def fetched(one: Instance) -> dict[str, tuple[int, ...]]:
    books = Books().put(Record(instance=one, model=MODEL))
    return {
        node_id: fetch.parts
        for node_id in ("n0", "n1")
        for fetch in fetches_of(NodeId(node_id), books, {})
    }


def test_the_node_of_a_stage_that_grows_fetches_the_added_layers() -> None:
    ready = group()
    assert fetched(ready) == {}
    first = changed(
        ready, InstanceEvent.CONSOLIDATION_STARTED, to=stages_at(Stage(0, 3), Stage(2, 4))
    )
    assert fetched(first) == {"n0": (3,)}
    assert first.generation == ready.generation + 1
    whole = changed(first, to=stages_at(Stage(0, 4), Stage(2, 4)))
    assert fetched(whole) == {"n0": (3, 4, 5)}, "whether layer 2 came is not in the row"
    assert whole.generation == first.generation + 1
    done = changed(whole, InstanceEvent.CONSOLIDATION_DONE, to=stages_at(Stage(0, 4)))
    assert fetched(done) == {}
    assert [one.held for one in done.placements] == [None]
    last = changed(
        ready, InstanceEvent.CONSOLIDATION_STARTED, to=stages_at(Stage(0, 2), Stage(0, 4))
    )
    assert fetched(last) == {"n1": (0, 1, 2)}
    assert changed(last, to=stages_at(Stage(0, 2), Stage(0, 4))).generation == last.generation, (
        "nothing is new"
    )
    assert changed(last, InstanceEvent.DRAIN).placements == stages_at(Stage(0, 2), Stage(0, 4))


def test_a_tick_has_the_added_layers_fetched_from_a_member_that_has_them() -> None:
    nodes = {NodeId("n0"): node_with("n0", (0, 1, 2)), NodeId("n1"): node_with("n1", (3, 4, 5))}
    plan = tick(
        facts_of(nodes, Books().put(Record(instance=group(), model=MODEL))), Memory(), RULES
    )
    grows = changed(
        group(), InstanceEvent.CONSOLIDATION_STARTED, to=stages_at(Stage(0, 4), Stage(2, 4))
    )
    books = plan.books.put(Record(instance=grows, model=MODEL))
    told = tick(facts_of(nodes, books), plan.memory, RULES)
    ((fetch,),) = [one.fetches for one in told.tell.nodes]
    assert (fetch.generation, fetch.parts, fetch.upstreams) == (2, (3, 4, 5), ("n1",))
    assert {one.worker_id for one in told.tell.workers} == {"w0", "w1"}
    done = changed(grows, InstanceEvent.CONSOLIDATION_DONE, to=stages_at(Stage(0, 4)))
    over = tick(
        facts_of(nodes, told.books.put(Record(instance=done, model=MODEL))), told.memory, RULES
    )
    assert [(one.node_id, one.fetches) for one in over.tell.nodes] == [("n0", ())]


def test_what_was_sent_between_two_ticks_is_not_told_again() -> None:
    cluster = LargeCluster(Size(nodes=2, workers_per_node=1, models=4, instances=2))
    worker_id = cluster.load(0)
    cluster.ask(0)  # It is waited for.
    told = Told(essence=tuple(tuple(one) for one in _essences(cluster)), at_s=cluster.now_s)
    changed = Focus(workers=frozenset({worker_id}))

    def tells(between: dict[WorkerId, Told]) -> tuple[WorkerId, ...]:
        facts = replace(cluster.facts(changed), told_workers=between)
        plan = tick(facts, cluster.memory, cluster.rules)
        return tuple(one.worker_id for one in plan.tell.workers)

    assert tells({}) == (worker_id,)
    assert tells({worker_id: told}) == ()
    assert tells({worker_id: replace(told, essence=())}) == (worker_id,), "it was told otherwise"


def _essences(cluster: LargeCluster) -> list[Essence]:
    """Of what the worker holds on which something loads."""
    (record,) = (one for one in cluster.books.rows() if one.instance.instance_id == "loads")
    return [one for one, _ in essences_of(record.instance.lead, cluster.books)]
