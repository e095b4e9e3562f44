"""Token ids to text while they come.

A token is not a piece of text: characters are spread over several byte tokens, the first word loses
its leading space, a run of byte-fallback tokens is decoded as one. Where tokens are spelled in
bytes and their bytes are the text, those of an unfinished character wait for the next tokens.
Everywhere else a window of the latest tokens is decoded again with each token, and what goes beyond
the text given out so far is new.

::

    token ids     ... already gone ...  [w w w w w w n]
    decode(window)                      |given out | new | � |     a � at the end may be a character's beginning: held back
"""

from codecs import utf_8_decode
from collections.abc import Collection, Sequence

from pilotlight.text.decoding import TokenDecoder

WINDOW_TOKENS = 24
"""The window is cut when it is longer."""
AT_ONCE_TOKENS = 64
"""Tokens that come together are decoded together, up to so many."""
KEPT_TOKENS = 8
"""Left after a cut. An unfinished character has at most three bytes, so at most three tokens; the
others are context."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """One output's text.

    What ``feed`` and ``flush`` return is, put together, ``decode`` of all ids without special
    tokens.

    Without a spelling a token costs the decoding of a window, however long the output. A run of
    byte-fallback tokens is held back until it ends, because one invalid byte in it changes how all
    of it is decoded. Where the tokens' bytes are the text, tokens that come together cost one
    decoding; other decoders may look at neighbours, and what they give must not depend on what
    comes together.
    """

    __slots__ = ("_given_chars", "_kept", "_tokenizer", "_unfinished", "_whole", "_window")

    def __init__(self, tokenizer: TokenDecoder, kept: Collection[int] = ()) -> None:
        """Begin an output; ``kept``: special tokens that are shown all the same."""
        self._tokenizer = tokenizer
        self._kept = frozenset(kept)
        self._unfinished = b""
        """Of what is spelled: a character's beginning."""
        self._window: list[int] = []
        self._given_chars = 0
        self._whole = True
        """All of the window's text was given out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; often empty."""
        if not self._tokenizer.byte_level:
            return "".join(self._push(token_id) for token_id in token_ids)
        if not self._tokenizer.are_visible(token_ids):
            token_ids = self._tokenizer.shown(token_ids, self._kept)
        if self._tokenizer.spells:
            return self._completed(self._tokenizer.spelled(token_ids))
        pieces: list[str] = []
        for start in range(0, len(token_ids), AT_ONCE_TOKENS):
            # Not when they have come: an output that has ended needs no shorter window.
            self._cut()
            self._window += token_ids[start : start + AT_ONCE_TOKENS]
            pieces.append(self._advanced())
        return "".join(pieces)

    def flush(self) -> str:
        """What is still held back, at the end of the output."""
        if self._unfinished:
            rest, self._unfinished = self._unfinished.decode(errors="replace"), b""
            return rest
        rest = "" if self._whole else self._decoded()[self._given_chars :]
        self._window.clear()
        self._given_chars = 0
        return rest

    def _completed(self, spelled: bytes) -> str:
        """The characters that these bytes complete."""
        spelled = self._unfinished + spelled if self._unfinished else spelled
        text, used = utf_8_decode(spelled, "replace", False)
        self._unfinished = spelled[used:]
        return text

    def _push(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        self._whole = False
        if self._tokenizer.is_byte(token_id):
            return ""
        new = self._advanced()
        self._cut()
        return new

    def _is_shown(self, token_id: int) -> bool:
        return self._tokenizer.is_visible(token_id) or token_id in self._kept

    def _advanced(self) -> str:
        """What the window's end completes."""
        text = self._decoded()
        stable_chars = _stable_chars(text)
        new = text[self._given_chars : stable_chars]
        self._given_chars = max(self._given_chars, stable_chars)
        self._whole = self._given_chars >= len(text)
        return new

    def _cut(self) -> None:
        """Keep the window short, where nothing of it is held back but a character's beginning."""
        if len(self._window) > WINDOW_TOKENS:
            del self._window[:-KEPT_TOKENS]
            # The shorter window may decode otherwise at its beginning, but it ends alike: what is
            # given out ends where it did.
            self._given_chars = _stable_chars(self._decoded())

    def _decoded(self) -> str:
        # Special tokens that are not kept never come into the window.
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _stable_chars(text: str) -> int:
    """Characters that later tokens cannot change: all but one replacement character at the end."""
    return len(text) - text.endswith(_REPLACEMENT)
