"""The indexes of control: what they find is what a look at everything finds."""

from collections import Counter
from dataclasses import replace

import pytest
from cluster_story import START_S, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy import turns
from pilotlight.policy.cluster import DeviceHealth, HealthState, HeldState
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.focus import Dues
from pilotlight.policy.control.index import Index, Links
from pilotlight.policy.control.plan import ControlRules
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.control.shortlist import for_start, for_turns, nearest
from pilotlight.policy.control.table import Table
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.instance import SERVING
from pilotlight.policy.parallelism import choose_scheme
from pilotlight.policy.places import Need, Place, Rooms
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import held, instance
from pilotlight.policy.turns import TurnRules, plan_turns

RULES = ControlRules(reconcile=ReconcileRules(term_started_s=START_S - 400, hold_deadline_s=3.0))
S, H = InstanceState, HeldState
SEEDS = st.integers(0, 2**32)


def crowded(seed: int) -> Cluster:
    """Sixty workers of a few shapes, most of them with something on them."""
    cluster = Cluster.of(seed)
    rng = cluster.rng
    cluster.workers.clear()
    template = Cluster.of(seed + 1)
    sizes = rng.choices((100, 250, 700, 1400), k=3)
    for index in range(60):
        worker_id = WorkerId(f"w{rng.randrange(3)}-{index:02}")
        stages: list[tuple[ModelName, str, InstanceState, HeldState, int, int]] = []
        for each in range(rng.choice((0, 0, 1, 1, 2))):
            name = ModelName(rng.choice("abcdef"))
            state = rng.choice((S.READY, S.READY, S.READY, S.LOADING, S.DRAINING, S.FAILED, S.GONE))
            shown = rng.choice((H.READY, H.READY, H.READY, H.LOADING, H.DRAINING, H.EVICTED))
            stages.append(
                (
                    name,
                    f"i{index:02}{each}",
                    state,
                    shown,
                    rng.choice((30, 90, 240)),
                    rng.choice((0, 0, 1)),
                )
            )
        reported = [one for one in stages if rng.random() < 0.9]
        cluster.report_worker(
            worker_id,
            tuple(
                held(name, key, device_bytes=size, state=shown, in_flight=running)
                for name, key, _, shown, size, running in reported
            ),
        )
        view = cluster.workers[worker_id]
        device = replace(
            view.facts.device,
            memory_bytes=rng.choice(sizes),
            load_bytes_per_s=rng.choice((100.0, 101.0, 500.0)),
            granule_bytes=rng.choice((1, 4)),
        )
        health = DeviceHealth(
            state=rng.choice((HealthState.HEALTHY,) * 5 + (HealthState.DEGRADED,))
        )
        cluster.workers[worker_id] = replace(
            view, facts=replace(view.facts, device=device, health=health)
        )
        for name, key, state, _, size, running in stages:
            one = instance(
                name,
                key,
                state=state,
                worker_id=worker_id,
                since_s=START_S - rng.choice((0.25, 2.0, 50.0)),
                used_s=START_S - rng.choice((0.25, 2.0, 50.0)),
                in_flight=running,
                digest=template.models[name].digest
                if rng.random() < 0.2
                else cluster.models[name].digest,
                device_bytes=size,
            )
            one = replace(one, load_s=rng.choice((0.0, 1.0, 30.0)))
            cluster.books = cluster.books.put(
                Record(instance=one, model=cluster.models[name], tentative=rng.random() < 0.1)
            )
    return cluster


def heard(cluster: Cluster) -> Draft:
    draft = Draft(cluster.books, cluster.facts(), Index(), RULES)
    draft.hear(set(cluster.workers), set(cluster.nodes), set())
    return draft


