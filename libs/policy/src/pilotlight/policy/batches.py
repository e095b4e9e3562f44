"""How many lines of a batch a gateway sends: what clients wait for goes first."""

from dataclasses import dataclass

SHARE = 2
"""Lines take at most one in so many of the answers that a gateway makes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """What a gateway does at the moment."""

    lines: int
    """Lines that are under way."""
    limit: int
    """Lines that may be."""
    live: int
    """Answers that are made, held ones and those of lines included."""
    held: int
    """Of them, those that wait for an instance."""
    places: int
    """Answers that may be made at a time."""


def lines_to_start(load: BatchLoad) -> int:
    """How many lines may be sent now.

    1. None while a client waits: what is held and is no line.
    2. As many as may be under way, and leave the larger part of the gateway to clients.
    """
    if load.held > load.lines:  # 1
        return 0
    room = load.places // SHARE - load.live
    return max(0, min(load.limit - load.lines, room))  # 2
