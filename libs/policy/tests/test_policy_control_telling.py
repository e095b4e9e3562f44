"""Chains are planned when they change, and nodes ask those whom a plan from scratch would name."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_control import plain_tick, said

from pilotlight.policy.cluster import Liveness, NodeFacts
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Term
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.control.tick import tick
from pilotlight.policy.ids import Epoch, NodeId
from pilotlight.policy.multicast import chains_of
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import NOW_S, copy, instance, model, node

RULES = ControlRules(reconcile=ReconcileRules(term_started_s=NOW_S, hold_deadline_s=1e6), repeat_s=1e6)
TERM = Term(epoch=Epoch(1), started_s=NOW_S - 10, listening_since_s=NOW_S - 20, deaf=False, announced=True)
MODEL = replace(model(), scaling=replace(model().scaling, max_instances=9, min_instances=9))
WHOLE = tuple(range(len(MODEL.spec.part_bytes)))


def node_with(name: str, parts: tuple[int, ...] = (), **more: object) -> NodeFacts:
    copies = (replace(copy(), node_id=NodeId(name), parts=parts),) if parts else ()
    return replace(node(copies=copies), node_id=NodeId(name), dataplane_port=1, **more)  # type: ignore[arg-type]


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


def started(nodes: dict[NodeId, NodeFacts], names: list[NodeId], rng: random.Random | None = None) -> Books:
    """Instances that fetch on each of some nodes, one after the other, in the chains of their model."""
    books = Books()
    for at, name in enumerate(names):
        one = instance(instance_id=f"i{at}", state=InstanceState.FETCHING, worker_id=f"w-{name}")
        place = replace(one.placements[0], node_id=name)
        instances = [record.instance for record in books.records.values()]
        ahead = chains_of(MODEL, nodes.values(), instances, (place,)).ahead.get(name, ())
        if rng is not None and rng.random() < 0.2:
            ahead = tuple(rng.sample(sorted(nodes), k=2))
        one = replace(one, placements=(replace(place, upstreams=ahead),))
        books = books.put(Record(instance=one, model=MODEL))
    return books


def test_parts_that_arrive_change_no_chain_and_a_whole_copy_does() -> None:
    nodes = {NodeId("n0"): node_with("n0", WHOLE)} | {NodeId(f"n{at}"): node_with(f"n{at}") for at in range(1, 5)}
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
    nodes = {NodeId(f"n{at}"): node_with(f"n{at}", rng.choice(((), (), WHOLE, WHOLE[2:4]))) for at in range(6)}
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
