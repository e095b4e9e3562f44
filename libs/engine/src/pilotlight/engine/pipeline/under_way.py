"""A micro-batch between stages, as the stage that leads remembers it."""

from dataclasses import dataclass

from pilotlight.engine.core.request import Request
from pilotlight.engine.pipeline.frames import SampledTokens


@dataclass(frozen=True, slots=True)
class UnderWay:
    """The other stages have not answered it yet."""

    number: int
    sampled: tuple[tuple[Request, int], ...]
    """Requests that get a token, and which of their runs this is."""
    sent_s: float | None = None
    """When it left, on the engine's clock; None: behind another one."""

    def hop_s(self, answer: SampledTokens, now_s: float, size: int) -> float:
        """What one hop took, of one that went round alone; 0 where that is not known.

        Args:
            answer: to it.
            now_s: when that came.
            size: how many stages it went through.
        """
        if self.sent_s is None or answer.busy_s is None:
            return 0.0
        return max(0.0, (now_s - self.sent_s - answer.busy_s) / size)
