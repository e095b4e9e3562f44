"""When graphs are made beside steps: piece by piece, each behind the launch of a step, with another
one launched before.

The driver does one thing at a time, and to make a graph takes it longer than a step::

    host      launch n | launch n + 1 | wait for n .... | launch n + 2 | wait for n + 1 | launch n + 3 |
    thread                            [ a piece .. )                     nothing                      [ the next one
    device    [ n ............................. )[ n + 1 .................. )[ n + 2 ............... )[

A launch, or the wait for a step's end, that came while a whole graph is made would wait for more
than the device has work for. The step that gives the first token is waited for before another is
launched, so it does not count: behind the next launch there is nothing on the device but that.
"""

import threading
from collections.abc import Callable

IDLE_S = 0.02
"""No step was launched for so long: none comes, for all that is known."""
LAUNCHES = 2
"""From when a piece could be made on: the last of them is of a step that runs ahead, so the device
has something to do behind the one that it is at."""


class Pace:
    """For the thread that makes graphs, and the one that runs steps."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        """No step has run.

        Args:
            monotonic_s: a clock, in seconds.
        """
        self._now_s = monotonic_s
        self._changed = threading.Condition()
        self._behind = 0
        """Steps launched since the thread waits, without the stage's first."""
        self._launched_s: float | None = None
        self._hurried = False

    def launched(self) -> None:
        """A step is on the device."""
        with self._changed:
            if self._launched_s is not None:
                self._behind += 1
            self._launched_s = self._now_s()
            self._changed.notify_all()

    def hurry(self) -> None:
        """A step waits for its graph, or the stage goes: nobody is to wait for other steps."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns behind a launch, and at once while no steps run."""
        with self._changed:
            self._behind = 0
            while not self._hurried and self._behind < LAUNCHES and self._idle_in_s > 0:
                self._changed.wait(self._idle_in_s)
            self._hurried = False

    @property
    def _idle_in_s(self) -> float:
        since_s = self._launched_s
        return 0.0 if since_s is None else since_s + IDLE_S - self._now_s()
