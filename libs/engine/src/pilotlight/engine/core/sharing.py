"""How the tokens of one step are shared."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.policy.request import RequestKey

Running = Mapping[RequestKey, Request]
"""Requests that own blocks, oldest first."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rule of one model."""

    limits: BatchLimits
    whole_prompts: bool
    """A prompt runs in one step or not at all, since its tokens see each other. One that is longer
    than a step makes one alone."""

    def cap(self, running: Running) -> int:
        """Tokens that a step may run of one prompt: fewer where streams get theirs, too."""
        chunk, whole = self.limits.chunk_tokens, self.limits.step_tokens
        if chunk is None or not any(request.wanted == 1 for request in running.values()):
            return whole
        return min(chunk, whole)

    def portion(self, wanted: int, left: int, cap: int, *, first: bool) -> int:
        """How many of the tokens that a request wants run now.

        Args:
            wanted: as many does it want.
            left: of the step's.
            cap: of one prompt.
            first: nothing else runs so far.
        """
        if not self.whole_prompts:
            return min(wanted, left, cap)
        return wanted if first or wanted <= left else 0

    def among(self, running: Running, at_most: int | None, cap: int) -> dict[RequestKey, int]:
        """How many tokens each running request may run: one for each that wants no more, the rest
        to the others in order.

        Args:
            running: oldest first.
            at_most: requests of the step; None: all.
            cap: of one prompt.
        """
        ready = dict(
            islice(((key, request) for key, request in running.items() if request.wanted), at_most)
        )
        counts = {key: 1 for key, request in ready.items() if request.wanted == 1}
        left = self.limits.step_tokens - len(counts)
        for key, request in ready.items():
            if request.wanted > 1:
                counts[key] = self.portion(request.wanted, left, cap, first=not counts)
                left = left_behind(request, counts[key], left)
        return counts

    def left_for_newcomers(self, running: Running, counts: Mapping[RequestKey, int]) -> int:
        """Tokens of a step that requests may have which do not run yet."""
        if any(count < running[key].wanted for key, count in counts.items()):
            return 0
        return self.limits.step_tokens - sum(counts.values())


def left_behind(request: Request, count: int, left: int) -> int:
    """Of ``left`` tokens, what requests behind one may have that got ``count``: nothing, if it
    wants more, for it came first.
    """
    return left - count if count == request.wanted else 0
