"""Which of them sends when a cold start and something in the background want the link at once.

Pure: time is an argument.

::

    cold start   ####....########.........            what it leaves is the background's, but never within HOLD_S of it
    background       ....        .    #####
"""

import math

from pilotlight.policy.cluster import FetchPriority

HOLD_S = 0.05
"""The link counts as a cold start's for so long after it took bytes: it waits for the receiver's
word between two of them."""


class Yielding:
    """The links of one node, which share its way out."""

    def __init__(self) -> None:
        self._taken_until_s = -math.inf

    def sent(self, priority: FetchPriority, now_s: float) -> None:
        """The system took bytes of this priority."""
        if priority is FetchPriority.COLD_START:
            self._taken_until_s = now_s + HOLD_S

    def delay_s(self, priority: FetchPriority, now_s: float) -> float:
        """How long bytes of this priority have to wait before the next look; 0: they may go."""
        return (
            0.0 if priority is FetchPriority.COLD_START else max(0.0, self._taken_until_s - now_s)
        )
