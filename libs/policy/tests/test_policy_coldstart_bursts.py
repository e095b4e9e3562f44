"""Groups for a burst, and ParaServe's worked case of figure 7."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.coldstart.bursts import Burst, choose_burst, for_all, group_sizes
from pilotlight.policy.coldstart.contention import FetchBooks, incoming
from pilotlight.policy.coldstart.search import choose_start
from pilotlight.policy.coldstart.servers import StartRequest, StartRules
from pilotlight.policy.coldstart.testing import GB, random_start, start_model, start_server
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Slo

RULES = StartRules()


def burst_on(nodes: int, *, ttft_s: float, instances: int, link_gb: float = 2.0) -> Burst:
    """Of a model of 8 GB, on nodes with one worker each."""
    books = FetchBooks(capacities={incoming(NodeId(f"n{at}")): link_gb * GB for at in range(nodes)})
    model = replace(start_model(edge_bytes=0), slo=Slo(ttft_ms=1000 * ttft_s, tpot_ms=500))
    servers = tuple(start_server(at) for at in range(nodes))
    request = StartRequest(model=model, books=books)
    return choose_burst(request, servers, RULES, instances, choose_start)


def test_figure_7() -> None:
    """30 new workers: eight groups, seven of four workers and one of two."""
    assert group_sizes(30, 4) == (4, 4, 4, 4, 4, 4, 4, 2)
    found = burst_on(30, ttft_s=1.0, instances=30)
    assert [group.size for group in found.groups] == [4] * 7 + [2]
    assert found.instances == 30
    assert all(group.full_memory_workers == group.size for group in found.groups)


@pytest.mark.parametrize(("ttft_s", "sizes"), [(5.0, [1] * 6), (2.5, [2] * 3), (1.9, [3] * 2)])
def test_groups_are_as_large_as_the_slo_needs(ttft_s: float, sizes: list[int]) -> None:
    found = burst_on(8, ttft_s=ttft_s, instances=6)
    assert [group.size for group in found.groups] == sizes
    assert found.missing_slo == 0


def test_as_many_as_there_is_room_for() -> None:
    found = burst_on(3, ttft_s=5.0, instances=9)
    assert found.instances == 3
    assert burst_on(0, ttft_s=5.0, instances=2).groups == ()
    assert burst_on(2, ttft_s=5.0, instances=0).groups == ()


@given(st.integers(0, 10**9), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_no_worker_twice_and_nothing_running_is_late(seed: int, instances: int) -> None:
    request, servers = random_start(random.Random(seed), nodes=6)
    found = choose_burst(request, servers, RULES, instances, choose_start)
    workers = [stage.worker_id for group in found.groups for stage in group.stages]
    assert len(workers) == len(set(workers))
    assert found.instances <= instances
    assert found.instances == sum(group.full_memory_workers for group in found.groups)
    books = request.books
    for number, group in enumerate(found.groups):
        newcomers = group.newcomers(f"{number}")
        assert books.refusal(newcomers, request.now_s) is None
        books = books.admit(newcomers, request.now_s)
    assert books == found.books


@given(st.integers(0, 10**9), st.integers(0, 40), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_what_is_for_all_is_for_the_first_too(seed: int, waiting: int, instances: int) -> None:
    """The SLO is never longer, nor below what has been waited; who waits alone has its own."""
    request, servers = random_start(random.Random(seed), nodes=6)
    sooner = for_all(request, servers, waiting, instances)
    if waiting <= max(1, instances):
        assert sooner is None
    if sooner is not None:
        slo = sooner.model.slo
        assert request.waited_s < slo.ttft_ms / 1000 <= request.model.slo.ttft_ms / 1000
        assert replace(sooner, model=request.model) == request
    assert for_all(request, (), waiting, instances) in (None, request)
