"""Chains by the facts of nodes and instances: which nodes give, which join, and for which parts."""

from dataclasses import replace

import pytest

from pilotlight.policy.cluster import Copy, Liveness, NodeFacts, Tier
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Stage
from pilotlight.policy.multicast import chains_of
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.policy.testing import instance, members, model, node, nodes_named


def facts(
    name: str, *, parts: tuple[int, ...] = (), port: int = 7000, **changes: object
) -> NodeFacts:
    copies = (
        (
            Copy(
                digest=model().digest,
                node_id=NodeId(name),
                tier=Tier.HOST,
                parts=parts,
                size_bytes=1,
            ),
        )
        if parts
        else ()
    )
    made = replace(
        node(copies=copies), node_id=NodeId(name), dataplane_host=name, dataplane_port=port
    )
    return replace(made, **changes)


def starting(
    name: str, upstreams: str = "", state: InstanceState = InstanceState.FETCHING
) -> Instance:
    return replace(
        instance(instance_id=f"i-{name}", state=state), placements=(placement(name, upstreams),)
    )


def placement(name: str, upstreams: str = "", stage: Stage | None = None) -> Placement:
    made = instance().placements[0]
    return replace(
        made, node_id=NodeId(name), upstreams=nodes_named(upstreams), stage=stage or made.stage
    )


EVERY = (0, 1, 2, 3, 4, 5)


def test_a_node_that_has_them_begins_and_those_that_start_follow() -> None:
    nodes = [facts("a", parts=EVERY), facts("b"), facts("c"), facts("d")]
    plan = chains_of(model(), nodes, [starting("b", "a")], [placement("c")])
    assert members(plan) == {"a": ("b", "c")}
    assert plan.ahead[NodeId("c")] == nodes_named("b a")
    ended = [starting("b", "a", InstanceState.READY), starting("c", "b a", InstanceState.FAILED)]
    assert members(chains_of(model(), nodes, ended, [placement("d")])) == {"a": ("d",)}


@pytest.mark.parametrize(
    "away",
    [
        {"liveness": Liveness.DEAD},
        {"liveness": Liveness.SUSPECT},
        {"draining": True},
        {"dataplane_port": 0},
        {
            "copies": (
                Copy(
                    digest=model("x").digest,
                    node_id=NodeId("a"),
                    tier=Tier.HOST,
                    parts=EVERY,
                    size_bytes=1,
                ),
            )
        },
        {
            "copies": (
                Copy(
                    digest=model().digest,
                    node_id=NodeId("a"),
                    tier=Tier.DISK,
                    parts=EVERY,
                    size_bytes=1,
                ),
            )
        },
    ],
)
def test_who_cannot_give_is_asked_for_nothing(away: dict[str, object]) -> None:
    nodes = [facts("a", parts=EVERY, **away), facts("b")]
    plan = chains_of(model(), nodes, [], [placement("b")])
    (chain,) = plan.chains
    assert (plan.upstreams[NodeId("b")], chain.members, chain.source) == ((), (NodeId("b"),), None)


@pytest.mark.parametrize("change", [{"liveness": Liveness.SUSPECT}, {"draining": True}])
def test_who_is_silent_or_drains_keeps_those_behind_it_and_gets_nobody_new(
    change: dict[str, object],
) -> None:
    nodes = [facts("a", parts=EVERY, **change), facts("b"), facts("c")]
    plan = chains_of(model(), nodes, [starting("b", "a")], [placement("c")])
    assert plan.upstreams[NodeId("b")] == ("a",)
    assert plan.upstreams[NodeId("c")] == nodes_named("b a")
    nodes = [facts("a", parts=EVERY), facts("b", **change), facts("c")]
    assert chains_of(model(), nodes, [starting("b", "a"), starting("c", "b a")]).upstreams[
        NodeId("c")
    ] == nodes_named("b a")
    assert members(chains_of(model(), nodes, [starting("b", "a")], [placement("c")])) == {
        "a": ("b",),
        None: ("c",),
    }


def test_who_is_dead_is_before_nobody_though_its_row_says_that_it_starts() -> None:
    nodes = [facts("a", parts=EVERY), facts("b", liveness=Liveness.DEAD), facts("c")]
    plan = chains_of(model(), nodes, [starting("b", "a"), starting("c", "b a")])
    assert members(plan) == {"a": ("c",)}
    assert plan.upstreams == {NodeId("c"): ("a",)}


def test_a_node_joins_once_for_what_its_workers_lack_together() -> None:
    nodes = [facts("a", parts=EVERY), facts("b", parts=(0, 1)), facts("c")]
    stages = [
        placement("b", stage=Stage(0, 2)),
        placement("b", stage=Stage(2, 4)),
        placement("c", stage=Stage(0, 1)),
    ]
    plan = chains_of(model(), nodes, [], stages)
    assert members(plan) == {"a": ("b", "c")}
    # Of what c wants (0 and 1), b has both.
    assert plan.upstreams[NodeId("c")] == nodes_named("b a")
    complete = chains_of(model(), nodes, [], [placement("a")])
    assert (complete.chains, complete.upstreams) == ((), {}), "what is there is not fetched"
