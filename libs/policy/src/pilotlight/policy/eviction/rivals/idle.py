"""Policies that look at how long a copy was not used: keep-alive with a time to live, and idle time
over the cost of a load.
"""

from collections.abc import Generator, Sequence

from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import Priority
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.eviction.scored import ScoredPolicy

KEEP_ALIVE_S = 300.0
"""Five minutes: what BlitzScale, section 3, gives ServerlessLLM's host cache."""


class TimeToLive(Lru):
    """A copy goes when it was not used for some time, whether room is needed or not; where room is
    needed before, the longest unused goes (ServerlessLLM's keep-alive).
    """

    name = "ttl"

    def __init__(self, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        super().__init__()
        self._keep_alive_s = keep_alive_s

    def expired(self, now_s: float) -> Sequence[str]:
        gone: list[str] = []
        subjects = self._heap.ascending()
        for subject in subjects:
            if now_s - self._heap.priority(subject)[0] < self._keep_alive_s:
                break
            gone.append(subject)
        subjects.close()
        return gone


class IdleOverCost(ScoredPolicy):
    """The greatest idle time for each second that a load takes goes first (Lemonade's rule).

    The order of two copies changes as time goes by, so victims are found among all of them.
    """

    name = "idle-over-cost"

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        return (last_s - now_s) / max(1e-9, candidate.penalty_s), last_s

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        def key(subject: str) -> tuple[Priority, str]:
            candidate = self._resident[subject]
            return self.score(candidate, self.last_s(candidate), now_s), subject

        yield from sorted(self._resident, key=key)
