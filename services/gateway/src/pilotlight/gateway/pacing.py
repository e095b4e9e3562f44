"""Measures the pace of a line (``policy.pace``): two spans of time, so that what is long past
counts no more, and nothing is kept for each turn.
"""

from pilotlight.policy.pace import LEAST_S, LEAST_TURNS, Pace


class Pacing:
    """Of one line, while somebody waits in it, or of all that a model has."""

    __slots__ = ("_before", "_before_s", "_since_s", "_turns")

    def __init__(self, now_s: float) -> None:
        """It begins: none has come."""
        self._before = self._turns = 0
        self._before_s = self._since_s = now_s

    def turn(self, now_s: float, turns: int = 1) -> None:
        """So many have had their turn."""
        self._turns += turns
        if self._turns >= LEAST_TURNS and now_s - self._since_s >= LEAST_S:
            self._before, self._before_s = self._turns, self._since_s
            self._turns, self._since_s = 0, now_s

    def pace(self, now_s: float) -> Pace:
        """As it is now."""
        return Pace(turns=self._before + self._turns, over_s=now_s - self._before_s)
