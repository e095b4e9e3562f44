"""From the phases of a cold start to its figures: which time was work, and how much of the cold
start it explains.

::

                 dispatched                       first token
                     │◄────────── window ──────────────►│
    queue ──────┤    │                                  │         counts nowhere
    schedule   ├────┤│                                  │         before the window: seconds, no coverage
    fetch            │  ├──────────┤                    │
    load             │       ├────────────┤             │         overlaps fetch: counted once
    prefill          │                       ├────────┤ │
    covered          │  ├─────────────────┤  ├────────┤ │
    coverage = covered / window
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pilotlight.policy.phase import Moment, Phase, PhaseName

SAME_HOST_S = 0.05
"""Offsets of one host, taken at different moments, differ by less: its intervals are compared as
they are."""
MAX_TRANSIT_S = 10.0
"""What seems to have been under way for longer comes from a clock that cannot be compared, or is no
news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Time in which at least one process was in a phase."""

    name: PhaseName
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A part of the window that no phase explains, in seconds after dispatch."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a cold start its phases explain."""

    window_s: float
    """From the dispatch of the first command to the first token."""
    covered_s: float
    coverage: float
    """Share of the window; 1 for an empty window."""
    gaps: tuple[Gap, ...]
    seconds: tuple[PhaseSeconds, ...]
    """By phase, in order of first start; ``queue`` too, and what lies outside the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSeconds:
    """What a start took from the host pool on, in seconds, by its phases: the terms of a miss
    (mCache, section 4) that do not depend on where its bytes come from. None: it had no such phase.

    The scheduler learns these from starts, and a build writes them into its profile.
    """

    load_s: float | None = None
    """Parameters from the host pool to the device, without what their conversion took."""
    init_s: float | None = None
    """Leasing them and making room, of a start that restored nothing."""
    restore_s: float | None = None
    """The same of one that restored an artifact, in the place of ``init_s``."""


Interval = tuple[float, float]
"""Half-open [start, end), seconds on one axis."""


def coverage_of(phases: Iterable[Phase], dispatched: Moment, first_token: Moment) -> Coverage:
    """Figures of a cold start on the axis of the dispatching host.

    1. bring every interval to the axis of ``dispatched``
    2. seconds of a phase: the union of its intervals
    3. clip all leaf intervals but ``queue`` to the window, take their union
    4. what is left of the window are the gaps
    """
    offset_s = dispatched.wall_offset_s
    start_s = dispatched.at_s
    end_s = max(start_s, aligned_s(first_token.at_s, first_token.wall_offset_s, offset_s))
    by_name = _intervals(phases, offset_s)  # 1
    seconds = _seconds(by_name)  # 2
    work = [
        interval
        for name, intervals in by_name.items()
        if name is not PhaseName.QUEUE
        for interval in intervals
    ]
    covered = union((max(a, start_s), min(b, end_s)) for a, b in work)  # 3
    window_s = end_s - start_s
    covered_s = total_s(covered)
    return Coverage(
        window_s=window_s,
        covered_s=covered_s,
        coverage=min(1.0, covered_s / window_s) if window_s > 0 else 1.0,
        gaps=_gaps(covered, start_s, end_s),  # 4
        seconds=seconds,
    )


def seconds_of(phases: Iterable[Phase], wall_offset_s: float) -> tuple[PhaseSeconds, ...]:
    """Seconds by phase, on the axis of the host with this offset: as ``coverage_of`` has them."""
    return _seconds(_intervals(phases, wall_offset_s))


def load_seconds(seconds: Iterable[PhaseSeconds]) -> LoadSeconds:
    """What the phases of a start say of its load. A restored one may have some ``init``, too."""
    by_name = {one.name: one.seconds for one in seconds}
    began_s, restored_s = by_name.get(PhaseName.INIT), by_name.get(PhaseName.RESTORE)
    return LoadSeconds(
        load_s=by_name.get(PhaseName.LOAD),
        init_s=began_s if restored_s is None else None,
        restore_s=restored_s + (began_s or 0.0) if restored_s is not None else None,
    )


def aligned_s(at_s: float, wall_offset_s: float, to_wall_offset_s: float) -> float:
    """A reading of one host's monotonic clock as a reading of another's; unchanged within one
    host.
    """
    shift_s = wall_offset_s - to_wall_offset_s
    return at_s if abs(shift_s) < SAME_HOST_S else at_s + shift_s


def departed_s(sent: Moment | None, received: Moment) -> float:
    """When the transit began that ended at ``received``, on the receiver's clock: a phase begins
    with what led to it.

    ``received`` itself where the sender does not say (an earlier release), or where it cannot be
    believed: it lies after ``received``, or more than ``MAX_TRANSIT_S`` before.
    """
    if sent is None:
        return received.at_s
    at_s = aligned_s(sent.at_s, sent.wall_offset_s, received.wall_offset_s)
    return at_s if 0 <= received.at_s - at_s <= MAX_TRANSIT_S else received.at_s


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Disjoint intervals that cover the same points, in order; empty and reversed ones are
    dropped.
    """
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def total_s(disjoint: Sequence[Interval]) -> float:
    """Summed length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def _intervals(phases: Iterable[Phase], offset_s: float) -> dict[PhaseName, list[Interval]]:
    """Of each phase on one axis, in order of first start."""
    by_name: dict[PhaseName, list[Interval]] = {}
    for phase in sorted(
        phases, key=lambda one: aligned_s(one.start_s, one.wall_offset_s, offset_s)
    ):
        interval = (
            aligned_s(phase.start_s, phase.wall_offset_s, offset_s),
            aligned_s(phase.end_s, phase.wall_offset_s, offset_s),
        )
        by_name.setdefault(phase.name, []).append(interval)
    return by_name


def _seconds(by_name: Mapping[PhaseName, Sequence[Interval]]) -> tuple[PhaseSeconds, ...]:
    return tuple(
        PhaseSeconds(name=name, seconds=total_s(union(intervals)))
        for name, intervals in by_name.items()
    )


def _gaps(covered: Sequence[Interval], start_s: float, end_s: float) -> tuple[Gap, ...]:
    gaps: list[Gap] = []
    reached_s = start_s
    for start, end in (*covered, (end_s, end_s)):
        if start > reached_s:
            gaps.append(Gap(start_s=reached_s - start_s, end_s=start - start_s))
        reached_s = max(reached_s, end)
    return tuple(gaps)
