"""The output of one attempt, put in order: whatever the bus drops, repeats or reorders, each
position is taken once, in turn.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import msgspec

from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.policy.request import FinishReason

_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class Token(msgspec.Struct, frozen=True, gc=False):
    """One output token, and its log probability when it was asked for.

    A struct, whose making calls no Python: there are more of these than of anything else.
    """

    token_id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    """The likeliest tokens in its place, and their log probabilities, when they were asked for."""


class PromptRead(NamedTuple):
    """What an engine says of a request's prompt."""

    cached_tokens: int
    """As many were found in its prefix cache."""
    logprobs: PromptLogprobs | None
    """When they were asked for, and the engine knows of them."""
    vector: bytes | None = None
    """Of a prompt that is pooled."""


class TokenLog:
    """Takes entries as they come.

    ``next_seq`` is the first position that has not arrived. An entry is laid against it::

        already taken        [0 ............ next_seq)
        duplicate            [seq .... end)                      nothing new
        overlap                       [seq ......|...... end)    the right part is new
        in turn                                  [seq ... end)   all of it is new
        gap                                          [seq ...)   nothing is taken; what is missing must be sent again
    """

    def __init__(self, start_seq: int) -> None:
        self.next_seq = start_seq
        self.highest_seq = start_seq
        """End of the furthest entry that was seen, taken or not."""
        self.read: PromptRead | None = None
        """Comes with the first token; None where an earlier attempt was told."""
        self.finish: FinishReason | None = None
        self.code = ""
        self.message = ""
        self.device_s = 0.0
        """Device-seconds of the attempt, up to what has arrived."""
        self._fresh: list[Token] = []

    @property
    def gap(self) -> bool:
        """Something was seen that lies beyond what is missing."""
        return self.finish is None and self.highest_seq > self.next_seq

    @property
    def ended(self) -> FinishReason | None:
        """How it ended well; None: it has not, or has not ended at all."""
        return self.finish if self.finish in _WELL else None

    def offer(self, entry: TokenEntry) -> bool:
        """Take what is new of an entry; True when it told anything."""
        if self.finish is not None:
            return False
        end_seq = entry.seq + len(entry.token_ids)
        # A finish takes up a position of its own here, so that a lost one before it shows as a gap.
        self.highest_seq = max(self.highest_seq, end_seq + (entry.finish is not None))
        if entry.seq > self.next_seq or end_seq < self.next_seq:
            return False
        if entry.seq == 0 and self.read is None:
            self.read = PromptRead(entry.cached_tokens, entry.prompt, entry.vector)
        skip = self.next_seq - entry.seq
        token_ids, logprobs, tops = entry.token_ids, entry.logprobs, entry.top_logprobs
        if logprobs is None:
            self._fresh += map(Token, token_ids[skip:] if skip else token_ids)
        else:
            self._fresh += map(
                Token,
                token_ids[skip:],
                logprobs[skip:],
                repeat(()) if tops is None else tops[skip:],
            )
        self.device_s = max(self.device_s, entry.device_s)
        told = end_seq > self.next_seq or entry.finish is not None
        self.next_seq = end_seq
        if entry.finish is not None:
            self.finish, self.code, self.message = entry.finish, entry.code, entry.message
        return told

    def fresh(self) -> list[Token]:
        """Tokens that arrived since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh
