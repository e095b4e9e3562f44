"""Servers and offers from what workers and nodes report."""

from dataclasses import replace
from typing import Any

import pytest

from pilotlight.policy.cluster import (
    Copy,
    DeviceKind,
    LinkSpeed,
    Liveness,
    NodeFacts,
    OriginKind,
    Tier,
    Transfer,
)
from pilotlight.policy.coldstart.contention import FetchBooks, disk, incoming, outgoing
from pilotlight.policy.coldstart.facts import (
    DISK,
    ClusterFacts,
    link_capacities,
    servers_for,
    source_of,
)
from pilotlight.policy.coldstart.search import choose_start
from pilotlight.policy.coldstart.servers import Server, StartRequest, StartRules
from pilotlight.policy.coldstart.timings import SEED_STARTS, StageSample, Timings
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Stage
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.placement import Candidate
from pilotlight.policy.plan import Snapshot
from pilotlight.policy.testing import NOW_S, Epoch, model, node, worker

MODEL = replace(model(), uri="s3://bucket/m")
PARTS = (0, 1, 2, 3, 4, 5)


def node_named(name: str, **changes: Any) -> NodeFacts:
    named = replace(node(), node_id=NodeId(name), dataplane_port=7, dataplane_host="h")
    return replace(named, **changes)


def copy_on(name: str, tier: Tier, parts: tuple[int, ...] = PARTS) -> Copy:
    return Copy(digest=MODEL.digest, node_id=NodeId(name), tier=tier, parts=parts, size_bytes=60)


def candidate(number: int, node: NodeFacts, *, engine_up: bool = True) -> Candidate:
    facts = replace(worker(number, engine_up=engine_up), node_id=node.node_id)
    return Candidate(worker=facts, node=node, free_bytes=700, evictable_bytes=300)


def server_on(here: NodeFacts, *others: NodeFacts, timings: Timings | None = None) -> Server:
    facts = ClusterFacts(
        nodes={one.node_id: one for one in (here, *others)}, timings=timings or Timings()
    )
    return servers_for(MODEL, [candidate(0, here)], facts)[0]


def test_a_warm_worker_and_a_bare_one() -> None:
    here = node_named("a")
    facts = ClusterFacts(nodes={here.node_id: here})
    candidates = [candidate(0, here), candidate(1, here, engine_up=False)]
    warm, bare = servers_for(MODEL, candidates, facts)
    assert (warm.context_s, warm.libraries_s) == (0.0, 0.0)
    assert bare.libraries_s == SEED_STARTS[DeviceKind.SIM].libraries_s
    assert warm.free_bytes == 1000
    assert warm.decode_s > 0


def test_what_is_in_the_host_pool_is_present() -> None:
    here = node_named("a", copies=(copy_on("a", Tier.HOST, (0, 1)),))
    assert server_on(here).present == frozenset({0, 1})


def test_offers_the_nearest_first() -> None:
    here = node_named(
        "a",
        copies=(copy_on("a", Tier.DISK),),
        links=(LinkSpeed(kind=OriginKind.DISK, name="disk", bytes_per_s=30.0),),
    )
    having = node_named("b", copies=(copy_on("b", Tier.HOST, (1, 2)),), nic_bytes_per_s=50.0)
    receiving = node_named(
        "c",
        transfers=(
            Transfer(
                digest=MODEL.digest, source="b", done_bytes=20, total_bytes=60, bytes_per_s=10.0
            ),
        ),
    )
    offers = server_on(here, receiving, having).offers
    assert [one.source for one in offers] == [DISK, "b", "c", "s3://bucket"]
    on_disk, peer, chain, source = offers
    assert on_disk.links == (disk(here.node_id),)
    assert peer.links == (incoming(here.node_id), outgoing("b"))
    assert (peer.parts, peer.bytes_per_s, peer.behind_s) == (frozenset({1, 2}), 50.0, 0.0)
    assert (chain.parts, chain.behind_s) == (None, pytest.approx(4.0))
    assert source.links == (incoming(here.node_id), outgoing("s3://bucket"))


@pytest.mark.parametrize(
    "changes", [{"liveness": Liveness.SUSPECT}, {"dataplane_port": 0}, {"node_id": NodeId("bad")}]
)
def test_nodes_that_are_not_asked(changes: dict[str, Any]) -> None:
    here = node_named("a", distrusted=("bad",))
    other = replace(
        node_named("b", copies=(copy_on("b", Tier.HOST),)),
        **changes,
    )
    assert [one.source for one in server_on(here, other).offers] == ["s3://bucket"]


def test_no_more_peers_than_are_allowed() -> None:
    others = [
        node_named(f"p{at}", copies=(copy_on(f"p{at}", Tier.HOST),), nic_bytes_per_s=10.0 + at)
        for at in range(9)
    ]
    offers = server_on(node_named("a"), *others).offers
    assert [one.source for one in offers[:-1]] == ["p8", "p7", "p6", "p5"]


def test_what_was_learned_limits_an_offer() -> None:
    sample = StageSample(
        model=MODEL.name,
        device_kind=DeviceKind.SIM,
        node_id=NodeId("a"),
        source=source_of(MODEL),
        fetch_bytes_per_s=3.0,
    )
    learned = Timings().learned([sample])
    assert server_on(node_named("a"), timings=learned).offers[-1].bytes_per_s == 3.0


def test_links_of_nodes_have_what_nodes_say() -> None:
    here = node_named("a", links=(LinkSpeed(kind=OriginKind.DISK, name="disk", bytes_per_s=30.0),))
    assert link_capacities([here]) == {
        incoming(here.node_id): 100.0,
        outgoing(here.node_id): 100.0,
        disk(here.node_id): 30.0,
    }


def test_with_one_stage_it_agrees_with_the_running_choice() -> None:
    """Nodes that differ in their links alone: both take the fastest, and predict one fetch time."""
    nodes = [node_named(f"n{at}", nic_bytes_per_s=10.0 * (at + 1)) for at in range(3)]
    workers = [replace(worker(at), node_id=one.node_id) for at, one in enumerate(nodes)]
    snapshot = Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=(MODEL,),
        nodes=tuple(nodes),
        workers=tuple(workers),
    )
    running = choose_scheme(MODEL, snapshot, SchemeRules()).scheme
    candidates = [
        Candidate(worker=one, node=at, free_bytes=1000, evictable_bytes=0)
        for one, at in zip(workers, nodes, strict=True)
    ]
    facts = ClusterFacts(nodes={one.node_id: one for one in nodes})
    request = StartRequest(model=MODEL, books=FetchBooks(capacities=link_capacities(nodes)))
    found = choose_start(request, servers_for(MODEL, candidates, facts), StartRules(max_stages=1))
    assert running is not None
    assert found is not None
    assert [one.worker_id for one in found.stages] == [running.placements[0].worker_id] == ["w2"]
    assert found.stages[0].stage == Stage(0, 4)
    assert found.stages[0].cost.fetch_s == pytest.approx(2.0)
