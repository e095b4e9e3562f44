"""Which of the jobs that wait goes to the next idle process, so that one owner's work does not
delay all others'.

Short jobs go first, and one process is kept for them. Among equals, owners take turns: each job has
a ``turn`` from when it came, one after the last of its owner's (start-time fair queueing). No model
has all processes, and no owner and no model all those for long jobs: with three processes or more,
a model's short jobs go on beside its long ones.

To load a model's bundle takes a process as long as a thousand short jobs: where one holds it, its
jobs wait for that, and another one loads it meanwhile with no job behind it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLoad:
    """What waits, as an owner's next job finds it."""

    jobs: int
    bytes: int
    own_jobs: int
    own_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBounds:
    """What may wait in all."""

    jobs: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneHolders:
    """Processes that hold a model's bundle, as its next job finds them."""

    idle: bool
    """One has nothing to do."""
    busy: bool
    """One is at work, for this model or for another."""
    given: bool
    """Another process is being given the bundle, or asked for what it may lack."""


def admit_job(load: LaneLoad, bounds: LaneBounds, job_bytes: int) -> bool:
    """Whether a job of ``job_bytes`` may wait.

    1. Where nothing waits, any job may: what it brings has bounds of its own.
    2. With it, an owner holds no more, of jobs and of bytes, than all owners leave free: alone it
       gets half, and the next one finds room, however much one sends.
    """
    if not load.jobs:  # 1
        return True
    return (  # 2
        load.own_jobs + 1 <= bounds.jobs - (load.jobs + 1)
        and load.own_bytes + job_bytes <= bounds.bytes - (load.bytes + job_bytes)
    )


def next_job(
    waiting: Sequence[LaneJob], running: Sequence[LaneJob], processes: int
) -> LaneJob | None:
    """The job to begin now, or None when none may.

    ``processes``: how many jobs run at a time, at least 2.
    """
    if len(running) >= processes:
        return None
    if len(waiting) == 1:
        return waiting[0] if _allowed(waiting[0], running, processes) else None
    allowed = [job for job in waiting if _allowed(job, running, processes)]
    return min(allowed, key=lambda job: (job.long, job.turn, job.number), default=None)


def waits_for_holder(holders: LaneHolders) -> bool:
    """Whether a model's job waits, though a process without its bundle is idle.

    1. Where a holder is idle, it goes there.
    2. A holder at work is free long before another process has loaded the bundle.
    3. Who is being given the bundle is a holder sooner than one that is given it later.
    4. Where there is none of them, the job goes to any process, and brings the bundle.
    """
    return not holders.idle and (holders.busy or holders.given)


def wants_holder(holders: LaneHolders) -> bool:
    """Whether one more process is to be given the bundle, where a job waits for a holder: one at a
    time, and none where the first job brings it.
    """
    return holders.busy and not holders.idle and not holders.given


def turn_of(owner: str, waiting: Sequence[LaneJob], now_turn: int) -> int:
    """The turn of a new job; ``now_turn`` is that of the job begun last."""
    return max((job.turn for job in waiting if job.owner == owner), default=now_turn) + 1


def _allowed(job: LaneJob, running: Sequence[LaneJob], processes: int) -> bool:
    if job.model and len(running) >= processes - 1:
        of_model = [other for other in running if other.model == job.model]
        if len(of_model) >= processes - 1:
            return False
    if not job.long:
        return True
    others, share = [other for other in running if other.long], max(1, processes - 2)
    return (
        len(others) < processes - 1
        and sum(other.owner == job.owner for other in others) < share
        and (not job.model or sum(other.model == job.model for other in others) < share)
    )
