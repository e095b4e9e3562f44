"""When a transaction had better wait for more rows.

A transaction costs round trips and some milliseconds of a processor whatever it writes, so where
many follow each other each waits a moment for the rows of others. One that comes alone would wait
for nobody, and a start of a quiet cluster needs two before its first command.
"""

from collections import deque
from dataclasses import dataclass, field

LINGER_S = 0.005
"""So long a transaction waits for more rows in a rush."""
MANY = 4


@dataclass(slots=True)
class Rush:
    """There is one while the last ``MANY`` transactions ended within ``within_s``."""

    within_s: float
    _ended_s: deque[float] = field(default_factory=lambda: deque(maxlen=MANY))

    def ended(self, now_s: float) -> None:
        """A transaction has."""
        self._ended_s.append(now_s)

    def since_last_s(self, now_s: float) -> float:
        """Since when none has ended; without end before the first one."""
        return now_s - self._ended_s[-1] if self._ended_s else float("inf")

    def is_on(self, now_s: float) -> bool:
        """Whether others are about to come."""
        return len(self._ended_s) == MANY and now_s - self._ended_s[0] < self.within_s
