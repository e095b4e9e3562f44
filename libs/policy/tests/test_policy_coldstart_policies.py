"""ParaServe's algorithm 1 with its slips mended, its rivals, and the terms that all of them
predict from.
"""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.coldstart.contention import FetchBooks, FetchKey, Newcomer, incoming
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.coldstart.paraserve import PaperScheme, paper_scheme
from pilotlight.policy.coldstart.policies import CHOICES, StartPolicy
from pilotlight.policy.coldstart.search import choose_start
from pilotlight.policy.coldstart.servers import (
    Server,
    StartRequest,
    StartRules,
    least_bytes,
    stage_share,
)
from pilotlight.policy.coldstart.testing import (
    GB,
    random_start,
    start_model,
    start_server,
)
from pilotlight.policy.cost import StageCost, group_ttft_s, transfer_s
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.model import Slo, Stage
from pilotlight.policy.testing import tiny_spec

RULES = StartRules(proportional_shares=True, streaming=False, hop_s=0.01)


def cluster(*links_gb: float, free_gb: float = 100) -> tuple[FetchBooks, tuple[Server, ...]]:
    """A node for each link."""
    books = FetchBooks(
        capacities={incoming(NodeId(f"n{at}")): rate * GB for at, rate in enumerate(links_gb)}
    )
    servers = (start_server(at) for at in range(len(links_gb)))
    return books, tuple(replace(one, free_bytes=int(free_gb * GB)) for one in servers)


def request_of(books: FetchBooks, *, ttft_s: float, tpot_s: float = 0.2) -> StartRequest:
    model = start_model(edge_bytes=0)  # 8 GB
    return StartRequest(
        model=replace(model, slo=Slo(ttft_ms=1000 * ttft_s, tpot_ms=1000 * tpot_s)), books=books
    )


def nodes_of(scheme: PaperScheme | None) -> list[str]:
    assert scheme is not None
    return [one.server.node_id for one in scheme.assigned]


def test_equations_5_and_2() -> None:
    books, servers = cluster(2, 2, 2, 2)
    found = paper_scheme(request_of(books, ttft_s=3.0, tpot_s=0.09), servers, RULES)
    assert found is not None
    assert (found.size, found.full_memory_workers) == (2, 1)
    # 8 GB / 2 stages over 2 GB/s; t_p (0.3 s) and t_d (0.04 s) times s - w + w/s = 1.5; two hops.
    assert found.ttft_s == pytest.approx(2.0 + 0.3 * 1.5 + 0.02)
    assert found.tpot_s == pytest.approx(0.04 * 1.5 + 0.02)
    assert found.meets_slo


def test_the_time_per_token_asks_for_full_memory_workers() -> None:
    books, servers = cluster(2, 2, 2, 2)
    loose = paper_scheme(request_of(books, ttft_s=3.0), servers, RULES)
    strict = paper_scheme(request_of(books, ttft_s=3.0, tpot_s=0.07), servers, RULES)
    assert loose is not None
    assert strict is not None
    assert (loose.size, loose.full_memory_workers) == (2, 0)
    assert (strict.size, strict.full_memory_workers) == (2, 2)


def test_the_best_servers_come_first_in_both_lists() -> None:
    """The printed "descending" would take the slowest for low memory."""
    books, servers = cluster(0.5, 4, 1, 2)
    assert nodes_of(paper_scheme(request_of(books, ttft_s=3.5), servers, RULES)) == ["n1"]
    found = paper_scheme(request_of(books, ttft_s=2.9, tpot_s=0.09), servers, RULES)
    assert nodes_of(found) == ["n1"]
    found = paper_scheme(request_of(books, ttft_s=2.2), servers[2:] + servers[:1], RULES)
    assert set(nodes_of(found)) <= {"n0", "n2", "n3"}


def test_no_server_is_taken_twice() -> None:
    books, servers = cluster(2, 2)
    found = paper_scheme(request_of(books, ttft_s=2.7), servers, RULES)
    assert sorted(nodes_of(found)) == ["n0", "n1"]
    two_on_one = (servers[0], replace(servers[0], worker_id=WorkerId("w9")))
    alone = paper_scheme(request_of(books, ttft_s=2.7), two_on_one, RULES)
    assert nodes_of(alone) == ["n0"]


def test_a_low_memory_worker_needs_room_for_a_stage_alone() -> None:
    books, servers = cluster(2, 2)
    small = replace(servers[1], free_bytes=5 * GB)
    found = paper_scheme(request_of(books, ttft_s=3.0), (servers[0], small), RULES)
    assert found is not None
    assert (found.size, nodes_of(found)) == (2, ["n0", "n1"])


def test_no_scheme_meets_the_slo() -> None:
    """One worker then: the first that passes the check of contention, if there is one."""
    books, servers = cluster(2, 1)
    request = request_of(books, ttft_s=0.5)
    assert nodes_of(paper_scheme(request, servers, RULES)) == ["n0"]
    running = Newcomer(
        key=FetchKey("f"), links=(incoming(NodeId("n0")),), fetch_bytes=2 * GB, deadline_s=1.0
    )
    closed = replace(request, books=books.admit([running], 0.0))
    assert nodes_of(paper_scheme(closed, servers, RULES)) == ["n1"]
    assert paper_scheme(closed, servers[:1], RULES) is None
    assert paper_scheme(request, (), RULES) is None


