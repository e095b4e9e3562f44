"""The tokens of simulated engines."""

from collections.abc import Iterable
from dataclasses import dataclass

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class SimTokens:
    """The tokens of one request on every simulated engine: each is a hash of the seed and of all
    tokens before it.

    So a request that is resumed with another prompt, other output, another seed or at another
    position gives other tokens.
    """

    state: int
    vocab_size: int

    @classmethod
    def after(cls, seed: int, token_ids: Iterable[int], vocab_size: int) -> "SimTokens":
        """Those that follow the prompt and the output so far."""
        tokens = cls(_mix(seed), vocab_size)
        for token_id in token_ids:
            tokens.take(token_id)
        return tokens

    def next(self) -> tuple[int, float]:
        """The next token and its log probability; ``take`` it to go on."""
        drawn = _mix(self.state)
        return drawn % self.vocab_size, -(drawn >> 40) / (1 << 24)

    def take(self, token_id: int) -> None:
        """This token comes next."""
        self.state = _mix(self.state + token_id + 1)


def _mix(value: int) -> int:
    """SplitMix64."""
    mixed = (value + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
