"""A copy of every model in memory while there is room, and again after a node is lost."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import ArrivalCount, ArrivalWindows, CounterLife
from pilotlight.policy.cluster import Copy, FetchPriority, Liveness, NodeFacts, Transfer
from pilotlight.policy.host_copies import (
    HostCopyFacts,
    HostCopyPlan,
    HostCopyRules,
    plan_host_copies,
)
from pilotlight.policy.ids import GatewayId, ModelName, NodeId
from pilotlight.policy.model import Model
from pilotlight.policy.pool import ParameterPool
from pilotlight.policy.testing import NOW_S, copy, held, model, node, worker

RULES = HostCopyRules()


def on(name: str, *copies: Copy, pool_bytes: int = 1000) -> NodeFacts:
    named = NodeId(name)
    there = tuple(replace(one, node_id=named) for one in copies)
    return replace(node(copies=there, pool_bytes=pool_bytes), node_id=named, dataplane_port=1)


def whole(of: Model) -> Copy:
    parts = tuple(range(len(of.spec.part_bytes)))
    return replace(copy(of.name, size_bytes=of.spec.total_bytes), parts=parts)


def pool_of(*nodes: NodeFacts) -> ParameterPool:
    pool = ParameterPool()
    for one in nodes:
        pool.hear_node(one.node_id, one if one.liveness is not Liveness.DEAD else None)
    return pool


def planned(models: tuple[Model, ...], *nodes: NodeFacts, **given: object) -> HostCopyPlan:
    facts = HostCopyFacts(now_s=NOW_S, models=models, nodes={one.node_id: one for one in nodes})
    return plan_host_copies(replace(facts, **given), pool_of(*nodes), RULES)  # type: ignore[arg-type]


def orders(plan: HostCopyPlan) -> dict[str, str]:
    return {one.model.name: one.node_id for one in plan.prefetches}


def test_a_model_that_lies_nowhere_goes_where_most_is_free() -> None:
    a, b = model("a"), model("b")
    plan = planned((a, b), on("n0", whole(b)), on("n1"))
    assert orders(plan) == {"a": "n1"}
    assert plan.prefetches[0].upstreams == ()


def test_a_copy_on_a_device_counts() -> None:
    pool = pool_of(on("n0"))
    pool.hear_worker("w0", worker(held_stages=(held("a"),)))
    facts = HostCopyFacts(now_s=NOW_S, models=(model("a"),), nodes={NodeId("n0"): on("n0")})
    assert plan_host_copies(facts, pool, RULES) == HostCopyPlan()


def test_a_copy_moves_from_a_node_that_drains() -> None:
    a = model("a")
    plan = planned((a,), on("n0", whole(a)), on("n1"), leaving=frozenset({NodeId("n0")}))
    assert orders(plan) == {"a": "n1"}
    assert plan.prefetches[0].upstreams == ("n0",)


def test_what_is_fetched_for_a_start_is_left_alone() -> None:
    a = model("a")
    coming = Transfer(digest=a.digest, source="s", done_bytes=1, total_bytes=60)
    assert planned((a,), replace(on("n0"), transfers=(coming,)), on("n1")) == HostCopyPlan()


def test_what_goes_on_stays_where_it_is() -> None:
    a = model("a")
    coming = Transfer(
        digest=a.digest, source="s", done_bytes=1, total_bytes=60, priority=FetchPriority.PREFETCH
    )
    busy = replace(on("n0", pool_bytes=200), transfers=(coming,))
    going = {a.digest: NodeId("n0")}
    assert orders(planned((a,), busy, on("n1"), going=going)) == {"a": "n0"}
    refused = frozenset({(NodeId("n0"), a.digest)})
    assert orders(planned((a,), on("n0"), on("n1"), going=going, refused=refused)) == {"a": "n1"}


def test_what_is_asked_for_most_has_the_room_that_there_is() -> None:
    models = tuple(model(name, part_bytes=60) for name in "abc")
    windows = ArrivalWindows(NOW_S)
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
    counts = [ArrivalCount(model=ModelName("c"), total=9, idle_s=0.0)]
    windows.hear(life, counts, NOW_S, NOW_S)
    full = on("n0", pool_bytes=500)
    plan = planned(models, full, arrivals=windows.recent())
    assert orders(plan) == {"c": "n0"}
    assert plan.left == ("d-a", "d-b"), "the share that is kept free is not filled"


CLUSTERS = st.lists(st.integers(2, 12), min_size=2, max_size=5)


@given(
    CLUSTERS,
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_a_copy_of_each_model_is_there_again_after_the_loss_of_any_node(
    pools: list[int], sizes: list[tuple[int, int]], lost: int
) -> None:
    """Pools in hundreds of bytes, models in sixties; where a model has no copy, no node had room
    for it.
    """
    models = tuple(model(f"m{at}", part_bytes=10 * size) for at, (size, _) in enumerate(sizes))
    nodes = {NodeId(f"n{at}"): on(f"n{at}", pool_bytes=100 * size) for at, size in enumerate(pools)}
    going: dict[str, NodeId] = {}

    def settle() -> HostCopyPlan:
        for _ in range(2 * len(models) + 2):
            plan = planned(models, *nodes.values(), going=dict(going))
            if not plan.prefetches:
                return plan
            going.clear()
            for one in plan.prefetches:
                facts = nodes[one.node_id]
                there = replace(whole(one.model), node_id=one.node_id)
                free_bytes = facts.pool_free_bytes - there.size_bytes
                assert free_bytes >= 0, "capacity is never exceeded"
                nodes[one.node_id] = replace(
                    facts, copies=(*facts.copies, there), pool_free_bytes=free_bytes
                )
        raise AssertionError("it does not come to rest")

    settle()
    gone = list(nodes)[lost % len(nodes)]
    nodes[gone] = replace(
        nodes[gone], copies=(), liveness=Liveness.DEAD, pool_free_bytes=nodes[gone].pool_bytes
    )
    plan = settle()
    assert not plan.waiting
    alive = [one for one in nodes.values() if one.liveness is Liveness.ALIVE]
    held_there = [one.digest for facts in alive for one in facts.copies]
    assert len(held_there) == len(set(held_there)), "one copy is enough"
    for one in models:
        has_room = any(
            one.spec.total_bytes <= facts.pool_free_bytes - 0.1 * facts.pool_bytes
            for facts in alive
        )
        assert one.digest in held_there or not has_room
        assert (one.digest in plan.left) == (one.digest not in held_there)
