"""How long one more waits at the end of a line, by the pace at which turns have come, and whether
it had better be told at once that it comes too late.

What waits costs the one who holds it, and what is answered too late is answered for nothing: so a
line that moves is no longer than what was promised lets it be.
"""

from dataclasses import dataclass

LEAST_TURNS, LEAST_S = 64, 0.5
"""Of a measured pace: turns come in bursts, and a few say nothing."""
LEAST_WAIT_S = 1.0
"""A shorter wait is no reason to turn anyone away: a retry is a second later at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Turns that came in some time: those of a line that somebody waits in, or all of a model's."""

    turns: int
    over_s: float

    def wait_s(self, ahead: int) -> float | None:
        """Until the turn of one with so many before it, in seconds; None: too few turns have come
        to tell.
        """
        if self.turns < LEAST_TURNS or self.over_s < LEAST_S:
            return None
        return ahead * self.over_s / self.turns

    def turns_within(self, seconds: float) -> int:
        """How many turns come in as many seconds; 0: too few have come to tell."""
        if self.turns < LEAST_TURNS or self.over_s < LEAST_S:
            return 0
        return int(seconds * self.turns / self.over_s)


def too_late_by_s(wait_s: float, within_s: float) -> float | None:
    """By how much one that will wait comes too late, in seconds; None: it shall wait.

    Args:
        wait_s: until its turn.
        within_s: when it is due.
    """
    late_s = wait_s - max(within_s, LEAST_WAIT_S)
    return late_s if late_s > 0 else None
