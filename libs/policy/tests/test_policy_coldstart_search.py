"""The choice of a start against all choices there are."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.coldstart.contention import FetchBooks, incoming, outgoing
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.coldstart.search import choose_start
from pilotlight.policy.coldstart.servers import (
    Assigned,
    Server,
    StartRequest,
    StartRules,
    StartScheme,
    least_bytes,
    missing_parts,
    predict,
)
from pilotlight.policy.coldstart.testing import (
    GB,
    REMOTE,
    peer,
    random_start,
    remote,
    start_model,
    start_server,
)
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.model import Slo

RULES = StartRules()


def every_scheme(
    request: StartRequest, servers: tuple[Server, ...], rules: StartRules
) -> Iterator[StartScheme]:
    """All of them: each s, each order of servers on nodes of their own, or with buses of their own
    where those may share a start, each set of full-memory workers that is large enough, each
    source. Of a model that no device could hold those of several
    stages, without a full-memory worker.
    """
    model = request.model
    for size in range(
        request.instances if request.whole else 2, min(rules.max_stages, model.spec.num_layers) + 1
    ):
        stages = even_stages(model.spec, size)
        for order in itertools.permutations(servers, size):
            if not are_apart(order, rules):
                continue
            for roles in itertools.product((True, False), repeat=size):
                if request.whole:
                    if sum(roles) < request.instances or (size == 1 and not roles[0]):
                        continue
                    if rules.full_leads and not roles[0]:
                        continue
                elif any(roles):
                    continue
                places = list(zip(order, stages, roles, strict=True))
                if any(
                    least_bytes(model, stage, server, full=full) > server.free_bytes
                    for server, stage, full in places
                ):
                    continue
                offers = [
                    [one for one in server.offers if one.has(missing)] if missing else [None]
                    for server, stage, _ in places
                    for missing in [
                        [
                            part
                            for part in missing_parts(model, stage, server)
                            if model.spec.part_bytes[part]
                        ]
                    ]
                ]
                for taken in itertools.product(*offers):
                    chosen = [
                        Assigned(server=server, stage=stage, full=full, offer=offer)
                        for (server, stage, full), offer in zip(places, taken, strict=True)
                    ]
                    yield predict(request, chosen, rules)


def are_apart(order: Sequence[Server], rules: StartRules) -> bool:
    return all(
        one.node_id != other.node_id or (rules.share_nodes and one.own_bus and other.own_bus)
        for one, other in itertools.combinations(order, 2)
    )


def best_of_all(
    request: StartRequest, servers: tuple[Server, ...], rules: StartRules
) -> tuple[float, ...] | None:
    allowed = (
        one
        for one in every_scheme(request, servers, rules)
        if not one.refusal and not math.isinf(one.ttft_s)
    )
    return min((one.order for one in allowed), default=None)


def assert_best(request: StartRequest, servers: tuple[Server, ...], rules: StartRules) -> None:
    found = choose_start(request, servers, rules)
    best = best_of_all(request, servers, rules)
    assert (found.order if found is not None else None) == best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 2), *[st.booleans()] * 3)
def test_it_is_the_best_of_all(
    seed: int, nodes: int, instances: int, proportional: bool, streaming: bool, full_leads: bool
) -> None:
    request, servers = random_start(random.Random(seed), nodes=nodes)
    rules = StartRules(proportional_shares=proportional, streaming=streaming, full_leads=full_leads)
    assert_best(replace(request, instances=instances), servers, rules)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), *[st.booleans()] * 3)
def test_it_is_the_best_of_all_for_what_no_device_could_hold(
    seed: int, nodes: int, proportional: bool, streaming: bool, full_leads: bool
) -> None:
    request, servers = random_start(random.Random(seed), nodes=nodes)
    rules = StartRules(proportional_shares=proportional, streaming=streaming, full_leads=full_leads)
    assert_best(replace(request, whole=False), servers, rules)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_it_is_the_best_of_all_where_workers_of_a_node_share_a_start(
    seed: int, nodes: int, instances: int, whole: bool
) -> None:
    rng = random.Random(seed)
    request, servers = random_start(rng, nodes=nodes)
    twice = [
        replace(one, worker_id=WorkerId(f"{one.worker_id}-{copy}"), own_bus=rng.random() < 0.7)
        for one in servers[:3]
        for copy in range(2)
    ]
    rules = replace(RULES, share_nodes=True, max_stages=3)
    assert_best(replace(request, instances=instances, whole=whole), tuple(twice), rules)


def test_two_devices_of_one_node_are_filled_at_once_from_its_host_pool() -> None:
    model = replace(start_model(), slo=Slo(ttft_ms=500, tpot_ms=200))
    parts = frozenset(range(model.spec.num_layers + 2))
    servers = tuple(
        replace(start_server(number, node="n0"), present=parts, prefill_s=0.0, own_bus=True)
        for number in range(2)
    )
    request, rules = StartRequest(model=model), replace(RULES, share_nodes=True)
    shared = choose_start(request, servers, rules)
    assert shared is not None
    assert shared.meets_slo
    assert [one.worker_id for one in shared.stages] == ["w0", "w1"]
    # What the paper's servers share, these would too.
    for other in (
        choose_start(request, servers, RULES),
        choose_start(request, tuple(replace(one, own_bus=False) for one in servers), rules),
    ):
        assert other is not None
        assert (other.size, other.meets_slo) == (1, False)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_on_eight_nodes(seed: int, whole: bool) -> None:
    request, servers = random_start(random.Random(seed), nodes=8)
    one_each = {one.node_id: one for one in servers}
    rules = StartRules(max_stages=3, full_leads=not whole)
    assert_best(replace(request, whole=whole), tuple(one_each.values()), rules)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_with_four_stages(seed: int) -> None:
    rng = random.Random(100 + seed)
    request, servers = random_start(rng, nodes=6)
    slo = replace(request.model.slo, ttft_ms=1500)
    request = replace(request, model=replace(request.model, slo=slo))
    one_each = {one.node_id: one for one in servers}
    assert_best(request, tuple(one_each.values()), RULES)


def test_one_worker_where_that_meets_the_slo() -> None:
    request = StartRequest(
        model=start_model(),
        books=FetchBooks(capacities={incoming(NodeId(f"n{one}")): 2.0 * GB for one in range(4)}),
    )
    servers = tuple(start_server(one) for one in range(4))
    found = choose_start(request, servers, RULES)
    assert found is not None
    assert (found.size, found.full_memory_workers, found.meets_slo) == (1, 1, True)
    assert found.ttft_s == pytest.approx(9 / 2 + 0.3 / 8, abs=0.01)


def test_more_workers_where_one_is_too_slow() -> None:
    """The least number that meets the SLO, one of them with room for the whole model."""
    books = FetchBooks(capacities={incoming(NodeId(f"n{one}")): 0.5 * GB for one in range(4)})
    request = StartRequest(model=start_model(), books=books)
    found = choose_start(request, tuple(start_server(one) for one in range(4)), RULES)
    assert found is not None
    assert (found.size, found.full_memory_workers, found.meets_slo) == (3, 1, True)
    assert {stage.node_id for stage in found.stages} == {"n0", "n1", "n2"}


def test_one_copy_cannot_feed_several_workers_faster_than_one() -> None:
    """Design 6.1: parallel fetches help only where their sources are several."""
    nodes = [NodeId(f"n{one}") for one in range(4)]
    source = NodeId("has-it")
    books = FetchBooks(
        capacities={incoming(one): 2.0 * GB for one in nodes} | {outgoing(source): 1.0 * GB}
    )
    servers = tuple(
        start_server(number, offers=(peer(node_id, source),))
        for number, node_id in enumerate(nodes)
    )
    request = StartRequest(model=start_model(), books=books)
    found = choose_start(request, servers, RULES)
    assert found is not None
    assert not found.meets_slo
    alone = choose_start(request, servers, StartRules(max_stages=1))
    assert alone is not None
    assert found.ttft_s == pytest.approx(alone.ttft_s, rel=0.05)


def test_stages_take_different_sources() -> None:
    nodes = [NodeId(f"n{one}") for one in range(2)]
    source = NodeId("has-it")
    books = FetchBooks(
        capacities={incoming(one): 9.0 * GB for one in nodes}
        | {outgoing(source): 1.0 * GB, outgoing(REMOTE): 1.0 * GB}
    )
    servers = tuple(
        start_server(number, offers=(remote(node_id), peer(node_id, source)))
        for number, node_id in enumerate(nodes)
    )
    found = choose_start(StartRequest(model=start_model(), books=books), servers, RULES)
    assert found is not None
    assert found.meets_slo
    assert {stage.source for stage in found.stages} == {REMOTE, source}


def test_a_copy_in_the_host_pool_is_not_fetched() -> None:
    parts = frozenset(range(10))
    servers = (start_server(0), replace(start_server(1), present=parts))
    books = FetchBooks(capacities={incoming(NodeId("n0")): 0.1 * GB})
    found = choose_start(StartRequest(model=start_model(), books=books), servers, RULES)
    assert found is not None
    assert [(one.worker_id, one.fetch_bytes, one.source) for one in found.stages] == [("w1", 0, "")]


def test_as_many_full_memory_workers_as_are_to_become_instances() -> None:
    servers = tuple(start_server(one) for one in range(4))
    request = StartRequest(model=start_model(), instances=3)
    found = choose_start(request, servers, RULES)
    assert found is not None
    assert (found.size, found.full_memory_workers) == (3, 3)


def test_a_start_that_would_make_another_late_goes_elsewhere_or_waits() -> None:
    nodes = [NodeId("n0"), NodeId("n1")]
    books = FetchBooks(capacities={incoming(one): 2.0 * GB for one in nodes})
    servers = tuple(start_server(one) for one in range(2))
    request = StartRequest(model=start_model(), books=books)
    first = choose_start(request, servers, RULES)
    assert first is not None
    books = books.admit(first.newcomers("i1"), 0.0)
    second = choose_start(replace(request, books=books), servers, RULES)
    assert second is not None
    assert [one.node_id for one in (*first.stages, *second.stages)] == ["n0", "n1"]
    assert choose_start(replace(request, books=books), servers[:1], RULES) is None
    # When the first has its bytes, the second may have the node, late as it is by then.
    later = replace(request, books=books.forward([incoming(nodes[0])], 5.0), now_s=5.0, waited_s=5)
    assert choose_start(later, servers[:1], RULES) is not None


@given(st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_what_meets_the_slo_has_its_bytes_by_its_deadlines(seed: int) -> None:
    """The deadline of a fetch and the SLO of its request are one condition."""
    request, servers = random_start(random.Random(seed), nodes=5)
    found = choose_start(request, servers, RULES)
    if found is None:
        return
    newcomers = found.newcomers("i")
    assert request.books.refusal(newcomers, request.now_s) is None
    for one in found.stages:
        if found.meets_slo:
            assert one.cost.fetch_s <= one.fetch_deadline_s - request.now_s + 1e-6
        else:
            assert math.isinf(one.fetch_deadline_s)


@given(st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_the_order_of_servers_says_nothing(seed: int) -> None:
    rng = random.Random(seed)
    request, servers = random_start(rng, nodes=5)
    shuffled = list(servers)
    rng.shuffle(shuffled)
    assert choose_start(request, servers, RULES) == choose_start(request, shuffled, RULES)


@pytest.mark.parametrize("seed", range(40))
def test_a_bounded_search_answers_soon_and_with_what_is_allowed(seed: int) -> None:
    """With any bound there is an answer where there is one; more steps make it no worse, and enough
    of them make it the best.
    """
    request, servers = random_start(random.Random(seed), nodes=6, peers=2)
    best = choose_start(request, servers, RULES)
    before: StartScheme | None = None
    for steps in (0, 5, 50, 500, 10**6):
        found = choose_start(request, servers, replace(RULES, max_steps=steps))
        assert (found is None) == (best is None)
        if found is None or best is None:
            continue
        assert not found.refusal
        assert best.order <= found.order
        assert before is None or found.order <= before.order
        before = found
    assert before == best
