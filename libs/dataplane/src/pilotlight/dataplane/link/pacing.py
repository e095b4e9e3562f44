"""How fast a link sends, so that what serving sends over the same wire does not wait behind it.

Pure: readings in, a rate out.

A queue before the narrowest place of a path holds up all senders through it; from here it is seen
as round trips that take longer than the shortest one did. Parameters keep the place busy with a
queue of ``TARGET_S``; more is of no use to them::

    far longer     what came through, less a part of what waits beyond the target
    longer         a little slower, by what waits beyond the target and by how much it has grown
    shorter        a little faster, by the same; at least nearly what came through when there lately was a queue
    none for long  faster and faster

But never less than ``LEAST_SHARE`` of what lately came through: serving needs a little of a link,
and a little is given up. Round trips also take longer where processors are short, whatever is sent;
a transfer does not crawl because of that. Where sending less has not helped for a while, it looks
whether more comes through: so what is known does not fade away.
"""

import math
from dataclasses import dataclass

INTERVAL_S = 0.1
"""Of sending, between two decisions. The system's bursts are a millisecond of the rate each: in
less time there would be little else."""
LEAST_READINGS = 5
"""In an interval: where processors are short, a process sleeps through most of one."""
TARGET_S = 0.0015
"""Of the narrowest place's time, queued: little beside the time between two tokens, and enough that
it is never idle."""
LONG_S = 1.1 * TARGET_S
FAR_S = 0.005
EMPTY_S = 0.00025
NEARNESS = 0.5
"""How much of the way to the target the queue should go in one interval."""
MOST_CUT = 0.1
FIRST_STEP, MOST_STEP = 0.01, 0.05
"""Of the rate, upwards, in an interval without a queue."""
PATIENCE = 4
"""Such intervals in a row, after which the step is doubled in each."""
KNOWN_SHARE = 0.97
"""Of what came through when there lately was a queue. The most of several figures is a little more
than there was."""
KNOWN_FADES = 1 / 64
"""In an interval."""
USED_SHARE = 0.875
"""A transfer that sends less than that of what it may is held up by something else, and learns
nothing about more."""
LEAST_SHARE = 0.9
"""Of the most that came through in the last quarter of a minute or so."""
MOST_FADES = 1 / 256
"""In an interval."""
PROBE_AFTER = 10
"""Intervals in a row with a queue that is too long."""
PROBE_SHARE = 1.1
"""Of the most that came through, for one interval."""


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
        """Of the interval."""
        self._readings = 0
        """In the interval, after the first."""
        self._queue_s = math.inf
        """The shortest in the interval: one that comes and goes with each burst delays no other
        sender."""
        self._queue_before_s = 0.0
        """The same, in the interval before."""
        self._empty = 0
        """Intervals in a row without a queue."""
        self._known_bytes_per_s = 0.0
        """The most that lately came through while there was a queue."""
        self._most_bytes_per_s = 0.0
        self._long = 0
        """Intervals in a row with a queue that is too long."""

    def read(self, reading: Reading) -> None:
        """Take a reading; there should be many in an interval."""
        if self._begin is None:
            self._begin = reading
            return
        self._readings += 1
        self._queue_s = min(self._queue_s, max(0.0, reading.rtt_s - reading.least_rtt_s))
        busy_s = reading.busy_s - self._begin.busy_s
        if busy_s < INTERVAL_S or self._readings < LEAST_READINGS:
            return
        self._decide((reading.acked_bytes - self._begin.acked_bytes) / busy_s, self._queue_s)
        self._begin, self._readings = reading, 0
        self._queue_before_s, self._queue_s = self._queue_s, math.inf

    def _decide(self, came_through: float, queue_s: float) -> None:
        """A rate for the next interval, from what came through in the last one (bytes/s) and what
        queue there was all the while.
        """
        self._most_bytes_per_s = max(came_through, self._most_bytes_per_s * (1 - MOST_FADES))
        self._known_bytes_per_s *= 1 - KNOWN_FADES
        if queue_s > EMPTY_S:
            self._known_bytes_per_s = max(came_through, self._known_bytes_per_s)
        self._empty = self._empty + 1 if queue_s < EMPTY_S else 0
        rate = self.bytes_per_s
        if rate is None:
            rate = came_through * (1 - _part_beyond(queue_s)) if queue_s > TARGET_S else None
        elif queue_s > FAR_S:
            # A link that sent less than it may was held up by something else: that says little of
            # the path.
            rate = max(came_through, rate * (1 - MOST_CUT)) * (1 - _part_beyond(queue_s))
        elif queue_s > TARGET_S or came_through > USED_SHARE * rate:
            rate = self._near(rate, queue_s)
        if rate is None:
            return
        self._long = self._long + 1 if queue_s > LONG_S else 0
        self.bytes_per_s = max(rate, LEAST_SHARE * self._most_bytes_per_s)
        if self._long > PROBE_AFTER:
            self._long = 0
            self.bytes_per_s = PROBE_SHARE * self._most_bytes_per_s

    def _near(self, rate: float, queue_s: float) -> float:
        """The next rate, where the queue is not far from the target."""
        change = (NEARNESS * (TARGET_S - queue_s) + self._queue_before_s - queue_s) / INTERVAL_S
        if self._empty:
            change = max(change, min(MOST_STEP, FIRST_STEP * 2 ** max(0, self._empty - PATIENCE)))
        rate *= 1 + max(-MOST_CUT, change)
        return max(rate, KNOWN_SHARE * self._known_bytes_per_s) if 2 * queue_s < TARGET_S else rate


def _part_beyond(queue_s: float) -> float:
    """Of what came through: so much less, and what waits beyond the target gets shorter."""
    return min(MOST_CUT, NEARNESS * (queue_s - TARGET_S) / INTERVAL_S)
