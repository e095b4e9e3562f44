"""When graphs are made beside steps: piece by piece, each behind the launch of a step, with another
one launched before.

The driver does one thing at a time, and to make a graph takes it longer than a step::

    host      launch n | launch n + 1 | wait for n .... | launch n + 2 | wait for n + 1 | launch n + 3 |
    thread                            [ a piece .. )                     nothing                      [ the next one
    device    [ n ............................. )[ n + 1 .................. )[ n + 2 ............... )[

A launch that came while a whole graph is made would wait for more than the device has work for.
Loading a kernel waits for all that the device has been given, so a piece begins no sooner than all
of a step is launched, what samples its tokens with it: then the host wants nothing of the driver
before the device has come to the end of the step before (tokens are looked for in memory).

The step that gives the first token is waited for before another is launched, so it does not count:
behind the next launch there is nothing on the device but that.
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

    def __init__(self, monotonic_s: Callable[[], float], also: "Pace | None" = None) -> None:
        """No step has run.

        Args:
            monotonic_s: a clock, in seconds.
            also: of other graphs of the stage, told the same of what samples.
        """
        self._now_s = monotonic_s
        self._also = also
        self._changed = threading.Condition()
        self._launches = self._samples = 0
        """Since the thread waits, without those of the stage's first step."""
        self._launched_s: float | None = None
        self._has_sampled = False
        self._hurried = False

    def launched(self) -> None:
        """A step of a graph is on the device; what samples its tokens is not, if this stage does
        that.
        """
        with self._changed:
            if self._launched_s is not None:
                self._launches += 1
            self._launched_s = self._now_s()
            self._changed.notify_all()

    def sampled(self) -> None:
        """All of a step is on the device, with what samples its tokens."""
        with self._changed:
            if self._has_sampled:
                self._samples += 1
            self._has_sampled = True
            self._changed.notify_all()
        if self._also is not None:
            self._also.sampled()

    def hurry(self) -> None:
        """A step waits for its graph, or the stage goes: nobody is to wait for other steps."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns behind a launch, and at once while no steps run."""
        with self._changed:
            self._launches = self._samples = 0
            while not (self._hurried or self._are_there) and self._idle_in_s > 0:
                self._changed.wait(self._idle_in_s)
            self._hurried = False

    @property
    def _are_there(self) -> bool:
        # One launch more where nothing is sampled, as in a pipeline's other stages: by the next
        # launch all of the one before is on the device.
        return self._samples >= LAUNCHES or self._launches > LAUNCHES

    @property
    def _idle_in_s(self) -> float:
        since_s = self._launched_s
        return 0.0 if since_s is None else since_s + IDLE_S - self._now_s()