def test_algorithm_2_gives_what_a_newcomer_will_have() -> None:
    """B/(N+1), where the paper prints B/N."""
    books, servers = cluster(2)
    running = Newcomer(
        key=FetchKey("f"), links=(incoming(NodeId("n0")),), fetch_bytes=GB, deadline_s=99.0
    )
    found = paper_scheme(request_of(books.admit([running], 0.0), ttft_s=20.0), servers, RULES)
    assert found is not None
    assert found.ttft_s == pytest.approx(8.0 + 0.3 + 0.01)


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_the_own_term_finds_the_best_servers(seed: int) -> None:
    """Over all sets of servers, equation 5 is never less than what sorting finds for its s and
    w.
    """
    rng = random.Random(seed)
    books, servers = cluster(*(rng.uniform(0.2, 8) for _ in range(5)))
    servers = tuple(
        replace(
            one,
            load_bytes_per_s=rng.uniform(1, 8) * GB,
            libraries_s=rng.choice([0.0, 3.0]),
            context_s=rng.choice([0.0, 0.5]),
        )
        for one in servers
    )
    request = request_of(books, ttft_s=rng.uniform(1, 9), tpot_s=9.0)
    found = paper_scheme(request, servers, RULES)
    assert found is not None
    size, whole = found.size, request.model.spec.total_bytes

    def term_s(server: Server) -> float:
        share = whole / size
        load_s = max(transfer_s(share, server.load_bytes_per_s), server.libraries_s)
        return max(
            server.context_s + load_s, transfer_s(share, books.capacities[incoming(server.node_id)])
        )

    least = min(
        max(term_s(one) for one in group) for group in itertools.combinations(servers, size)
    )
    assert max(term_s(one.server) for one in found.assigned) == pytest.approx(least)


@given(st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_no_policy_beats_the_search(seed: int) -> None:
    """And none gives a worker what it has no room for, or two stages to one node."""
    request, servers = random_start(random.Random(seed), nodes=5)
    rules = StartRules()
    best = choose_start(request, servers, rules)
    by_id = {one.worker_id: one for one in servers}
    for policy, choose in CHOICES.items():
        found = choose(request, servers, rules)
        if found is None:
            continue
        assert len({stage.node_id for stage in found.stages}) == found.size
        for stage in found.stages:
            server = by_id[stage.worker_id]
            room = least_bytes(request.model, stage.stage, server, full=stage.full)
            assert stage.device_bytes == room <= server.free_bytes
        if not found.refusal and found.full_memory_workers > 0:
            assert best is not None, policy
            assert best.order <= found.order, policy


def test_single_takes_the_first_and_locality_the_nearest() -> None:
    books, servers = cluster(0.1, 1, 2)
    request = request_of(books, ttft_s=5)
    cached = (*servers[:1], replace(servers[1], present=frozenset(range(10))), servers[2])
    first = CHOICES[StartPolicy.SINGLE](request, cached, RULES)
    nearest = CHOICES[StartPolicy.LOCALITY](request, cached, RULES)
    assert first is not None
    assert nearest is not None
    assert [one.node_id for one in first.stages] == ["n0"]
    assert [one.node_id for one in nearest.stages] == ["n1"]


def test_every_policy_has_its_name() -> None:
    assert set(CHOICES) == set(StartPolicy)


def through_layers_s(stages: list[StageCost], hop_s: float) -> float:
    """Layer by layer: end = max(end, arrived) + compute."""
    end_s = 0.0
    for stage in stages:
        layers = stage.streamed_layers
        beside_s = max(stage.libraries_s, stage.init_s)
        for layer in range(1, layers + 1):
            arrived_s = max(
                stage.fetch_s * layer / layers,
                stage.context_s + max(beside_s, stage.load_s * layer / layers),
            )
            end_s = max(end_s, arrived_s) + stage.prefill_s / layers
        end_s += hop_s
    return end_s


TIMES = st.floats(0, 10)


@given(
    st.lists(
        st.builds(
            StageCost,
            fetch_s=TIMES,
            load_s=TIMES,
            prefill_s=TIMES,
            decode_s=TIMES,
            init_s=TIMES,
            context_s=TIMES,
            libraries_s=TIMES,
            streamed_layers=st.integers(1, 12),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_time_to_first_token_is_that_of_layers_one_by_one(stages: list[StageCost]) -> None:
    hop_s = 0.25 if len(stages) > 1 else 0.0
    assert group_ttft_s(stages, hop_s=0.25) == pytest.approx(through_layers_s(stages, hop_s))


@given(st.lists(st.integers(0, 50), min_size=4, max_size=9), st.integers(1, 4), st.booleans())
def test_stages_are_as_even_as_layers_allow(parts: list[int], size: int, tied: bool) -> None:
    layers = len(parts) - 2
    spec = tiny_spec(num_layers=layers, part_bytes=tuple(parts), tied_embeddings=tied)
    if size > layers:
        with pytest.raises(ValueError, match="cannot be cut"):
            even_stages(spec, size)
        return
    cuts = itertools.combinations(range(1, layers), size - 1)
    least = min(
        max(spec.stage_bytes(Stage(a, b)) for a, b in itertools.pairwise((0, *cut, layers)))
        for cut in cuts
    )
    found = even_stages(spec, size)
    assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])]
    assert found[-1].stop == layers
    assert max(spec.stage_bytes(one) for one in found) == least


@pytest.mark.parametrize("tied", [False, True])
def test_shares_of_stages_make_one_whole(tied: bool) -> None:
    model = start_model(tied=tied)
    for size in range(1, 5):
        shares = [stage_share(model, one) for one in even_stages(model.spec, size)]
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) > 0
