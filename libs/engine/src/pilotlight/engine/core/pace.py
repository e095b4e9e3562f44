"""How long steps take, learned from those that ran."""

from collections import deque
from statistics import median

from pilotlight.engine.core.batch import Batch

SAMPLES = 15
"""The last ones count, by their median: one that compiled or captured is none of it."""
LEAST_STREAMS = 8
"""Of a step that tells what a stream costs: beside fewer it is lost in what each step costs."""
LEAST_PROMPT_TOKENS = 512
"""Of a step that tells what a prompt's token costs: a short prompt's step is its launches."""
FORGET = 1.0005
"""What a step costs at least is forgotten at this rate, should a slower machine be the truth."""


class Pace:
    """One stage's.

    A step of streams alone is taken to cost something at least and something for each of them; one
    with prompts, something more for each of their tokens.
    """

    __slots__ = ("_ended_s", "_least_s", "_prompt", "_stream")

    def __init__(self) -> None:
        self._least_s: float | None = None
        self._stream: deque[float] = deque(maxlen=SAMPLES)
        self._prompt: deque[float] = deque(maxlen=SAMPLES)
        self._ended_s: float | None = None

    def ran(self, batch: Batch, began_s: float, ended_s: float) -> None:
        """Learns from a step.

        Args:
            batch: what it ran.
            began_s: its turn; streams have waited since the step before had ended.
            ended_s: its tokens were there.
        """
        prompt_tokens = sum(one.count for one in batch.segments if one.count > 1)
        streams = sum(one.count == 1 for one in batch.segments)
        before_s = self._ended_s if streams and self._ended_s is not None else began_s
        seconds = ended_s - before_s
        self._ended_s = ended_s
        if not prompt_tokens and streams:
            least_s = seconds if self._least_s is None else self._least_s * FORGET
            self._least_s = min(seconds, least_s)
            if streams >= LEAST_STREAMS:
                self._stream.append((seconds - self._least_s) / streams)
        elif prompt_tokens >= LEAST_PROMPT_TOKENS:
            beside_s = self.streams_s(streams) or 0.0
            self._prompt.append(max(0.0, seconds - beside_s) / prompt_tokens)

    def streams_s(self, streams: int) -> float | None:
        """Seconds of a step of so many streams; None: not known yet."""
        if self._least_s is None:
            return None
        return self._least_s + (median(self._stream) * streams if self._stream else 0.0)

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds that a token of a prompt adds to a step; None: not known yet."""
        return median(self._prompt) if self._prompt else None
