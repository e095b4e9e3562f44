"""Points and spans of time: a moment on a host's clock, and the phases of a cold start."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point in time: a host's monotonic clock, and what to add to get wall time."""

    at_s: float
    wall_offset_s: float


def first_layer(lane: str) -> int:
    """Where a phase's lane stands among the others: by its first layer, behind what has no
    lane.
    """
    start = lane.partition("-")[0]
    return int(start) if start.isdecimal() else -1


class PhaseName(StrEnum):
    """Named parts of a cold start. All but ``queue`` count as work."""

    QUEUE = "queue"
    SCHEDULE = "schedule"
    DISPATCH = "dispatch"
    FETCH = "fetch"
    INIT = "init"
    LOAD = "load"
    CONVERT = "convert"
    RESTORE = "restore"
    ACTIVATE = "activate"
    SUBMIT = "submit"
    PREFILL = "prefill"
    DELIVER = "deliver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A leaf interval of a cold start, reported by the process that did the work: the work, and the
    transit that led to it.

    ``start_s`` and ``end_s`` are the host's CLOCK_MONOTONIC; ``wall_offset_s`` is what to add to
    get wall-clock time, so that intervals of several hosts can be laid on one axis.
    """

    name: PhaseName
    start_s: float
    end_s: float
    wall_offset_s: float
    process: str
    detail: str = ""
    lane: str = ""
    """Of a start that several workers share: the layers of the stage that it is of, ``0-4``.
    Empty: of no stage in particular."""
    tokens: int = 0
    """Of a prefill: those of the prompt that it ran; 0: it does not say."""
