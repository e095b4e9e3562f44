"""Which tokens a request has, as far as its penalties ask."""

from collections import Counter
from collections.abc import Sequence

from pilotlight.policy.request import Sampling


class TokenCounts:
    """A function of prompt and output alone: a request that is resumed elsewhere is penalised as if
    it had stayed.
    """

    __slots__ = ("output", "prompt")

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self.prompt = frozenset(prompt_ids)
        self.output = Counter(output_ids)

    def add(self, token_id: int) -> None:
        """The output has one token more."""
        self.output[token_id] += 1


def counts_of(
    sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> TokenCounts | None:
    """What the penalties of a request are to be counted from; None without penalties."""
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        return TokenCounts(prompt_ids, output_ids)
    return None
