"""Which of the jobs that wait goes to the next idle process, so that one owner's work does not
delay all others'.

Short jobs go first, and one process is kept for them. Among equals, owners take turns: each job has
a ``turn`` from when it came, one after the last of its owner's (start-time fair queueing). No model
has all processes, and no owner all those for long jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneJob:
    """A job that waits or runs."""

    number: int
    """In order of arrival."""
    owner: str
    model: str
    """Whose foreign code it runs; empty for none."""
    long: bool
    turn: int = 0


def next_job(
    waiting: Sequence[LaneJob], running: Sequence[LaneJob], processes: int
) -> LaneJob | None:
    """The job to begin now, or None when none may.

    ``processes``: how many jobs run at a time, at least 2.
    """
    if len(running) >= processes:
        return None
    allowed = [job for job in waiting if _allowed(job, running, processes)]
    return min(allowed, key=lambda job: (job.long, job.turn, job.number), default=None)


def turn_of(owner: str, waiting: Sequence[LaneJob], now_turn: int) -> int:
    """The turn of a new job; ``now_turn`` is that of the job begun last."""
    return max((job.turn for job in waiting if job.owner == owner), default=now_turn) + 1


def _allowed(job: LaneJob, running: Sequence[LaneJob], processes: int) -> bool:
    if job.model and sum(other.model == job.model for other in running) >= processes - 1:
        return False
    if not job.long:
        return True
    others = [other for other in running if other.long]
    return len(others) < processes - 1 and sum(other.owner == job.owner for other in others) < max(
        1, processes - 2
    )
