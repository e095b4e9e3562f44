"""When a leader looks for garbage: between its turns.

By itself Python looks in the midst of whatever makes objects, and at 1,000 nodes a look at all of
them takes a tenth of a second: a third of a leader's time under load, and the slowest of its ticks.
What turns make has no cycles and goes without a look; the little that has any can wait.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

YOUNG_S = 0.1
"""So often what is new is looked at: under load a second's takes 50 ms, in which nothing else
happens, and a tenth of a second's a few."""
ALL_S = 300.0
"""So often everything is."""


@dataclass(slots=True)
class Garbage:
    """The looks of one term."""

    young_s: float
    """When what is new was looked at last, monotonic."""
    all_s: float
    """When everything was."""

    def look(self, now_s: float) -> None:
        """Look, if it is time."""
        if now_s - self.all_s >= ALL_S:
            gc.collect()
            self.all_s = self.young_s = now_s
        elif now_s - self.young_s >= YOUNG_S:
            gc.collect(1)
            self.young_s = now_s


@contextmanager
def between_turns(now_s: float) -> Generator[Garbage]:
    """While this lasts nothing is looked at but when ``look`` is called."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield Garbage(now_s, now_s)
    finally:
        if was:
            gc.enable()
