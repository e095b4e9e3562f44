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
    return plan_host_copies(replace(facts, **given), pool_of(*nodes), RULES)


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


@given(
    CLUSTERS,
    st.lists(
        st.tuples(st.integers(1, 4), st.frozensets(st.integers(0, 4)), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 4),
)
def test_copies_that_are_one_too_many_make_way_after_the_loss_of_any_node(
    pools: list[int], wanted: list[tuple[int, frozenset[int], bool]], lost: int
) -> None:
    """Starts have left copies anywhere, several of one model too: what then has no copy would have
    no room even if each other model had one alone.
    """
    models = tuple(model(f"m{at}", part_bytes=10 * size) for at, (size, _, _) in enumerate(wanted))
    kept = tuple(one for one, (_, _, keep) in zip(models, wanted, strict=True) if keep)
    nodes = {NodeId(f"n{at}"): on(f"n{at}", pool_bytes=100 * size) for at, size in enumerate(pools)}
    names = list(nodes)

    def put(one: Model, where: NodeId) -> None:
        facts, there = nodes[where], replace(whole(one), node_id=where)
        free_bytes = facts.pool_free_bytes - there.size_bytes
        if free_bytes >= 0:
            copies = (*facts.copies, there)
            nodes[where] = replace(facts, copies=copies, pool_free_bytes=free_bytes)

    def drop(where: NodeId, *digests: str) -> None:
        facts = nodes[where]
        stay = tuple(one for one in facts.copies if one.digest not in digests)
        free_bytes = facts.pool_bytes - sum(one.size_bytes for one in stay)
        nodes[where] = replace(facts, copies=stay, pool_free_bytes=free_bytes)

    def places(one: Model) -> set[NodeId]:
        return {
            name
            for name, facts in nodes.items()
            if any(copy.digest == one.digest for copy in facts.copies)
        }

    for one, (_, at, _) in zip(models, wanted, strict=True):
        for number in sorted(at):
            if names[number % len(names)] not in places(one):
                put(one, names[number % len(names)])
    gone = names[lost % len(names)]
    drop(gone, *(one.digest for one in models))
    nodes[gone] = replace(nodes[gone], liveness=Liveness.DEAD)

    for _ in range(8 * len(models)):
        had = {one.digest for one in kept if places(one)}
        plan = planned(kept, *nodes.values())
        for one in plan.prefetches:
            put(one.model, one.node_id)
        for where, digest in plan.giving_way:
            drop(where, digest)
        assert had <= {one.digest for one in kept if places(one)}, "no last copy goes"
        if not plan.prefetches and not plan.giving_way:
            break
    else:
        raise AssertionError("it does not come to rest")
    for one in kept:
        for name, facts in nodes.items():
            spare_bytes = sum(
                copy.size_bytes
                for copy in facts.copies
                if not any(copy.digest == other.digest for other in kept)
                or any(other.digest == copy.digest and len(places(other)) > 1 for other in kept)
            )
            free_bytes = facts.pool_free_bytes - 0.1 * facts.pool_bytes
            no_room = one.spec.total_bytes > free_bytes + spare_bytes
            assert places(one) or no_room or facts.liveness is Liveness.DEAD, name


def test_what_is_asked_for_least_makes_way_and_nothing_that_is_needed() -> None:
    """Two copies of a, b and c each fill both nodes, and d has none."""
    a, b, c, d = (model(name, part_bytes=30) for name in "abcd")
    windows = ArrivalWindows(NOW_S)
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
    counts = [ArrivalCount(model=ModelName(name), total=9, idle_s=0.0) for name in "ab"]
    windows.hear(life, counts, NOW_S, NOW_S)
    nodes = tuple(on(name, whole(a), whole(b), whole(c), pool_bytes=600) for name in ("n0", "n1"))
    said = {"arrivals": windows.recent()}
    everything = (a, b, c, d)
    assert planned(everything, *nodes, **said).giving_way == ((N0, c.digest),)
    needed = {"needed": frozenset({(N0, c.digest)})}
    assert planned(everything, *nodes, **said, **needed).giving_way == ((N1, c.digest),)
    gone = {"gone": frozenset({(N1, c.digest)})}
    found = planned(everything, *nodes, **said, **gone).giving_way
    assert found == ((N0, a.digest),), "c has one copy left"
    forecast = {"next_on": {a.digest: frozenset({N0})}}
    found = planned(everything, *nodes, **said, **gone, **forecast).giving_way
    assert found == ((N0, b.digest),)
    read = replace(nodes[0], copies=tuple(replace(one, leases=1) for one in nodes[0].copies))
    assert planned(everything, read, nodes[1], **said).giving_way == ((N1, c.digest),)
    assert planned((a, b, d), *nodes, **said).giving_way == ((N0, c.digest),), "c is not kept"
    assert planned((a, b, c), *nodes, **said) == HostCopyPlan()


N0, N1, N2 = (NodeId(f"n{at}") for at in range(3))


def test_where_a_model_may_start_once_more_a_copy_is_fetched_ahead() -> None:
    a = model("a")
    room = {a.digest: frozenset({N1, N2})}
    plan = planned((a,), on("n0", whole(a)), on("n1", pool_bytes=500), on("n2"), next_on=room)
    assert orders(plan) == {"a": "n2"}, "the one with the most free bytes"
    assert plan.prefetches[0].upstreams == ("n0",)
    there = planned((a,), on("n0", whole(a)), on("n1", whole(a)), on("n2"), next_on=room)
    assert there == HostCopyPlan(), "one is enough"
    coming = Transfer(digest=a.digest, source="s", done_bytes=1, total_bytes=60)
    fetched = replace(on("n1"), transfers=(coming,))
    assert planned((a,), on("n0", whole(a)), fetched, on("n2"), next_on=room) == HostCopyPlan()


def test_a_forecast_that_is_being_fetched_goes_on_until_it_is_there() -> None:
    a = model("a")
    room, going = {a.digest: frozenset({N1, N2})}, {a.digest: N1}
    coming = Transfer(
        digest=a.digest, source="s", done_bytes=1, total_bytes=60, priority=FetchPriority.PREFETCH
    )
    busy = replace(on("n1", pool_bytes=200), transfers=(coming,))
    nodes = (on("n0", whole(a)), busy, on("n2"))
    assert orders(planned((a,), *nodes, next_on=room, going=going)) == {"a": "n1"}
    assert planned((a,), *nodes, going=going) == HostCopyPlan(), "it is not expected any more"
    refused = frozenset({(N1, a.digest)})
    elsewhere = planned((a,), *nodes, next_on=room, going=going, refused=refused)
    assert orders(elsewhere) == {"a": "n2"}


def test_forecasts_have_what_missing_copies_leave_and_no_more() -> None:
    """A pool of 400 keeps 40: of three models of 180 one has room beside what is there."""
    served, lost, other = (model(name, part_bytes=30) for name in ("a", "b", "c"))
    room = {served.digest: frozenset({N1})}
    nodes = (on("n0", whole(served), pool_bytes=220), on("n1", pool_bytes=400))
    plan = planned((served, lost), *nodes, next_on=room)
    assert orders(plan) == {"b": "n1"}, "what no memory holds goes first"
    full = (nodes[0], on("n1", whole(lost), whole(other), pool_bytes=400))
    assert planned((served, lost, other), *full, next_on=room) == HostCopyPlan()
    after = (nodes[0], on("n1", whole(lost), pool_bytes=400))
    assert orders(planned((served, lost), *after, next_on=room)) == {"a": "n1"}


@given(
    CLUSTERS,
    st.lists(
        st.tuples(st.integers(1, 4), st.frozensets(st.integers(0, 4))), min_size=1, max_size=8
    ),
)
def test_forecasts_take_free_room_alone_and_come_to_rest(
    pools: list[int], wanted: list[tuple[int, frozenset[int]]]
) -> None:
    """However many are expected wherever, pools keep their share, nothing goes, and each has one
    more copy at most.
    """
    models = tuple(model(f"m{at}", part_bytes=10 * size) for at, (size, _) in enumerate(wanted))
    names = [NodeId(f"n{at}") for at in range(len(pools))]
    nodes = {name: on(name, pool_bytes=100 * size) for name, size in zip(names, pools, strict=True)}
    room = {
        one.digest: frozenset(names[at % len(names)] for at in places)
        for one, (_, places) in zip(models, wanted, strict=True)
    }
    for _ in range(4 * len(models) + 2):
        plan = planned(models, *nodes.values(), next_on=room)
        if not plan.prefetches:
            break
        for one in plan.prefetches:
            facts = nodes[one.node_id]
            there = replace(whole(one.model), node_id=one.node_id)
            free_bytes = facts.pool_free_bytes - there.size_bytes
            assert free_bytes >= 0.1 * facts.pool_bytes - 1
            copies = (*facts.copies, there)
            nodes[one.node_id] = replace(facts, copies=copies, pool_free_bytes=free_bytes)
    assert not plan.prefetches
    for one in models:
        at = [name for name, facts in nodes.items() for c in facts.copies if c.digest == one.digest]
        assert len(at) == len(set(at)) <= 2
        assert len(at) < 2 or set(at) & room[one.digest]
        fits = any(
            one.spec.total_bytes <= nodes[name].pool_free_bytes - 0.1 * nodes[name].pool_bytes
            for name in room[one.digest]
        )
        assert set(at) & room[one.digest] or not fits or not at
