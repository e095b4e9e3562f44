"""Notices when the time of day jumps.

Nothing here depends on it: durations, deadlines and leases go by clocks that do not jump with it.
"""

import structlog

from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.waiting import every

log = structlog.get_logger()

LOOK_S = 1.0
JUMP_S = 5.0
"""Corrections by time services are far smaller within one look."""
WHAT_TO_DO = (
    "Nothing is lost. Let a time service (chrony, systemd-timesyncd) keep the clock of every machine; times in logs, traces and usage "
    "around the jump are wrong."
)


class ClockWatch:
    """Compares the time of day with the clock that never jumps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = wall_offset_s(clock)

    def look(self) -> float:
        """Seconds that the time of day jumped since the last look; 0 when it did not."""
        offset_s = wall_offset_s(self._clock)
        jumped_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(jumped_s) < JUMP_S:
            return 0.0
        log.warning(
            "the time of day jumped, or this machine slept",
            action="clock_jumped",
            jumped_s=round(jumped_s, 1),
            what_to_do=WHAT_TO_DO,
        )
        return jumped_s


async def watch_clock(clock: Clock) -> None:
    """Look for as long as the process runs."""
    watch = ClockWatch(clock)
    async for _ in every(LOOK_S):
        watch.look()
