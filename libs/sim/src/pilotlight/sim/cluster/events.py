"""What happens when: a queue of calls in simulated time."""

import heapq
from collections.abc import Callable


class Events:
    """Calls in order of time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Have something called at a time; one that has passed counts as now."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._asked, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have something called after a delay."""
        self.at(self.now_s + delay_s, call)

    def step(self, until_s: float) -> bool:
        """Make the next call; False when there is none up to ``until_s``."""
        if not self._queue or self._queue[0][0] > until_s:
            return False
        self.now_s, _, call = heapq.heappop(self._queue)
        call()
        return True
