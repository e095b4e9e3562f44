"""Time, for services.

Policies take ``now_s``; nothing else may ask the operating system (a lint rule says so).
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

from pilotlight.policy.phase import Moment


class Clock(Protocol):
    """Where a service gets its time from."""

    def monotonic_s(self) -> float:
        """Seconds on the host's CLOCK_MONOTONIC: one for all its processes, never set back.

        For durations and phases.
        """
        ...

    def wall(self) -> datetime:
        """Time of day in UTC, for people and audit."""
        ...


class SystemClock:
    """The host's clocks."""

    # The function itself: a request asks for the time some twenty times, and a frame around it
    # takes longer than the answer.
    monotonic_s = staticmethod(time.monotonic)  # noqa: TID251 - this is the one place

    def wall(self) -> datetime:
        return datetime.now(UTC)  # noqa: TID251 - this is the one place


class ManualClock:
    """A clock that tests set by hand."""

    def __init__(self, monotonic_s: float = 1000.0, wall: datetime | None = None) -> None:
        self._monotonic_s = monotonic_s
        self._wall = wall or datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall(self) -> datetime:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let both clocks go on."""
        self._monotonic_s += seconds
        self._wall += timedelta(seconds=seconds)

    def set_wall(self, seconds: float) -> None:
        """Have the clock of the day jump, as when an operator or NTP sets it."""
        self._wall += timedelta(seconds=seconds)


def busy_s() -> float:
    """Processor time that this thread has taken, in seconds: what its work costs, whatever else runs
    on the machine.
    """
    return time.thread_time()


def wall_offset_s(clock: Clock) -> float:
    """What to add to a monotonic reading of this host to get Unix time."""
    return clock.wall().timestamp() - clock.monotonic_s()


def moment_of(clock: Clock) -> Moment:
    """Now, as others are told it."""
    return Moment(at_s=clock.monotonic_s(), wall_offset_s=wall_offset_s(clock))
