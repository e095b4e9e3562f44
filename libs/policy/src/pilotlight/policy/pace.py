"""How long one more waits at the end of a line, by the pace at which turns have come, and whether
it had better be told at once that it comes too late.

What waits costs the one who holds it, and what is answered too late is answered for nothing: so a
line that moves is no longer than what was promised lets it be. And one that stands, since more
comes than can be done, is kept short: a long one would add as much to every wait, and take time
that answers need, so that it would stand also at rates that can be done without it. (A bound on
what stands, and not on what a burst brings, is CoDel's idea: Nichols and Jacobson, Controlling
Queue Delay, 2012.)
"""

from dataclasses import dataclass

LEAST_TURNS, LEAST_S = 64, 0.5
"""Of a measured pace: turns come in bursts, and a few say nothing."""
LEAST_WAIT_S = 1.0
"""A shorter wait is no reason to turn anyone away: a retry is a second later at least."""
STANDING_WAIT_S = 0.1
"""How long one waits in a line that is kept short."""
STANDING_AFTER_S = 5.0
"""A line that was longer than that for so long stands: one of ``LEAST_WAIT_S`` that a pause left
behind is gone by then, at four fifths of what can be done."""
SHORT_FOR_S = 30.0
"""It is kept short until it was shorter by itself for so long: what was too much a moment ago may
be so again."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Whether a line stands, as of the last look at it."""

    kept_short: bool = False
    """It does."""
    otherwise_s: float | None = None
    """When it was last as one that does not, or, where it stands, as one that does; None: there was
    no look yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many may wait in a line, and whether it stands."""

    places: int
    standing: Standing


def line_room(pace: Pace, waiting: int, at_least: int, standing: Standing, now_s: float) -> Room:
    """How many may wait in a line, looked at when one more comes.

    1. as many as have their turn within ``LEAST_WAIT_S``, or ``at_least``
    2. where the former are more: in a line that stands, those within ``STANDING_WAIT_S``

    Args:
        pace: of all turns of the model, whether or not they waited.
        waiting: who is in the line, or will be before the one that comes.
        at_least: who may be there however slow it is.
        standing: as of the last look; a new one where the line has been empty since, unless it was
            kept short.
        now_s: the monotonic time.
    """
    long = pace.turns_within(LEAST_WAIT_S)
    if long <= at_least:  # 1
        return Room(places=at_least, standing=Standing())
    short = max(min(at_least, LEAST_TURNS), pace.turns_within(STANDING_WAIT_S))
    was, since_s = standing.kept_short, standing.otherwise_s
    if since_s is None or (waiting >= short) == was:
        standing = Standing(kept_short=was, otherwise_s=now_s)
    elif now_s - since_s >= (SHORT_FOR_S if was else STANDING_AFTER_S):
        standing = Standing(kept_short=not was, otherwise_s=now_s)
    return Room(places=short if standing.kept_short else long, standing=standing)  # 2
