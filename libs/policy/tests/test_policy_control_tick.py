"""One tick of control: what it starts, drains, refuses, tells and forgets."""

from dataclasses import replace
from itertools import pairwise

from pilotlight.policy.cluster import HeldState
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Holds, Memory, Refusal, Term
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.control.starts import retry_pause_s
from pilotlight.policy.control.testing import record, view
from pilotlight.policy.control.tick import EVICTED, tick
from pilotlight.policy.ids import Epoch, ModelName, WorkerId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import NOW_S, demand, held, instance, model, node

S = InstanceState
H = HeldState
E = InstanceEvent
CONTROL = ControlRules(reconcile=ReconcileRules(term_started_s=NOW_S - 500, hold_deadline_s=10.0))
TERM = Term(
    epoch=Epoch(4), started_s=NOW_S - 400, listening_since_s=NOW_S - 500, deaf=False, announced=True
)


def facts(*records: Record, **more: object) -> ControlFacts:
    """One model that two workers of a node could hold, and what is said of it."""
    made = ControlFacts(
        now_s=NOW_S,
        term=TERM,
        books=Books().put(*records),
        workers={WorkerId(f"w{index}"): view(index) for index in range(2)},
        nodes={node().node_id: node()},
        models={model().name: model()},
    )
    return replace(made, **more)


def test_a_waiting_request_is_a_start_and_an_idle_tick_is_only_repetition() -> None:
    plan = tick(facts(demand=(demand("m", 1),)), Memory(), CONTROL)
    assert [(order.model.name, order.reason) for order in plan.start] == [("m", "1 request waits")]
    assert {one.worker_id for one in plan.tell.workers} == {"w0", "w1"}
    again = tick(facts(), plan.memory, CONTROL)
    assert (again.start, again.drain, again.tell, again.repeat) == ((), (), Holds(), Holds())
    second = tick(replace(facts(), now_s=NOW_S + 1.0), again.memory, CONTROL)
    assert (second.tell, len(second.repeat.workers)) == (Holds(), 2)


def test_a_tick_is_the_same_for_the_same_facts_and_memory() -> None:
    known = facts(record(instance(state=S.LOADING)), demand=(demand("m", 40),))
    plan = tick(known, Memory(), CONTROL)
    assert plan == tick(known, Memory(), CONTROL)
    assert tick(known, plan.memory, CONTROL) == tick(known, plan.memory, CONTROL)


def test_nothing_is_commanded_before_it_may_be() -> None:
    known = facts(record(instance(state=S.LOADING)), demand=(demand("m", 40),))
    known = replace(known, workers={WorkerId("w0"): view(stages=(held(),))})
    for term in (
        replace(TERM, deaf=True),
        replace(TERM, announced=False),
        replace(TERM, listening_since_s=NOW_S - 0.5),
        replace(TERM, started_s=NOW_S - 0.1, listening_since_s=NOW_S - 1.05),
    ):
        late = replace(
            known, term=term, workers={WorkerId("w0"): view(stages=(held(),), heard_s=NOW_S - 0.15)}
        )
        plan = tick(late, Memory(), CONTROL)
        assert (plan.start, plan.drain, plan.tell, plan.repeat, plan.memory) == (
            (),
            (),
            Holds(),
            Holds(),
            Memory(),
        )
    assert [change.events[-1] for change in tick(known, Memory(), CONTROL).changes] == [
        E.ALL_STAGES_READY
    ], "reports count all the same"


