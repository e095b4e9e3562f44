"""How the tokens of one step are shared."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from pilotlight.engine.core.request import Request
from pilotlight.policy.request import RequestKey


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rule of one model."""

    step_tokens: int
    whole_prompts: bool
    """A prompt runs in one step or not at all, since its tokens see each other. One that is longer
    than a step makes one alone."""

    def portion(self, wanted: int, left: int, *, first: bool) -> int:
        """How many of the tokens that a request wants run now.

        Args:
            wanted: as many does it want.
            left: of the step's.
            first: nothing else runs so far.
        """
        if not self.whole_prompts:
            return min(wanted, left)
        return wanted if first or wanted <= left else 0

    def among(self, running: Iterable[Request], at_most: int | None) -> dict[RequestKey, int]:
        """How many tokens each running request may run, of ``at_most`` of them."""
        ready = dict(
            islice(((request.key, request) for request in running if request.wanted), at_most)
        )
        counts = {key: 1 for key, request in ready.items() if request.wanted == 1}
        left = self.step_tokens - len(counts)
        for key, request in ready.items():
            if request.wanted > 1:
                counts[key] = self.portion(request.wanted, left, first=not counts)
                left -= counts[key]
        return counts
