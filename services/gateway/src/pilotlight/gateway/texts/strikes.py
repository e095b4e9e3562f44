"""Models whose text handling keeps ending helpers."""

from collections import deque

from pilotlight.common.clock import Clock
from pilotlight.common.errors import TextUnavailable
from pilotlight.policy.ids import Digest

MAX_STRIKES = 3
WINDOW_S = 60.0
"""When this many helpers ended within this time, prompts of the model are refused for as long as
the first of them is younger."""


class Strikes:
    """Counts the helpers that short jobs of a model have ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times_s: dict[Digest, deque[float]] = {}

    def add(self, digest: Digest) -> None:
        """A short job of this model, or its loading, has ended a helper.

        Long ones do not count: with one, a client could stop a sound model.
        """
        self._times_s.setdefault(digest, deque(maxlen=MAX_STRIKES)).append(
            self._clock.monotonic_s()
        )

    def check(self, digest: Digest) -> None:
        """Refuse a model that ends helper after helper.

        Raises:
            TextUnavailable: it does.
        """
        times_s = self._times_s.get(digest)
        if times_s is None:
            return
        left_s = times_s[0] + WINDOW_S - self._clock.monotonic_s()
        if left_s <= 0:
            times_s.popleft()
            if not times_s:
                del self._times_s[digest]
        elif len(times_s) == MAX_STRIKES:
            raise TextUnavailable(
                f"the model's chat template or tokenizer ended {MAX_STRIKES} helper processes within {WINDOW_S:g} s",
                retry_after_s=left_s,
            )
