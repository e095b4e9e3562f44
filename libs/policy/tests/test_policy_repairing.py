"""A group of which one stage is lost: what becomes of it, and what of its rows."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import Copy, HeldStage, HeldState, Liveness, Tier, WorkerView
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.holds import fetches_of, stages_of
from pilotlight.policy.control.reconcile import Change, ReconcileRules, moved, reconcile
from pilotlight.policy.control.repairing import MAX_REPAIRS, Spares, with_repairs
from pilotlight.policy.control.testing import view
from pilotlight.policy.ids import Epoch, Generation, NodeId, WorkerId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.model import Stage
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import NOW_S, held, instance, model, node

PARTS = (Stage(0, 1), Stage(1, 3), Stage(3, 4))
RULES = ReconcileRules(term_started_s=NOW_S - 1000, hold_deadline_s=10.0)
SPARE = WorkerId("w3")


def group(state: InstanceState = InstanceState.READY, repairs: int = 0) -> Instance:
    """Of three stages on three nodes."""
    one = instance(state=state, since_s=NOW_S - 5)
    places = tuple(
        replace(
            one.placements[0],
            worker_id=WorkerId(f"w{at}"),
            node_id=NodeId(f"n{at}"),
            stage=stage,
            device_bytes=50,
            source="s3://m",
            fetch_bytes=20,
        )
        for at, stage in enumerate(PARTS)
    )
    return replace(one, placements=places, repairs=repairs, served=True, in_flight=3)


def said(at: int, one: Instance, state: HeldState = HeldState.READY, reason: str = "") -> HeldStage:
    """What a worker of the group reports of its stage."""
    stage = replace(held(state=state), stage=PARTS[at % 3], reason=reason)
    return replace(stage, generation=one.generation, open=at == 0)


Views = Mapping[WorkerId, WorkerView]


def views(one: Instance, **changed: HeldStage | None) -> Views:
    """Three workers that hold their stages and a fourth that holds nothing; None: it is dead."""
    stages: dict[str, HeldStage | None] = {f"w{at}": said(at, one) for at in range(3)}
    stages = {**stages, "w3": None, **changed}
    found: dict[WorkerId, WorkerView] = {}
    for at in range(4):
        stage = stages[f"w{at}"]
        seen = view(at, stages=(stage,) if stage is not None else (), heard_s=NOW_S)
        facts = replace(seen.facts, node_id=NodeId(f"n{at}"))
        if stage is None and at < 3:
            facts = replace(facts, liveness=Liveness.DEAD)
        found[WorkerId(f"w{at}")] = replace(seen, facts=facts)
    return found


def judged(one: Instance, there: Views, free_bytes: int = 300) -> Change | None:
    """What becomes of the group."""
    record = Record(instance=one, model=model())
    nodes = {NodeId(f"n{at}"): replace(node(), node_id=NodeId(f"n{at}")) for at in range(4)}
    spares = Spares(
        books=Books().put(record), workers=there, nodes=nodes, room=lambda _: (free_bytes, 1)
    )
    found = with_repairs(reconcile([record], there, NOW_S + 1, RULES), spares)
    return found[0] if found else None


def after(one: Instance, change: Change) -> Instance:
    return moved(one, change, Epoch(1), NOW_S + 1)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("state", [InstanceState.READY, InstanceState.LOADING])
def test_another_worker_brings_the_stage_that_is_lost(at: int, state: InstanceState) -> None:
    one = group(state)
    change = judged(one, views(one, **{f"w{at}": None}))
    assert change is not None
    assert change.events == (InstanceEvent.STAGE_LOST,)
    now = after(one, change)
    assert now.state is InstanceState.LOADING
    assert now.generation == one.generation + 1
    assert [place.stage for place in now.placements] == list(PARTS)
    assert [place.worker_id for place in now.placements] == [
        SPARE if number == at else f"w{number}" for number in range(3)
    ]
    assert (now.repairs, now.in_flight, now.last_used_s) == (1, 0, NOW_S + 1)


def test_only_the_lost_stage_is_fetched() -> None:
    """Its worker is told of the others, and they of it; who had it is told nothing any more."""
    one = group()
    change = judged(one, views(one, w1=None))
    assert change is not None
    books = Books().put(Record(instance=after(one, change), model=model()))
    parts = {at: fetches_of(NodeId(f"n{at}"), books, {}) for at in range(4)}
    assert [len(parts[at]) for at in range(4)] == [0, 0, 0, 1]
    assert parts[3][0].parts == tuple(model().spec.parts_of(PARTS[1]))
    holds = {at: stages_of(WorkerId(f"w{at}"), books) for at in range(4)}
    assert [len(holds[at]) for at in range(4)] == [1, 0, 1, 1]
    members = [member.worker_id for member in holds[3][0].members]
    assert members == ["w0", SPARE, "w2"]
    assert {hold.generation for at in (0, 2, 3) for hold in holds[at]} == {one.generation + 1}


def test_it_is_ready_when_all_have_heard_and_are_joined() -> None:
    """What stages said before does not count, though all of them were ready then."""
    one = group()
    change = judged(one, views(one, w1=None))
    assert change is not None
    now = after(one, change)
    there = replace(said(1, now), state=HeldState.LOADING)
    assert judged(now, {**views(one, w3=there), **_without(now)}) is None
    loaded = said(1, now)
    assert judged(now, {**views(one, w3=loaded), **_without(now)}) is None, "older generations"
    closed = replace(said(0, now), open=False)
    assert judged(now, views(now, w0=closed, w3=loaded)) is None
    ready = judged(now, views(now, w3=loaded))
    assert ready is not None
    assert ready.events == (InstanceEvent.ALL_STAGES_READY,)
    whole = after(now, ready)
    assert whole.generation == now.generation
    assert all(place.held is None for place in whole.placements)


def _without(one: Instance) -> Views:
    """The worker that is no part of the group any more."""
    gone = {place.worker_id for place in group().placements} - {
        place.worker_id for place in one.placements
    }
    return {worker_id: views(one)[worker_id] for worker_id in gone}


def fails(change: Change | None) -> bool:
    return change is not None and change.events == (InstanceEvent.FAIL,)


def test_it_is_replaced_where_no_worker_has_the_room() -> None:
    one = group()
    assert fails(judged(one, views(one, w1=None), free_bytes=10))
    full = {**views(one, w1=None)}
    del full[SPARE]
    assert fails(judged(one, full))


def test_it_is_replaced_where_a_repair_would_not_help() -> None:
    one = group()
    assert fails(judged(one, views(one, w0=None, w1=None))), "two stages"
    bad = said(1, one, HeldState.FAILED, "bad_checkpoint: a part is missing")
    assert fails(judged(one, views(one, w1=bad)))
    often = group(repairs=MAX_REPAIRS)
    assert fails(judged(often, views(often, w1=None)))
    growing = group(InstanceState.CONSOLIDATING)
    assert fails(judged(growing, views(growing, w1=None)))


def test_an_engine_that_died_is_a_lost_stage() -> None:
    one = group()
    dead = said(2, one, HeldState.FAILED, "engine_failed: the engine ended: killed")
    change = judged(one, views(one, w2=dead))
    assert change is not None
    assert change.events == (InstanceEvent.STAGE_LOST,)
    assert change.reason.startswith("engine_failed: the engine ended: killed; w3 of n3 brings")


def test_the_node_that_has_the_bytes_is_taken() -> None:
    one = group()
    record = Record(instance=one, model=model())
    there = {**views(one, w1=None)}
    other = there[SPARE]
    facts = replace(other.facts, worker_id=WorkerId("w4"), node_id=NodeId("n4"))
    there[WorkerId("w4")] = replace(other, facts=facts)
    nodes = {NodeId(f"n{at}"): replace(node(), node_id=NodeId(f"n{at}")) for at in range(5)}
    copy = Copy(
        digest=model().digest,
        node_id=NodeId("n4"),
        tier=Tier.HOST,
        parts=tuple(model().spec.parts_of(PARTS[1])),
        size_bytes=20,
    )
    nodes[NodeId("n4")] = replace(nodes[NodeId("n4")], copies=(copy,))
    spares = Spares(books=Books().put(record), workers=there, nodes=nodes, room=lambda _: (300, 1))
    (change,) = with_repairs(reconcile([record], there, NOW_S + 1, RULES), spares)
    assert change.placements[1].worker_id == "w4"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_losses_in_any_order_keep_the_model_whole(losses: list[int]) -> None:
    """Until it was repaired too often, or workers run out; each loss is a new generation."""
    one = group()
    free = [WorkerId(f"w{at}") for at in range(3, 9)]
    for number, at in enumerate(losses):
        record = Record(
            instance=one,
            model=model(),
            seen_on=frozenset(place.worker_id for place in one.placements),
        )
        dead = one.placements[at].worker_id
        there: dict[WorkerId, WorkerView] = {}
        for worker_id in [*(place.worker_id for place in one.placements), *free]:
            index = int(worker_id[1:])
            mine = [place for place in one.placements if place.worker_id == worker_id]
            stages = tuple(
                replace(held(), stage=place.stage, generation=one.generation) for place in mine
            )
            seen = view(index, stages=() if worker_id == dead else stages, heard_s=NOW_S + number)
            facts = replace(seen.facts, node_id=NodeId(f"n{index}"))
            if worker_id == dead:
                facts = replace(facts, liveness=Liveness.DEAD)
            there[worker_id] = replace(seen, facts=facts)
        nodes = {NodeId(f"n{at}"): replace(node(), node_id=NodeId(f"n{at}")) for at in range(9)}
        spares = Spares(
            books=Books().put(record), workers=there, nodes=nodes, room=lambda _: (300, 1)
        )
        (change,) = with_repairs(reconcile([record], there, NOW_S + number, RULES), spares)
        if number >= MAX_REPAIRS:
            assert fails(change)
            return
        before, one = one, moved(one, change, Epoch(1), NOW_S + number)
        assert [place.stage for place in one.placements] == list(PARTS)
        assert len({place.worker_id for place in one.placements}) == len(PARTS)
        assert one.generation == Generation(before.generation + 1)
        free = [worker_id for worker_id in free if worker_id != one.placements[at].worker_id]
