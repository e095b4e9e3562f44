"""One output, from token ids to what the client sees."""

from collections.abc import Collection, Sequence

import msgspec

from pilotlight.text.decoding import TokenDecoder
from pilotlight.text.detokenize import Detokenizer
from pilotlight.text.stops import StopMatcher, Stopped


class OutputDelta(msgspec.Struct, frozen=True):
    """What some tokens added to an output."""

    text: str
    used_tokens: int
    """How many of the tokens belong to the output. Those past a stop string do not: they are
    dropped and not billed."""
    stop: str | None = None
    """The stop string that ended the output; the engine can be told to cancel."""


class OutputText:
    """Detokenizer and stop strings of one output.

    With stop strings tokens are looked at one by one, so text and count do not depend on how the
    engine batches them.
    """

    __slots__ = ("_detokenizer", "_ended", "_include_stop", "_stops")

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stops: Sequence[str] = (),
        kept: Collection[int] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """Begin an output.

        Args:
            tokenizer: the model's.
            stops: what ends the output.
            kept: special tokens that are shown all the same.
            include_stop: the text ends with the stop string, and not before it.

        Raises:
            BadRequest: the stop strings are out of bounds.
        """
        self._detokenizer = Detokenizer(tokenizer, kept)
        self._stops = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._ended = False

    def feed(self, token_ids: Sequence[int]) -> OutputDelta:
        """Add tokens. After the end nothing is used and nothing comes."""
        shown: list[str] = []
        if self._ended:
            return OutputDelta("", 0)
        if self._stops is None:
            return OutputDelta(self._detokenizer.feed(token_ids), len(token_ids))
        for used, token_id in enumerate(token_ids, 1):
            found = self._stops.feed(self._detokenizer.feed([token_id]))
            shown.append(self._shown(found))
            if found.stop is not None:
                self._ended = True
                return OutputDelta("".join(shown), used, found.stop)
        return OutputDelta("".join(shown), len(token_ids))

    def finish(self) -> OutputDelta:
        """The engine has ended the output: what was held back.

        It may still turn out to hold a stop string.
        """
        if self._ended:
            return OutputDelta("", 0)
        self._ended = True
        if self._stops is None:
            return OutputDelta(self._detokenizer.flush(), 0)
        rest = self._stops.feed(self._detokenizer.flush())
        if rest.stop is not None:
            return OutputDelta(self._shown(rest), 0, rest.stop)
        last = self._stops.flush()
        return OutputDelta(rest.text + self._shown(last), 0, last.stop)

    def _shown(self, found: Stopped) -> str:
        return (
            found.text + found.stop if found.stop is not None and self._include_stop else found.text
        )