@pytest.mark.slow
@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_a_start_is_placed_as_if_every_worker_had_been_compared(seed: int) -> None:
    cluster = crowded(seed)
    draft, everywhere = heard(cluster), frozenset(cluster.workers)
    for model in cluster.models.values():
        excluded = frozenset(
            cluster.rng.sample(sorted(everywhere), k=cluster.rng.choice((0, 0, 3, 40)))
        )
        full = choose_scheme(
            model, draft.slice(cluster.models, everywhere, model.digest), RULES.scheme, excluded
        )
        workers = for_start(model, draft, RULES.scheme.placement, excluded)
        part = draft.slice((model.name,), workers, model.digest)
        choice = choose_scheme(model, part, RULES.scheme, excluded, draft.rooms.fleet)
        assert replace(choice, rejected=()) == replace(full, rejected=())
        assert (
            bool(for_start(model, draft, RULES.scheme.placement, excluded, count=1) - excluded)
            or full.scheme is None
        )


@pytest.mark.slow
@given(SEEDS, st.sampled_from([1, 2, 64]))
@settings(max_examples=60, deadline=None)
def test_turns_are_taken_as_if_every_worker_had_been_compared(seed: int, line_limit: int) -> None:
    cluster, rules = crowded(seed), TurnRules(line_limit=line_limit)
    draft = heard(cluster)
    wanted = cluster.rng.sample(sorted(cluster.models), k=cluster.rng.randint(1, 6))
    demand = tuple(
        Demand(
            model=name,
            waiting=1,
            oldest_age_s=cluster.rng.choice((0.1, 3.9, 4.0, 9.0)),
            deadline_in_s=9.0,
        )
        for name in wanted
    )
    full = plan_turns(draft.slice(cluster.models, cluster.workers, demand=demand), wanted, rules)
    workers = for_turns(wanted, demand, draft, rules)
    assert plan_turns(draft.slice(cluster.models, workers, demand=demand), wanted, rules) == full


@pytest.mark.slow
@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_an_index_that_was_mended_is_one_made_anew(seed: int) -> None:
    cluster = crowded(seed)
    draft = heard(cluster)
    for _ in range(4):
        for _ in range(3):
            cluster.report_worker(cluster.rng.choice(sorted(cluster.workers)))
            cluster.report_node(cluster.rng.choice(sorted(cluster.nodes)))
        gone = cluster.rng.choice(sorted(cluster.workers))
        del cluster.workers[gone]
        facts = cluster.facts()
        draft.facts = facts
        assert facts.changed is not None
        draft.hear(facts.changed.workers | {gone}, facts.changed.nodes, set())
        anew = heard(cluster)
        assert (draft.rooms.shapes, draft.rooms.sizes) == (anew.rooms.shapes, anew.rooms.sizes)
        assert dict(draft.rooms.slots) == dict(anew.rooms.slots)
        assert (draft.rooms.busy, draft.rooms.leaving) == (anew.rooms.busy, anew.rooms.leaving)
        assert (dict(draft.copies.back), dict(draft.homes.back)) == (
            dict(anew.copies.back),
            dict(anew.homes.back),
        )


def test_in_a_large_cluster_the_roomiest_workers_explain_a_refusal() -> None:
    cluster = crowded(3)
    draft = heard(cluster)
    assert nearest(draft, len(cluster.workers)) == frozenset(cluster.workers)
    few = nearest(draft, 1)
    assert 0 < len(few) < len(cluster.workers)
    for shape in draft.rooms.shapes:
        ours = [key for key, slot in draft.rooms.slots.items() if slot.shape == shape]
        most = max(draft.room_on(key, RULES.scheme.placement) for key in ours)
        assert any(
            draft.room_on(key, RULES.scheme.placement) == most for key in few.intersection(ours)
        )


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_room_that_is_known_is_what_a_look_at_the_worker_finds(seed: int) -> None:
    cluster = crowded(seed)
    draft = heard(cluster)
    for rules in (RULES.scheme.placement, RULES.turns.placement):
        known = draft.known_room(rules)
        found = {one: known(one) for one in cluster.workers}
        assert found == {one: draft.room_on(one, rules) for one in cluster.workers}


UPDATES = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 5), max_size=4),
    max_size=8,
)


