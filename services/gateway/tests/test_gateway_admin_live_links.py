"""Rows of links and groups: what goes over each link now, and whose workers are together."""

from dataclasses import replace

import pytest

from pilotlight.gateway.admin.live_links import GroupStage, LinkRow, group_rows, link_rows
from pilotlight.policy.cluster import (
    LinkSpeed,
    Liveness,
    NodeFacts,
    OriginKind,
    OriginShare,
    Transfer,
)
from pilotlight.policy.ids import Digest, NodeId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import instance, node


def share(kind: OriginKind, name: str, size_bytes: int) -> OriginShare:
    return OriginShare(kind=kind, name=name, size_bytes=size_bytes)


def fetching(*shares: OriginShare) -> Transfer:
    return Transfer(digest=Digest("d"), source="s", done_bytes=1, total_bytes=2, origins=shares)


def rows_of(*nodes: NodeFacts) -> dict[str, LinkRow]:
    found = list(link_rows(nodes))
    assert len({row.key for row in found}) == len(found)
    return {row.key: row for row in found}


@pytest.mark.parametrize(
    ("kind", "link", "given", "other"),
    [
        (OriginKind.PEER, "peer://n1", "n1", "n10"),
        (OriginKind.DISK, "disk", "disk", ""),
        (OriginKind.SOURCE, "s3://fast", "s3://fast/models/a", "s3://faster/models/a"),
        (OriginKind.SOURCE, "file://", "file:///models/a", "hf://org/a"),
        (OriginKind.SOURCE, "hf://", "hf://org/a@main", "s3://b/a"),
    ],
)
def test_bytes_go_over_the_link_of_their_origin(
    kind: OriginKind, link: str, given: str, other: str
) -> None:
    busy = replace(
        node(),
        links=(LinkSpeed(kind=kind, name=link, bytes_per_s=50.0),),
        transfers=(
            fetching(share(kind, given, 7)),
            fetching(share(kind, given, 5), *([share(kind, other, 3)] if other else [])),
        ),
    )
    found = rows_of(busy)
    row = found.pop(f"n0 {kind.value} {link.removeprefix('peer://')}")
    assert (row.bytes_per_s, row.transfers, row.moved_bytes) == (50.0, 2, 12)
    # One that is not measured yet is there all the same.
    assert [(one.origin, one.bytes_per_s, one.moved_bytes) for one in found.values()] == (
        [(other, 0.0, 3)] if other else []
    )


def test_a_link_that_rests_is_shown_with_its_speed_and_a_dead_nodes_is_not() -> None:
    links = (LinkSpeed(kind=OriginKind.PEER, name="peer://n9", bytes_per_s=8.0),)
    resting = replace(node(), links=links)
    dead = replace(resting, node_id=NodeId("n1"), liveness=Liveness.DEAD)
    assert [
        (one.node_id, one.origin, one.transfers) for one in rows_of(resting, dead).values()
    ] == [("n0", "n9", 0)]


@pytest.mark.parametrize("state", list(InstanceState))
def test_a_group_is_an_instance_of_several_workers_that_is_there(state: InstanceState) -> None:
    alone = replace(instance(), state=state)
    (lead,) = alone.placements
    stages = (
        replace(lead, stage=Stage(0, 2)),
        replace(lead, stage=Stage(2, 4), worker_id=WorkerId("w1"), node_id=NodeId("n1")),
    )
    group = replace(alone, placements=stages, targets=2)
    found = list(group_rows([alone, group]))
    if state in (InstanceState.GONE, InstanceState.FAILED):
        assert found == []
        return
    (row,) = found
    assert (row.key, row.model, row.state, row.nodes, row.targets) == ("i", "m", state.value, 2, 2)
    assert row.stages == (
        GroupStage(start=0, stop=2, worker_id="w0", node_id="n0"),
        GroupStage(start=2, stop=4, worker_id="w1", node_id="n1"),
    )
