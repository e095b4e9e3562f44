"""Forecasts follow from arrivals and reports; the keeper fetches where the next instance fits."""

from dataclasses import replace

import pytest

from pilotlight.cache.forecasts import KEPT_S, Forecasts
from pilotlight.cache.keeper import INTERVAL_S, LEARN_S
from pilotlight.cache.settings import HostCopies
from pilotlight.cache.testing import KeeperRig, hear, on, whole
from pilotlight.common.messages.hold import prefetch_subject
from pilotlight.policy.arrivals import ArrivalCount, CounterLife
from pilotlight.policy.cluster import FetchPriority, HeldState, WorkerFacts
from pilotlight.policy.ids import GatewayId, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.scaling import ScalingRules
from pilotlight.policy.testing import held, model, worker

pytestmark = pytest.mark.anyio
CARRIES = 4
M = model("m", max_instances=2)
LARGE = 10**6
N0, N1 = NodeId("n0"), NodeId("n1")


def serving(requests: int, state: HeldState = HeldState.READY) -> WorkerFacts:
    """A worker of the first node with an instance."""
    stage = replace(held("m", "i0", state=state), in_flight=requests)
    return replace(worker(held_stages=(stage,)), node_id=N0)


def idle(node_id: NodeId = N1, memory_bytes: int = LARGE) -> WorkerFacts:
    """A worker that holds nothing."""
    empty = replace(worker(), node_id=node_id, worker_id=WorkerId(f"w-{node_id}"))
    return replace(empty, device=replace(empty.device, memory_bytes=memory_bytes))


class Fleet(KeeperRig):
    """Two nodes: one serves, the other one has room."""

    def __init__(self, of: Model = M, mode: HostCopies = HostCopies.KEPT) -> None:
        super().__init__((of,), mode)
        self.forecasts = Forecasts(self.books, ScalingRules(instance_requests=CARRIES))
        self.report(on(N0, whole(of)), on(N1))
        self.hear(idle())

    def hear(self, *workers: WorkerFacts) -> None:
        for one in workers:
            hear(self.books, one, self.clock.monotonic_s())

    def expected(self) -> dict[str, set[NodeId]]:
        found = self.forecasts.next_on(self.clock.monotonic_s())
        return {digest: set(nodes) for digest, nodes in found.items()}


def test_a_model_that_is_more_than_half_full_is_expected_where_there_is_room() -> None:
    fleet = Fleet()
    fleet.hear(serving(CARRIES // 2))
    assert fleet.expected() == {}
    fleet.hear(serving(CARRIES // 2 + 1))
    assert fleet.expected() == {M.digest: {N1}}
    fleet.hear(idle(memory_bytes=10))
    assert fleet.expected() == {M.digest: set()}, "nowhere"


def test_a_load_that_grows_is_expected_before_it_is_there() -> None:
    fleet = Fleet()
    fleet.hear(serving(0))
    began_s = fleet.clock.monotonic_s()
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
    for after_s, total in ((1.0, 1), (120.0, 2), (1.0, 400)):
        fleet.clock.advance(after_s)
        now_s = fleet.clock.monotonic_s()
        counts = (ArrivalCount(model=ModelName("m"), total=total, idle_s=0.0),)
        fleet.books.hear_arrivals(replace(life, age_s=now_s - began_s), counts, now_s)
        fleet.hear(serving(0), idle())
        fleet.report(on(N0, whole(M)), on(N1))
        assert (M.digest in fleet.expected()) == (total == 400)


def test_a_start_that_is_under_way_is_the_next_instance() -> None:
    fleet = Fleet(model("m", max_instances=3))
    starting = replace(held("m", "i1", state=HeldState.LOADING), instance_id=InstanceId("i1"))
    fleet.hear(serving(3), replace(idle(), held=(starting,)))
    assert fleet.expected() == {}


def test_a_forecast_outlives_the_moment_that_asked_for_it() -> None:
    fleet = Fleet()
    fleet.hear(serving(CARRIES))
    assert fleet.expected()
    fleet.hear(serving(0))
    fleet.clock.advance(KEPT_S - 1)
    fleet.hear(serving(0), idle())
    fleet.report(on(N0, whole(M)), on(N1))
    assert fleet.expected() == {M.digest: {N1}}
    fleet.clock.advance(1)
    assert fleet.expected() == {}


async def test_the_copy_is_fetched_behind_all_that_is_waited_for_and_gives_way() -> None:
    fleet = Fleet()
    fleet.hear(serving(CARRIES))
    assert await fleet.follow(LEARN_S) == [(prefetch_subject(N1), ["m"])]
    fetch = fleet.told[-1][1].fetches[0]
    assert fetch.priority is FetchPriority.PREFETCH
    assert [one.node_id for one in fetch.upstreams] == [N0]
    assert await fleet.keeper.yield_room(N1)
    fleet.report(on(N0, whole(M)), on(N1))
    fleet.hear(serving(CARRIES), idle())
    assert await fleet.follow() == [], "and it is not taken again at once"


async def test_no_copy_of_what_is_not_to_be_kept_nor_for_one_instance_alone() -> None:
    for fleet in (
        Fleet(mode=HostCopies.OFF),
        Fleet(replace(M, keep_host_copy=False)),
        Fleet(model("m", max_instances=1)),
    ):
        fleet.hear(serving(CARRIES))
        assert await fleet.follow(LEARN_S + INTERVAL_S) == []
