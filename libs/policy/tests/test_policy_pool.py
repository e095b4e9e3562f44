"""The parameter pool is what reports say, after any of them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import (
    Copy,
    HeldState,
    LinkSpeed,
    Liveness,
    NodeFacts,
    OriginKind,
    Tier,
    WorkerFacts,
)
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.model import Stage
from pilotlight.policy.pool import ParameterPool
from pilotlight.policy.testing import copy, held, model, node, worker

M = model()
ALL = tuple(range(len(M.spec.part_bytes)))


def on(name: str, *copies: Copy, port: int = 1) -> NodeFacts:
    named = NodeId(name)
    there = tuple(replace(one, node_id=named) for one in copies)
    return replace(node(copies=there), node_id=named, dataplane_port=port)


def whole(name: str = "m", tier: Tier = Tier.HOST) -> Copy:
    return replace(copy(name), parts=ALL, tier=tier)


COPIES = st.frozensets(
    st.tuples(st.sampled_from("ab"), st.sampled_from((Tier.HOST, Tier.DISK)), st.booleans()),
    max_size=3,
)
STAGES = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(list(HeldState)), st.booleans()), max_size=3
)
EVENTS = st.lists(
    st.tuples(st.just("node"), st.sampled_from(("n0", "n1")), st.none() | COPIES)
    | st.tuples(st.just("worker"), st.sampled_from(("w0", "w1")), st.none() | STAGES)
    | st.tuples(st.just("restart"), st.just(""), st.none()),
    max_size=25,
)


@given(EVENTS)
def test_the_pool_is_the_truth_after_any_reports_losses_and_restarts(
    events: list[tuple[str, str, object]],
) -> None:
    pool = ParameterPool()
    nodes: dict[str, NodeFacts] = {}
    workers: dict[str, WorkerFacts] = {}
    for kind, name, what in events:
        if kind == "restart":
            pool = ParameterPool()
            for node_id, facts in nodes.items():
                pool.hear_node(NodeId(node_id), facts)
            for worker_id, view in workers.items():
                pool.hear_worker(worker_id, view)
        elif what is None:
            if kind == "node":
                nodes.pop(name, None)
                pool.hear_node(NodeId(name), None)
            else:
                workers.pop(name, None)
                pool.hear_worker(name, None)
        elif kind == "node":
            assert isinstance(what, frozenset)
            nodes[name] = on(
                name,
                *(
                    replace(whole(one, tier), parts=ALL if is_whole else (0,))
                    for one, tier, is_whole in sorted(what)
                ),
            )
            pool.hear_node(NodeId(name), nodes[name])
        else:
            assert isinstance(what, list)
            stages = tuple(
                replace(held(one, f"{name}-{at}", state=state), stage=Stage(0, 4 if all_of else 2))
                for at, (one, state, all_of) in enumerate(what)
            )
            workers[name] = replace(worker(held_stages=stages), node_id=NodeId("n0"))
            pool.hear_worker(name, workers[name])
    for name in "ab":
        digest = Digest(f"d-{name}")
        in_pools = {
            (one.node_id, one.tier, one.parts)
            for facts in nodes.values()
            for one in facts.copies
            if one.digest == digest
        }
        loaded = {HeldState.READY, HeldState.DRAINING}
        on_devices = {
            (worker_id, one.stage)
            for worker_id, view in workers.items()
            for one in view.held
            if one.digest == digest and one.state in loaded
        }
        found = pool.copies(digest)
        assert {
            (one.node_id, one.tier, one.parts) for one in found if one.stage is None
        } == in_pools
        assert {(one.holder, one.stage) for one in found if one.stage is not None} == on_devices
        memory = {
            node_id for node_id, tier, parts in in_pools if tier is Tier.HOST and parts == ALL
        }
        memory |= {NodeId("n0") for _, stage in on_devices if stage == Stage(0, 4)}
        assert pool.whole_on(digest, M.spec) == memory
        assert (digest in pool.in_memory) == bool(
            on_devices or any(tier is Tier.HOST for _, tier, _ in in_pools)
        )


def test_the_nearest_source_comes_first() -> None:
    pool = ParameterPool()
    here, slow, fast = on("here"), on("slow", whole()), on("fast", whole())
    here = replace(
        here, links=(LinkSpeed(kind=OriginKind.PEER, name="peer://slow", bytes_per_s=1.0),)
    )
    disk = replace(here, copies=(replace(whole(tier=Tier.DISK), node_id=NodeId("here")),))
    mute, dead = on("mute", whole(), port=0), replace(on("dead", whole()), liveness=Liveness.DEAD)
    part = on("part", copy())
    nodes = {one.node_id: one for one in (disk, slow, fast, mute, dead, part)}
    for node_id, facts in nodes.items():
        pool.hear_node(node_id, facts)
    found = pool.nearest(M.digest, ALL, M.spec, NodeId("here"), nodes)
    assert [one.node_id for one in found] == ["here", "fast", "slow"]
    assert [one.tier for one in found] == [Tier.DISK, Tier.HOST, Tier.HOST]
    first = pool.nearest(M.digest, (0,), M.spec, NodeId("here"), nodes)
    assert {one.node_id for one in first} == {"here", "fast", "slow", "part"}
