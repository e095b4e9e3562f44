"""Batches that together need every compiled kernel of a model: what a build runs before it writes
down what its engine has compiled, and again to see that nothing is missing.

A kernel is compiled anew for a few kinds of batches: one row, few rows or many, whole prompts or
pieces of them, prompts beside requests that run; where weights are in fp8, for numbers of tokens.
"""

from dataclasses import dataclass

ALONE = (1, 12, 20, 40, 100, 180, 250, 380, 512, 700, 1200, 1800)
"""Tokens of prompts that run alone: padded to each length (``engine.cuda.prompts``), and beyond the
longest; from 1,024 on attention has other tiles, and from 1,537 on it is cuDNN's once that has
prepared for it."""
TOGETHER = ((5, 3), (300, 200), (700, 600))
"""Tokens of prompts that are one batch."""
BATCHES = (2, 24, 48, 100, 160, 250)
"""Requests that decode together: as many as fill each multiple of tokens once."""
SHORT, STREAM_TOKENS = 3, 24
"""Tokens of the prompts of such a batch; output tokens of one beside which another prompt comes."""
BESIDE = (4, 250)
"""Tokens of prompts that come while another request decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TourStep:
    """Requests that run to their ends."""

    prompts: tuple[int, ...]
    """Tokens of each that is there from the beginning."""
    later: tuple[int, ...] = ()
    """Tokens of those that come when the first has begun to decode."""
    output_tokens: int = 2
    """Of each: the second one is decoded."""

    @property
    def tokens(self) -> int:
        """Room that all of them need."""
        count = len(self.prompts) + len(self.later)
        return sum(self.prompts) + sum(self.later) + count * self.output_tokens


def tour(most_tokens: int, room_tokens: int) -> tuple[TourStep, ...]:
    """What a build runs, as far as the model and its room take it.

    Args:
        most_tokens: of one request.
        room_tokens: of all together.
    """
    steps = (
        *(TourStep(prompts=(tokens,)) for tokens in ALONE),
        *(TourStep(prompts=prompts) for prompts in TOGETHER),
        *(TourStep(prompts=(SHORT,) * batch) for batch in BATCHES),
        *(
            TourStep(prompts=(SHORT,), later=(tokens,), output_tokens=STREAM_TOKENS)
            for tokens in BESIDE
        ),
    )
    return tuple(
        step
        for step in steps
        if step.tokens <= room_tokens
        and max(*step.prompts, *step.later, 0) + step.output_tokens <= most_tokens
    )