def test_a_refused_start_goes_elsewhere_then_waits_and_a_change_of_workers_ends_that() -> None:
    waits = (demand("m", 1),)
    first = tick(facts(demand=waits), Memory(), CONTROL)
    worker_id = first.start[0].choice.scheme.placements[0].worker_id
    refusal = Refusal(
        model=ModelName("m"), worker_id=worker_id, code="no_room", message="full", transient=False
    )
    second = tick(facts(demand=waits, refusals=(refusal,)), first.memory, CONTROL)
    other = second.start[0].choice.scheme.placements[0].worker_id
    assert {worker_id, other} == {"w0", "w1"}
    third = tick(
        facts(demand=waits, refusals=(replace(refusal, worker_id=other),)), second.memory, CONTROL
    )
    assert third.start == ()
    assert [(one.code, one.message, one.record) for one in third.refuse] == [
        ("no_room", "full", True)
    ]
    waiting = tick(facts(demand=waits), third.memory, CONTROL)
    assert (waiting.start, waiting.refuse) == ((), ())
    assert tick(
        facts(demand=waits, world_version=1, now_s=NOW_S + 0.1), third.memory, CONTROL
    ).start
    assert tick(facts(demand=waits, now_s=NOW_S + 2.0), third.memory, CONTROL).start
    assert tick(facts(), third.memory, CONTROL).memory.backing == {}, "no request waits any more"
    transient = tick(
        facts(demand=waits, refusals=(replace(refusal, transient=True),)), first.memory, CONTROL
    )
    assert transient.start == ()
    assert transient.refuse


def test_a_refusal_that_stands_is_written_down_again_from_time_to_time() -> None:
    """Those who came to wait since then look no further back."""
    memory, written = Memory(), list[float]()
    for tenths in range(1300):
        now_s = NOW_S + tenths / 10
        nobody = replace(facts(demand=(demand("m", 1),), now_s=now_s), workers={})
        plan = tick(nobody, memory, CONTROL)
        memory = plan.memory
        written += [now_s - NOW_S for one in plan.refuse if one.record]
    assert written[0] == 0
    pauses = [after - before for before, after in pairwise(written)]
    again_s = CONTROL.refusal_again_s
    assert len(pauses) == 2
    assert all(again_s <= pause <= again_s + CONTROL.retry_limit_s for pause in pauses)


def test_a_start_that_asks_for_room_is_the_only_one_of_its_model() -> None:
    asking = replace(record(instance(state=S.PLANNED)), tentative=True)
    assert tick(facts(asking, demand=(demand("m", 40),)), Memory(), CONTROL).start == ()


def test_an_operators_eviction_drains_and_is_answered_with_what_drains() -> None:
    ready, draining = (
        record(instance(instance_id="i")),
        record(instance(instance_id="j", worker_id="w1", state=S.DRAINING)),
    )
    known = facts(ready, draining, evict=(ModelName("m"), ModelName("none")))
    views = {
        WorkerId("w0"): view(stages=(held(),)),
        WorkerId("w1"): view(1, stages=(held(instance_id="j", state=H.DRAINING),)),
    }
    plan = tick(replace(known, workers=views), Memory(), CONTROL)
    assert [(drain.instance_id, drain.reason) for drain in plan.drain] == [("i", EVICTED)]
    assert plan.evicted == {"m": ("i", "j"), "none": ()}
    (told,) = [one for one in plan.tell.workers if one.worker_id == "w0"]
    assert [hold.draining for hold in told.holds] == [True], "what is told is what was decided"


def test_pauses_grow_and_differ_by_model_and_not_from_run_to_run() -> None:
    pauses = [retry_pause_s(ModelName("m"), attempts, CONTROL) for attempts in range(1, 9)]
    assert pauses == [retry_pause_s(ModelName("m"), attempts, CONTROL) for attempts in range(1, 9)]
    assert all(
        0.05 * 2 ** (n - 1) <= pause <= 0.1 * 2 ** (n - 1)
        for n, pause in enumerate(pauses[:4], start=1)
    )
    assert all(1.0 <= pause <= 2.0 for pause in pauses[5:])
    assert pauses != [retry_pause_s(ModelName("n"), attempts, CONTROL) for attempts in range(1, 9)]


def test_what_ended_long_ago_is_forgotten() -> None:
    old, young = (
        instance(instance_id="old", state=S.GONE, since_s=NOW_S - 61),
        instance(instance_id="young", state=S.GONE, since_s=NOW_S - 59),
    )
    known = facts(record(old), record(young))
    plan = tick(known, Memory(), CONTROL)
    assert set(plan.books.records) == {"young"}
    assert set(known.books.records) == {"old", "young"}, "books are never written to"
