"""Control with a policy of starts: whose fetches are booked, what becomes of groups, what a new
leader takes over.
"""

import math
from dataclasses import replace

import pytest

from pilotlight.policy.cluster import Copy, HeldState, NodeFacts, Tier, Transfer
from pilotlight.policy.coldstart.chosen import ChoiceRules
from pilotlight.policy.coldstart.contention import FetchBooks, incoming, outgoing
from pilotlight.policy.coldstart.policies import StartPolicy
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.fetches import fetch_key, kept_up
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.growing import plan_growth
from pilotlight.policy.control.holds import stages_of
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Term
from pilotlight.policy.control.reconcile import Change, ReconcileRules, moved, reconcile
from pilotlight.policy.control.testing import LargeCluster, Size, view
from pilotlight.policy.control.tick import tick
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Epoch, Generation, InstanceId, WorkerId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.model import Stage
from pilotlight.policy.plan import Instance, InstanceState, on_clock
from pilotlight.policy.testing import NOW_S, held, instance, model, node

W0, W1 = WorkerId("w0"), WorkerId("w1")
WHOLE, FRONT, BACK = Stage(0, 4), Stage(0, 2), Stage(2, 4)
FULL_BYTES = stage_room(model(), WHOLE).least_bytes
"""The whole model, and some KV."""
RULES = ReconcileRules(term_started_s=NOW_S - 1000, hold_deadline_s=10.0)


def _group(*, full: int = 0, state: InstanceState = InstanceState.READY) -> Instance:
    """Two stages; the worker of stage ``full`` has room for the whole model."""
    one = instance(state=state, since_s=NOW_S - 5)
    places = tuple(
        replace(
            one.placements[0],
            worker_id=WorkerId(f"w{at}"),
            stage=stage,
            device_bytes=FULL_BYTES if at == full else 40,
        )
        for at, stage in enumerate((FRONT, BACK))
    )
    return replace(one, placements=places)


def _consolidating(group: Instance) -> Instance:
    (order,) = plan_growth([Record(instance=group, model=model())])
    change = Change(
        instance_id=group.instance_id,
        events=(InstanceEvent.CONSOLIDATION_STARTED,),
        reason=order.reason,
        placements=order.placements,
    )
    return moved(group, change, Epoch(1), NOW_S)


def test_the_first_worker_with_room_for_all_takes_the_model_on() -> None:
    """Also where it is not the one that leads; without one the group stays."""
    for full in (0, 1):
        (order,) = plan_growth([Record(instance=_group(full=full), model=model())])
        stages = [one.stage for one in order.placements]
        assert stages[full] == WHOLE
        assert stages[1 - full] == (FRONT, BACK)[1 - full]
    assert not plan_growth([Record(instance=_group(full=2), model=model())])


def test_room_for_the_parameters_alone_is_no_room_for_the_model() -> None:
    """A low-memory stage's KV may be larger than the parameters that it lacks."""
    group = _group()
    lead = replace(group.placements[0], device_bytes=FULL_BYTES - 1)
    assert lead.device_bytes > model().device_bytes(WHOLE)
    assert not plan_growth(
        [Record(instance=replace(group, placements=(lead, group.placements[1])), model=model())]
    )


def test_a_group_serves_when_its_stages_are_joined() -> None:
    """That every one is loaded is not enough: the lead says when it takes requests."""
    group = _group(state=InstanceState.LOADING)
    stages = [replace(held(), stage=FRONT), replace(held(), stage=BACK)]

    def said() -> list[InstanceEvent]:
        views = {
            WorkerId(f"w{at}"): view(at, stages=(stage,), heard_s=NOW_S + 1)
            for at, stage in enumerate(stages)
        }
        changes = reconcile([Record(instance=group, model=model())], views, NOW_S + 1, RULES)
        return [event for change in changes for event in change.events]

    assert said() == []
    stages[1] = replace(stages[1], open=True)
    assert said() == []
    stages[0] = replace(stages[0], open=True)
    assert said() == [InstanceEvent.ALL_STAGES_READY]


def test_a_stage_hears_where_the_others_are_as_soon_as_they_say() -> None:
    """And is told nothing more while nothing changes."""
    group = replace(_group(state=InstanceState.LOADING), generation=Generation(1))
    books = Books().put(Record(instance=group, model=model()))
    rules = ControlRules(reconcile=RULES, repeat_s=1e6)
    ports = {0: 0, 1: 0}

    def facts(books: Books, *changed: int) -> ControlFacts:
        loading = replace(held(state=HeldState.LOADING), instance_id=group.instance_id)
        views = {
            WorkerId(f"w{at}"): view(
                at, stages=(replace(loading, stage=stage, port=ports[at]),), heard_s=NOW_S
            )
            for at, stage in enumerate((FRONT, BACK))
        }
        return ControlFacts(
            now_s=NOW_S,
            term=Term(
                epoch=Epoch(1),
                started_s=NOW_S - 10,
                listening_since_s=NOW_S - 20,
                deaf=False,
                announced=True,
            ),
            books=books,
            workers=views,
            nodes={node().node_id: node()},
            models={model().name: model()},
            changed=Focus(workers=frozenset(WorkerId(f"w{at}") for at in changed)),
        )

    plan = tick(facts(books), Memory(), rules)
    for at, told in ((1, {W0, W1}), (0, {W0, W1}), (0, set[WorkerId]())):
        ports[at] = 7000 + at
        plan = tick(facts(plan.books, at), plan.memory, rules)
        assert {one.worker_id for one in plan.tell.workers} == told


