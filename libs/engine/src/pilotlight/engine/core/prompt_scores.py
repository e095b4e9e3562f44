"""Log probabilities of a prompt's tokens, gathered while its chunks run."""

from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.common.messages.prompts import PromptLogprobs


class PromptScores:
    """What is known of one request's prompt.

    Chunks come in order of their positions. One that runs again, as after a preemption, comes
    again, and overwrites what followed it.
    """

    __slots__ = ("_logprobs", "_ranks", "_top", "wanted")

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """How many of the most probable tokens are told in each place."""
        self._logprobs: list[float] = []
        self._ranks: list[int] = []
        self._top: list[tuple[tuple[int, float], ...]] = []

    def take(
        self,
        start: int,
        logprobs: Sequence[float],
        ranks: Sequence[int],
        top: Sequence[tuple[tuple[int, float], ...]],
    ) -> None:
        """Takes in what the rows from position ``start`` on say of the tokens that follow them.

        Args:
            start: of the first row.
            logprobs: of the tokens that follow.
            ranks: of the same.
            top: the most probable tokens in their places.
        """
        self._logprobs[start:] = logprobs
        self._ranks[start:] = ranks
        self._top[start:] = top

    @property
    def told(self) -> PromptLogprobs:
        """All of it, when the whole prompt has run."""
        return PromptLogprobs(
            logprobs=tuple(self._logprobs), ranks=tuple(self._ranks), top=tuple(self._top)
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """Rows of a batch of which more than the last is looked at."""

    row: int
    """The first, among all rows of the batch."""
    start: int
    """Its position in the request."""
    targets: tuple[int, ...]
    """The tokens that follow the rows."""
    scores: PromptScores