@given(UPDATES)
def test_a_table_is_a_dict_and_never_written_to(updates: list[dict[str, int | None]]) -> None:
    table, plain = Table[str, int](), dict[str, int]()
    for update in updates:
        before, copied = table, dict(table)
        news = {key: value for key, value in update.items() if value is not None}
        table = table.put(news, [key for key, value in update.items() if value is None])
        plain = {
            key: value for key, value in (plain | news).items() if update.get(key, 0) is not None
        }
        assert (dict(table), len(table), dict(before)) == (plain, len(plain), copied)
        asked = frozenset("abcxyz")
        assert table.among(asked) == table.among(sorted(asked)) == asked & plain.keys()


@given(UPDATES)
def test_what_is_due_is_found_soonest_first(updates: list[dict[str, int | None]]) -> None:
    dues, plain = Dues[str](), dict[str, float]()
    for update in updates:
        news = {
            key: float("inf") if value is None else float(value) for key, value in update.items()
        }
        dues, plain = dues.put(news), plain | news
        for now_s in range(7):
            expected = [
                key
                for at_s, key in sorted((at_s, key) for key, at_s in plain.items())
                if at_s <= now_s
            ]
            assert dues.until(now_s) == expected
            assert dues.until(now_s, 2) == expected[:2]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcd"), st.frozensets(st.sampled_from("uvwxyz")), max_size=3
        ),
        max_size=8,
    )
)
def test_links_are_the_same_from_both_sides(updates: list[dict[str, frozenset[str]]]) -> None:
    links, plain = Links[str, str](), dict[str, frozenset[str]]()
    for update in updates:
        links, plain = links.put(update), plain | update
        for one in "abcd":
            assert links.of(one) == plain.get(one, frozenset())
        for other in "uvwxyz":
            assert links.to(other) == {one for one, others in plain.items() if other in others}


@pytest.mark.slow
@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_the_cheapest_place_is_the_cheapest_of_all(seed: int) -> None:
    cluster = crowded(seed)
    draft = heard(cluster)
    snapshot = draft.slice(cluster.models, cluster.workers)
    places = turns._places(snapshot, dict(cluster.models), TurnRules())
    spare = Counter(one.model for one in snapshot.instances if one.state in SERVING)
    ranked = turns._ranked(places, spare)
    for model in cluster.rng.choices(list(cluster.models.values()), k=8):
        need = Need(model)
        found = [
            (
                len(chosen),
                max(turns._importance(one, spare) for one in chosen),
                place.worker.worker_id,
            )
            for place in places
            if need.is_met_by(place)
            and (chosen := turns._victims(place, need.device_bytes(place), spare))
        ]
        place, chosen = turns._cheapest(ranked, need, spare)
        if not found:
            assert (place, chosen) == (None, [])
            continue
        assert place is not None
        assert (
            len(chosen),
            max(turns._importance(one, spare) for one in chosen),
            place.worker.worker_id,
        ) == min(found)
        for victim in chosen:
            spare[victim.model] -= 1
            for other in places:
                other.give(victim)
        place.claim(need.device_bytes(place))


@pytest.mark.slow
@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_the_roomiest_place_is_the_roomiest_of_all(seed: int) -> None:
    cluster = crowded(seed)
    draft = heard(cluster)
    snapshot = draft.slice(cluster.models, cluster.workers)
    places = turns._places(snapshot, dict(cluster.models), TurnRules())
    rooms = Rooms(places)

    def best(need: Need, *, coming: bool) -> Place | None:
        spare = [
            (one.room_bytes + coming * one.coming_bytes - need.device_bytes(one), one)
            for one in places
            if need.is_met_by(one)
        ]
        fitting = [(size, one.worker.worker_id, one) for size, one in spare if size >= 0]
        return max(fitting, key=lambda one: one[:2])[2] if fitting else None

    for model in cluster.rng.choices(list(cluster.models.values()), k=12):
        need = Need(model)
        free = rooms.free(need)
        assert free is best(need, coming=False)
        place = free
        if free is None:
            place = rooms.coming(need)
            assert place is best(need, coming=True)
        if place is not None:
            rooms.claim(place, need)
