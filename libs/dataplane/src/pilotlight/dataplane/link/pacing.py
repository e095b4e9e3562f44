"""How fast a link sends, so that what serving sends over the same wire does not wait behind it. Pure: readings in, a rate out.

A queue before the narrowest place of a path holds up everybody who sends through it; from here it is seen as round trips that take longer
than the shortest one did. Parameters keep the place busy with a short queue; more is of no use to them::

    no queue            what came through when there last was one; then a little faster, and faster and faster while there is none
    up to TARGET_S      as before
    longer              what comes through, less a part of what waits beyond the target

While there is a queue, what comes through is all that the path gives. Who else fills it gets the path, but for ``LEAST_SHARE``: a
transfer gives way, and does not starve.
"""

import math
from dataclasses import dataclass

INTERVAL_S = 0.1
"""Of sending, between two decisions. A burst of the system's is a millisecond of the rate, so a shorter one would see little but bursts."""
TARGET_S = 0.0015
FAR_S = 0.005
"""Of the narrowest place's time, queued: little beside the time between two tokens, and enough that it is never idle."""
LEAST_READINGS = 5
"""In an interval: where processors are short, a process may sleep through most of one."""
EMPTY_S = 0.00025
NEARNESS = 0.5
"""How much of what waits beyond the target should be gone after an interval."""
MOST_CUT = 0.25
FIRST_STEP, MOST_STEP = 0.01, 0.05
"""Of the rate, upwards, in an interval without a queue."""
PATIENCE = 4
"""Such intervals in a row, after which the step is doubled in each."""
KNOWN_SHARE = 0.97
"""Of what came through while there was a queue, where there is none any more."""
USED_SHARE = 0.875
"""A transfer that sends less than that of what it may is held up by something else, and learns nothing about more."""
LEAST_SHARE = 0.25
"""Of the most that lately came through."""
FORGETS = 1 / 64
"""Of the most that came through, in every interval."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the system tells of a connection."""

    acked_bytes: int
    """Since it was made, as the next."""
    busy_s: float
    """In which there was something to send, or to be acknowledged."""
    rtt_s: float
    """Of the last few round trips."""
    least_rtt_s: float
    """Of all of the last minutes."""


class Pacer:
    """One connection's rate."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        """What it may send; None: as fast as it goes."""
        self._begin: Reading | None = None
        self._queue_s = math.inf
        """The shortest within the interval: one that comes and goes with each burst holds nobody up."""
        self._readings = 0
        self._known_bytes_per_s = 0.0
        """What came through when there last was a queue."""
        self._most_bytes_per_s = 0.0
        self._empty = 0
        """Intervals in a row without a queue."""

    def read(self, reading: Reading) -> None:
        """Take a reading; there may be many within an interval."""
        if self._begin is None:
            self._begin = reading
            return
        self._readings += 1
        self._queue_s = min(self._queue_s, max(0.0, reading.rtt_s - reading.least_rtt_s))
        busy_s = reading.busy_s - self._begin.busy_s
        if busy_s >= INTERVAL_S and self._readings >= LEAST_READINGS:
            self._decide((reading.acked_bytes - self._begin.acked_bytes) / busy_s, self._queue_s)
            self._begin, self._queue_s, self._readings = reading, math.inf, 0

    def _decide(self, came_through: float, queue_s: float) -> None:
        """A rate for the next interval, from what came through in the last one (bytes/s) and what queue it left."""
        self._most_bytes_per_s = max(came_through, self._most_bytes_per_s * (1 - FORGETS))
        rate, excess_s = self.bytes_per_s, queue_s - TARGET_S
        self._empty = self._empty + 1 if queue_s < EMPTY_S else 0
        self._known_bytes_per_s *= 1 - FORGETS
        if queue_s > EMPTY_S:
            self._known_bytes_per_s = max(self._known_bytes_per_s, came_through)
        if rate is None:
            if excess_s > 0:
                rate = came_through * (1 - _cut(excess_s))
        elif queue_s > FAR_S:
            rate = max(came_through, rate * (1 - MOST_CUT)) * (1 - _cut(excess_s))
        elif excess_s > 0 or came_through > USED_SHARE * rate:
            step = min(MOST_STEP, FIRST_STEP * 2 ** max(0, self._empty - PATIENCE)) if self._empty else 0.0
            rate *= 1 + max(step, -NEARNESS * excess_s / INTERVAL_S)
            if 2 * queue_s < TARGET_S:
                rate = max(rate, KNOWN_SHARE * self._known_bytes_per_s)
        if rate is not None:
            self.bytes_per_s = max(rate, LEAST_SHARE * self._most_bytes_per_s)


def _cut(excess_s: float) -> float:
    return min(MOST_CUT, NEARNESS * excess_s / INTERVAL_S)
