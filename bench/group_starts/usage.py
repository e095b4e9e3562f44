"""How busy the machine is while something is measured."""

import os
from pathlib import Path


def _jiffies() -> tuple[int, int]:
    """All of it, and idle, since the machine began."""
    fields = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]


class Busy:
    """From when it is made."""

    def __init__(self) -> None:
        self.load = round(os.getloadavg()[0], 2)
        self._before = _jiffies()

    def share(self) -> float:
        """Of the cores' time, what was spent since, by whomever."""
        (all_before, idle_before), (all_now, idle_now) = self._before, _jiffies()
        spent = max(1, all_now - all_before)
        return 1.0 - (idle_now - idle_before) / spent
