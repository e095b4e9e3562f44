"""When graphs are made beside steps: at most one for each step, and directly behind its launch.

The driver does one thing at a time, and to make a graph takes as long as a step::

    host      launch n + 1 | wait for n ........ | launch n + 2 |
    thread                 [ a graph .... )       nothing       [ the next one .... )
    device    [ n ................. )[ n + 1 ................. )[ n + 2 ...

A launch that came while several are made, one after the other, would wait for more of them than the
device has work for.
"""

import threading
from collections.abc import Callable

IDLE_S = 0.02
"""No step was launched for so long: none comes, for all that is known."""


class Pace:
    """For the thread that makes graphs, and the one that runs steps."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        """No step has run.

        Args:
            monotonic_s: a clock, in seconds.
        """
        self._now_s = monotonic_s
        self._goes_on = threading.Event()
        self._launched_s: float | None = None

    def launched(self) -> None:
        """A step is on the device."""
        self._launched_s = self._now_s()
        self._goes_on.set()

    def hurry(self) -> None:
        """A step waits for its graph, or the stage goes: nobody is to wait for the next step."""
        self._goes_on.set()

    def wait(self) -> None:
        """Returns behind the next launch, and at once while no steps run."""
        launched_s = self._launched_s
        if launched_s is None or self._now_s() - launched_s > IDLE_S:
            return
        self._goes_on.wait(IDLE_S)
        self._goes_on.clear()
