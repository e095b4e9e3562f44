"""Seconds of this machine, less what others take of it: a limit in them means the same whether or
not something else runs here.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from chaos.processes import Processes

LEAST_SHARE = 0.25
"""A machine that leaves us less than this is none to measure on."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""Fields of /proc/stat: idle, and waiting for disks."""
_COUNTED = 8
"""Up to and with what the host of a virtual machine took. What follows is counted within the
others."""


@dataclass(frozen=True)
class _Reading:
    wall_s: float
    busy_s: float
    """All cores, of all processes."""
    own_s: float


class OwnTime:
    """Begins when it is made."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._start = self._read()

    def seconds(self) -> float:
        """Since the beginning."""
        now = self._read()
        wall_s = now.wall_s - self._start.wall_s
        if wall_s <= 0:
            return 0.0
        others_s = (now.busy_s - self._start.busy_s) - (now.own_s - self._start.own_s)
        left = 1.0 - others_s / (wall_s * (os.cpu_count() or 1))
        return wall_s * min(1.0, max(LEAST_SHARE, left))

    def _read(self) -> _Reading:
        ticks = [
            int(word)
            for word in Path("/proc/stat").read_text().splitlines()[0].split()[1 : 1 + _COUNTED]
        ]
        busy = sum(ticks) - sum(ticks[index] for index in _IDLE)
        return _Reading(
            time.monotonic(),
            busy / _TICKS_PER_S,
            (self._processes.ticks() / _TICKS_PER_S) + time.process_time(),
        )
