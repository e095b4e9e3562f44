"""Whose a device's time is: divided evenly, at each moment, among what uses it then (processor
sharing; Kleinrock, "Time-shared systems: a theoretical treatment", JACM 1967).

A user is a request that a worker has accepted and its engine has not ended, or a stage that loads.
One that is alone has the whole second, each of two has half of one. While there is none, the time
is divided evenly among the stages that are kept there: it is what it costs that they are warm. Of a
device that holds nothing it is nobody's. So what all got together is the time in which there was a
user or a stage, and never more than has passed.

A virtual clock runs at the rate of one share. What a user has is how far the clock has come since
it began, so that a change costs the same however many there are::

    users       a      a b       b
    seconds  [0 ... 2)[2 ... 6)[6 ... 9)
    clock     0 ... 2  2 ... 4  4 ... 7        a: 4 - 0 = 4      b: 7 - 2 = 5      together 9

Stages that are kept have a clock of their own, which goes while the other one rests.
"""

from collections.abc import Hashable


class DeviceShares:
    """The users of one device, and what is kept on it.

    No clock of its own: times are given, in seconds. One that lies before another that was given
    counts as that one.
    """

    def __init__(self) -> None:
        self._begun: dict[Hashable, float] = {}
        """Where the clock stood when each user began."""
        self._clock_s = 0.0
        self._kept: dict[Hashable, float] = {}
        """Where the clock of idle time stood when each stage was first kept."""
        self._idle_clock_s = 0.0
        self._at_s = 0.0

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, user: Hashable, now_s: float) -> None:
        """It uses the device from now on; nothing, if it does already."""
        self._advance(now_s)
        self._begun.setdefault(user, self._clock_s)

    def so_far_s(self, user: Hashable, now_s: float) -> float:
        """Device-seconds that a user has had; 0 of one that is not known."""
        if now_s > self._at_s:
            self._advance(now_s)
        return self._clock_s - self._begun.get(user, self._clock_s)

    def end(self, user: Hashable, now_s: float) -> float:
        """It uses the device no more; as ``so_far_s``."""
        had_s = self.so_far_s(user, now_s)
        self._begun.pop(user, None)
        return had_s

    def keep(self, stage: Hashable, now_s: float) -> None:
        """It is on the device from now on; nothing, if it is already."""
        self._advance(now_s)
        self._kept.setdefault(stage, self._idle_clock_s)

    def idle_s(self, stage: Hashable, now_s: float) -> float:
        """Device-seconds in which nobody used the device, and a stage was kept there: its part of
        them; 0 of one that is not known.
        """
        if now_s > self._at_s:
            self._advance(now_s)
        return self._idle_clock_s - self._kept.get(stage, self._idle_clock_s)

    def give_up(self, stage: Hashable, now_s: float) -> float:
        """It is not on the device any more; as ``idle_s``."""
        had_s = self.idle_s(stage, now_s)
        self._kept.pop(stage, None)
        return had_s

    def _advance(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s += passed_s
        if self._begun:
            self._clock_s += passed_s / len(self._begun)
            return
        # Nobody's share goes by it: so it stays small, and keeps its digits.
        self._clock_s = 0.0
        if self._kept:
            self._idle_clock_s += passed_s / len(self._kept)
        else:
            self._idle_clock_s = 0.0
