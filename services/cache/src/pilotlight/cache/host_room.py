"""What stages still take of a host pool; several stages of one model may share a node."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pilotlight.common.messages.room import Reserve
from pilotlight.policy.cluster import Copy, NodeFacts


@dataclass(frozen=True, slots=True)
class HostNeed:
    """What one stage has in its node's host pool."""

    host_bytes: int
    """All of it."""
    parts: Mapping[int, int] = field(default_factory=dict[int, int])
    """Which parts, with their bytes; none: nobody says."""


def parts_of(request: Reserve) -> Mapping[int, int]:
    """The parts that a start asks room for, with their bytes; none of a release that does not
    say.
    """
    return dict(zip(request.host_parts, request.host_part_bytes, strict=False))


def missing_bytes(
    node: NodeFacts, copy: Copy | None, wanted: Iterable[HostNeed], part_bytes: Sequence[int]
) -> int:
    """What stages of one model still take of a pool, together.

    1. parts that several of them want come once
    2. what a copy has of other parts takes nothing of it; its size holds what is on its way, too
    3. of stages that do not say which parts they want, the largest counts, less all that is there

    Args:
        node: Whose pool.
        copy: What is there of the model.
        wanted: By stage.
        part_bytes: Of the model's parts; none where it is not known.
    """
    there = copy.size_bytes if copy is not None else 0
    parts: dict[int, int] = {}
    missing = 0
    for one in wanted:
        if one.parts:
            parts.update(one.parts)  # 1
        else:
            missing = max(missing, one.host_bytes - there)  # 3
    if parts:
        kept = copy.parts if copy is not None else ()
        others = [one for one in kept if one not in parts and one < len(part_bytes)]
        of_others = node.pool_room_bytes(tuple(part_bytes[one] for one in others))  # 2
        needed = node.pool_room_bytes(tuple(parts.values()))
        missing = max(missing, needed - max(0, there - of_others))
    return missing


def is_in_a_row(node: NodeFacts, need_bytes: int, free_bytes: int) -> bool:
    """Whether this many bytes lie in a row for sure, next to what is promised to others.

    ``free_bytes``: see ``Books.host_free_bytes``.
    """
    promised = max(0, node.pool_free_bytes - free_bytes)
    largest = node.pool_largest_free_bytes
    return largest is None or need_bytes + promised <= largest