@pytest.mark.parametrize("consolidate", [True, False])
def test_groups_stay_as_they_are_where_that_is_set(consolidate: bool) -> None:
    books = Books().put(Record(instance=_group(), model=model()))
    told = ControlFacts(
        now_s=NOW_S,
        term=Term(
            epoch=Epoch(1),
            started_s=NOW_S - 10,
            listening_since_s=NOW_S - 20,
            deaf=False,
            announced=True,
        ),
        books=books,
        workers={WorkerId(f"w{at}"): view(at) for at in range(2)},
        nodes={node().node_id: node()},
        models={model().name: model()},
    )
    rules = ControlRules(reconcile=replace(RULES, term_started_s=NOW_S), consolidate=consolidate)
    assert bool(tick(told, Memory(), rules).grow) is consolidate


def test_only_groups_that_serve_grow() -> None:
    """Not while they start, consolidate or drain, and not what is whole."""
    for state in InstanceState:
        orders = plan_growth([Record(instance=_group(state=state), model=model())])
        assert bool(orders) == (state is InstanceState.READY)
    assert not plan_growth([Record(instance=instance(), model=model())])


def test_a_group_is_one_worker_when_that_has_grown() -> None:
    """Not before it reports the range and the generation that it was told."""
    group = _consolidating(_group())
    assert group.state is InstanceState.CONSOLIDATING
    assert group.placements[0].held == FRONT
    record = Record(instance=group, model=model())
    stages = {0: (FRONT, 1), 1: (BACK, 1)}

    def said() -> tuple[Change, ...]:
        views = {
            WorkerId(f"w{at}"): view(
                at,
                stages=(replace(held(), stage=stage, generation=Generation(generation)),),
                heard_s=NOW_S + 1,
            )
            for at, (stage, generation) in stages.items()
        }
        return reconcile([record], views, NOW_S + 1, RULES)

    assert said() == ()
    stages[0] = (WHOLE, 1)
    assert said() == ()
    stages[0] = (WHOLE, 2)
    (change,) = said()
    after = moved(group, change, Epoch(1), NOW_S + 1)
    assert after.state is InstanceState.READY
    assert [(one.worker_id, one.stage, one.held) for one in after.placements] == [(W0, WHOLE, None)]
    assert after.generation == group.generation + 1


@pytest.mark.parametrize("state", [HeldState.EVICTED, HeldState.DRAINING])
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("grows", [False, True])
def test_a_group_of_which_a_stage_is_evicted_goes_as_a_whole(
    grows: bool, gone: int, state: HeldState
) -> None:
    """Or let go by its worker: the other stage is told to drain, and nothing is forgotten before
    that has ended.
    """
    group = _consolidating(_group()) if grows else replace(_group(), generation=Generation(1))
    ranges = {0: FRONT, 1: BACK}
    stages = {at: (replace(held(), stage=ranges[at]),) for at in ranges}
    stages[gone] = (replace(held(state=state), stage=ranges[gone]),)

    def said(one: Instance) -> tuple[Change, ...]:
        views = {
            WorkerId(f"w{at}"): view(at, stages=here, heard_s=NOW_S + 1)
            for at, here in stages.items()
        }
        return reconcile([Record(instance=one, model=model())], views, NOW_S + 1, RULES)

    (change,) = said(group)
    assert change.events == (InstanceEvent.DRAIN,)
    after = moved(group, change, Epoch(1), NOW_S + 1)
    assert after.state is InstanceState.DRAINING
    assert after.generation == group.generation + 1, "workers that obey the old one must hear of it"
    books = Books().put(Record(instance=after, model=model()))
    assert [hold.draining for one in (W0, W1) for hold in stages_of(one, books)] == [True, True]
    assert said(after) == ()
    stages[gone] = ()
    assert said(after) == (), "the other one still has it"
    stages[1 - gone] = ()
    (released,) = said(replace(after, state_since_s=NOW_S))
    assert released.events == (InstanceEvent.RELEASED,)


