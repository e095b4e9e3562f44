"""The tokens of simulated engines."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_FACTOR = 6364136223846793005
"""Knuth's, of the generator MMIX: odd, so that no two states become one."""

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's."""


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
        tokens.take_all(token_ids)
        return tokens

    def next(self) -> tuple[int, float]:
        """The next token and its log probability; ``take`` it to go on."""
        drawn = _mix(self.state)
        return drawn % self.vocab_size, -(drawn >> 40) / (1 << 24)

    def take(self, token_id: int) -> None:
        """This token comes next."""
        self.state = (self.state * _FACTOR + token_id + 1) & _MASK

    def draw(self, *, with_logprob: bool) -> tuple[int, float | None]:
        """``next`` and ``take`` at once; no log probability where none is asked for."""
        state = self.state
        # ``_mix``, without a call for each token.
        drawn = (state + _STEP) & _MASK
        drawn = ((drawn ^ (drawn >> 30)) * _FIRST) & _MASK
        drawn = ((drawn ^ (drawn >> 27)) * _SECOND) & _MASK
        drawn ^= drawn >> 31
        token_id = drawn % self.vocab_size
        self.state = (state * _FACTOR + token_id + 1) & _MASK
        return token_id, -(drawn >> 40) / (1 << 24) if with_logprob else None

    def coming(self, at_most: int, before: Collection[int]) -> list[int]:
        """The next tokens, up to one of ``before``; ``take_all`` them to go on."""
        state, size, token_ids = self.state, self.vocab_size, list[int]()
        for _ in range(at_most):
            drawn = (state + _STEP) & _MASK
            drawn = ((drawn ^ (drawn >> 30)) * _FIRST) & _MASK
            drawn = ((drawn ^ (drawn >> 27)) * _SECOND) & _MASK
            token_id = (drawn ^ (drawn >> 31)) % size
            if token_id in before:
                break
            token_ids.append(token_id)
            state = (state * _FACTOR + token_id + 1) & _MASK
        return token_ids

    def take_all(self, token_ids: Iterable[int]) -> None:
        """These come next."""
        state = self.state
        for token_id in token_ids:
            state = (state * _FACTOR + token_id + 1) & _MASK
        self.state = state


def _mix(value: int) -> int:
    """SplitMix64."""
    mixed = (value + _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 31)
