"""Rows of the live view: links with what goes over them now, and groups of workers.

Pure: facts in, rows out, as in ``live_rows``.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pilotlight.policy.cluster import (
    PEER_LINK,
    LinkSpeed,
    Liveness,
    NodeFacts,
    OriginKind,
    OriginShare,
)
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.plan import Instance, InstanceState


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A link over which a node took bytes, or takes them now."""

    key: str
    node_id: str
    """Who takes."""
    kind: str
    """Of what gives: ``disk``, ``peer`` or ``source``."""
    origin: str
    """What gives: a node's id, a bucket, a hub, the host's folders, a disk."""
    bytes_per_s: float
    """When it was last busy, all reads together; 0 while that is not measured yet."""
    transfers: int
    """Fetches under way that have bytes of it."""
    moved_bytes: int
    """What those have of it."""


class GroupStage(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's layers of a group."""

    start: int
    stop: int
    worker_id: str
    node_id: str


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that several workers are together."""

    key: str
    model: str
    state: str
    stages: tuple[GroupStage, ...]
    """The lead first."""
    nodes: int
    targets: int
    """How many instances it is to become."""
    in_flight: int


def link_rows(nodes: Iterable[NodeFacts]) -> Iterator[LinkRow]:
    """Links of nodes that report, with the fetches that take from them.

    Args:
        nodes: what their loaders reported last.
    """
    for node in nodes:
        if node.liveness is Liveness.DEAD:
            continue
        shares = [share for transfer in node.transfers for share in transfer.origins]
        for link in node.links:
            its = [share for share in shares if _goes_over(share, link)]
            yield _link_row(node, link.kind, link.name, link.bytes_per_s, its)
        unmeasured: dict[tuple[OriginKind, str], list[OriginShare]] = {}
        for share in shares:
            if not any(_goes_over(share, link) for link in node.links):
                unmeasured.setdefault((share.kind, share.name), []).append(share)
        for (kind, name), its in unmeasured.items():
            yield _link_row(node, kind, name, 0.0, its)


def group_rows(instances: Iterable[Instance]) -> Iterator[GroupRow]:
    """Instances of several workers that start, serve or drain.

    Args:
        instances: as the bucket shows them.
    """
    shown = SERVING | STARTING | {InstanceState.DRAINING}
    for one in instances:
        if len(one.placements) > 1 and one.state in shown:
            yield GroupRow(
                key=one.instance_id,
                model=one.model,
                state=one.state.value,
                stages=tuple(
                    GroupStage(
                        start=placement.stage.start,
                        stop=placement.stage.stop,
                        worker_id=placement.worker_id,
                        node_id=placement.node_id,
                    )
                    for placement in one.placements
                ),
                nodes=len({placement.node_id for placement in one.placements}),
                targets=one.targets,
                in_flight=one.in_flight,
            )


def _goes_over(share: OriginShare, link: LinkSpeed) -> bool:
    if share.kind is not link.kind:
        return False
    if share.kind is OriginKind.PEER:
        return link.name == PEER_LINK + share.name
    # A source is named by its URI, and its link by how that begins.
    return share.name == link.name or share.name.startswith(link.name.rstrip("/") + "/")


def _link_row(
    node: NodeFacts, kind: OriginKind, name: str, bytes_per_s: float, its: Sequence[OriginShare]
) -> LinkRow:
    origin = name.removeprefix(PEER_LINK)
    return LinkRow(
        key=f"{node.node_id} {kind.value} {origin}",
        node_id=node.node_id,
        kind=kind.value,
        origin=origin,
        bytes_per_s=bytes_per_s,
        transfers=len(its),
        moved_bytes=sum(share.size_bytes for share in its),
    )