def test_an_evicted_stage_that_a_group_needs_no_more_ends_nothing() -> None:
    """Its lead has the whole model by then."""
    group = _consolidating(_group())
    lead = replace(held(), stage=WHOLE, generation=group.generation)
    evicted = replace(held(state=HeldState.EVICTED), stage=BACK)
    views = {
        WorkerId(f"w{at}"): view(at, stages=(stage,), heard_s=NOW_S + 1)
        for at, stage in enumerate((lead, evicted))
    }
    (change,) = reconcile([Record(instance=group, model=model())], views, NOW_S + 1, RULES)
    assert change.events == (InstanceEvent.CONSOLIDATION_DONE,)
    assert [one.worker_id for one in change.placements] == [W0]


def _fetching(deadline_s: float | None = NOW_S + 4) -> Record:
    one = instance(state=InstanceState.FETCHING, since_s=NOW_S)
    place = replace(one.placements[0], source="s3://m", fetch_bytes=60, fetch_deadline_s=deadline_s)
    return Record(instance=replace(one, placements=(place,)), model=model())


KEY = fetch_key(InstanceId("i"), W0)
LINKS = (incoming(node().node_id), outgoing("s3://m"))


def _kept(fetches: FetchBooks, books: Books, *nodes: NodeFacts, now_s: float = NOW_S) -> FetchBooks:
    return kept_up(fetches, books, books.touched, set(books.records), nodes, now_s)


def test_a_start_is_booked_until_it_has_its_bytes() -> None:
    """By its placement; a report that contradicts the books replaces what they have."""
    books = Books().put(_fetching())
    fetches = _kept(FetchBooks(), books, node())
    booked = fetches.fetches[KEY]
    assert (booked.links, booked.pending_bytes, booked.deadline_s) == (LINKS, 60, NOW_S + 4)
    assert fetches.capacities[LINKS[0]] == 100.0
    assert _kept(fetches, books.settled(), node()) == fetches
    slow = Transfer(digest=model().digest, source="s3://m", done_bytes=10, total_bytes=60)
    later = _kept(fetches, books.settled(), replace(node(), transfers=(slow,)), now_s=NOW_S + 0.5)
    assert later.fetches[KEY].pending_bytes == 50
    whole = Copy(
        digest=model().digest,
        node_id=node().node_id,
        tier=Tier.HOST,
        parts=tuple(range(6)),
        size_bytes=60,
    )
    assert not _kept(later, books.settled(), node(copies=(whole,))).fetches


def test_what_ends_or_is_given_up_leaves_the_books() -> None:
    """Whether it became ready, or its room was refused before it was a row."""
    record = _fetching()
    for tentative in (False, True):
        books = Books().put(replace(record, tentative=tentative))
        fetches = _kept(FetchBooks(), books, node())
        assert KEY in fetches.fetches
        ready = replace(record.instance, state=InstanceState.READY)
        assert not _kept(
            fetches, books.settled().put(replace(record, instance=ready)), node()
        ).fetches
        assert not _kept(fetches, books.settled().without([record.instance.instance_id])).fetches


def test_a_fetch_without_a_deadline_vetoes_nothing() -> None:
    """Its start misses its SLO already."""
    fetches = _kept(FetchBooks(), Books().put(_fetching(None)), node())
    assert math.isinf(fetches.fetches[KEY].deadline_s)


def test_a_new_leader_has_deadlines_on_its_own_clock() -> None:
    """As far from now as they were."""
    one = on_clock(_fetching().instance, 17.0)
    assert one.placements[0].fetch_deadline_s == 21.0
    assert (one.state_since_s, one.last_used_s) == (17.0, 17.0)
    assert on_clock(_fetching(None).instance, 17.0).placements[0].fetch_deadline_s is None


def test_every_policy_starts_a_model_in_a_large_cluster() -> None:
    """By its shortlist, with source and bytes in the placement; the next tick books its fetch."""
    for policy in StartPolicy:
        cluster = LargeCluster(Size(nodes=100, workers_per_node=4, models=60, instances=30))
        scheme = replace(cluster.rules.scheme, choice=ChoiceRules(policy=policy))
        cluster.rules = replace(cluster.rules, scheme=scheme)
        cluster.carry_out(cluster.tick(None))
        plan = cluster.tick(cluster.ask(3))
        (order,) = plan.start
        assert order.choice.scheme is not None
        (place,) = order.choice.scheme.placements
        assert plan.visited.candidates < 100
        if policy is StartPolicy.PILOTLIGHT:
            # A node that has a copy needs no fetch.
            assert (place.source, place.fetch_bytes) == ("", 0)
        first, *others = order.choice.considered
        assert first == order.choice.scheme
        assert place.worker_id not in {one.placements[0].worker_id for one in others}


def test_a_stage_that_loads_has_not_grown() -> None:
    """Whatever range and generation it reports."""
    group = _consolidating(_group())
    loading = replace(
        held(state=HeldState.LOADING), stage=WHOLE, generation=Generation(group.generation)
    )
    views = {W0: view(0, stages=(loading,)), W1: view(1, stages=(replace(held(), stage=BACK),))}
    assert reconcile([Record(instance=group, model=model())], views, NOW_S, RULES) == ()
