"""Reads an answer with tool calls while it comes: what is content, what is a call.

What comes out depends on the text alone, not on the pieces in which it comes. A call is *made* as
soon as its function's name and the first character of its arguments are there; from then on its
arguments are given out as they come::

    Let me see. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    [ content ] [ held until the call is made ]   [ arguments ][ dropped  ]

Nothing is lost: what looked like a call and is none comes out as content, marker and all. Arguments
that turn out to be no JSON after the call was made are given out as they are, to the closing marker
or to the end. Blanks around calls are dropped.
"""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pilotlight.text.stops import StopMatcher
from pilotlight.text.tools.dialects import ARGUMENT_KEYS, ToolDialect
from pilotlight.text.tools.scan import WHITESPACE, ObjectScanner

_IDLE_KEYS = ("type", "id")
"""Members beside name and arguments that models write into calls."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a text added to one call."""

    index: int
    """Which call of the answer."""
    name: str | None
    """The function's, with the call's first piece; None with the others."""
    arguments: str
    """The next part of the JSON text."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text added to an answer."""

    content: str
    calls: tuple[CallPiece, ...] = ()


class ToolParser:
    """Reads one answer."""

    def __init__(
        self,
        dialect: ToolDialect,
        names: Collection[str],
        *,
        single: bool = False,
        forced: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            dialect: how the model writes calls.
            names: of the functions that it was told of. A call without a marker must be of one of
                them.
            single: the answer ends with its first call.
            forced: a grammar holds the answer to calls: what is held back at its end is a call that
                was cut short, and no content.
        """
        self.called = 0
        """Calls that were made."""
        self.ended = False
        """The answer's only call is complete; what comes after it is dropped."""
        self._dialect = dialect
        self._names = frozenset(names)
        self._single = single
        self._forced = forced
        self._content = _Content()
        self._pieces: list[CallPiece] = []
        self._state: Callable[[str], None] = self._in_text
        self._marker = _matcher(dialect.opening)
        self._closing = _matcher(dialect.closing)
        self._held: list[str] = []
        """Since the marker, until the call is made; then since its arguments ended."""
        self._marked = False
        self._bracket = False
        self._only_blanks = True
        self._object = _Object(None)
        self._made = False

    def feed(self, text: str) -> Parsed:
        """Add text; get what can be said now."""
        for char in text:
            if self.ended:
                break
            self._state(char)
        return self._taken()

    def finish(self) -> Parsed:
        """The answer has ended: what is held back."""
        if not self.ended:
            self._end()
            self._content.end(called=self.called > 0)
            self.ended = True
        return self._taken()

    def _taken(self) -> Parsed:
        pieces, self._pieces = merged_pieces(self._pieces), []
        return Parsed(self._content.take(), pieces)

    def _in_text(self, char: str) -> None:
        if char == "{" and self._dialect.unmarked and self._only_blanks and not self.called:
            self._marked = False
            self._held = []
            self._begin(char)
            return
        self._only_blanks = self._only_blanks and char in WHITESPACE
        if self._marker is None:
            self._show(char)
            return
        found = self._marker.feed(char)
        self._show(found.text)
        if found.stop is not None:
            self._marker = _matcher(self._dialect.opening)
            self._marked, self._bracket = True, False
            self._held = [found.stop]
            self._state = self._before_object

    def _before_object(self, char: str) -> None:
        """After a marker, a bracket or a comma."""
        if char in WHITESPACE:
            self._held.append(char)
        elif char == "[" and self._dialect.array and not self._bracket:
            self._bracket = True
            self._held.append(char)
        elif char == "{" and (self._bracket or not self._dialect.array):
            self._begin(char)
        else:
            self._reject(char)

    def _begin(self, char: str) -> None:
        self._object, self._made = _Object(None if self._marked else self._names), False
        self._state = self._in_object
        self._in_object(char)

    def _in_object(self, char: str) -> None:
        call = self._object
        if not call.push(char):
            self._leave_object(char)
            return
        if not self._made and call.begun and call.name is not None:
            self._made = True
            self._held = []
            self._pieces.append(CallPiece(self.called, call.name, ""))
            self.called += 1
            self._content.call()
        if not self._made:
            self._held.append(char)
            if call.done:
                self._reject("")
            return
        if arguments := call.take():
            self._pieces.append(CallPiece(self.called - 1, None, arguments))
        elif call.whole:
            self._held.append(char)
        if call.done:
            self._after_object([])

    def _leave_object(self, char: str) -> None:
        """It does not go on with this character."""
        if not self._made:
            self._reject(char)
        elif self._object.whole:
            # Often only the last brace is missing.
            self._after_object([*self._held, char])
        else:
            self._state = self._in_broken_arguments
            self._in_broken_arguments(char)

    def _after_object(self, rest: list[str]) -> None:
        self._held = []
        if self._dialect.closing:
            self._closing = _matcher(self._dialect.closing)
            self._state = self._before_closing
        elif self._single:
            self.ended = True
        else:
            self._state = self._between
        self._go_on(rest)

    def _before_closing(self, char: str) -> None:
        assert self._closing is not None
        self._held.append(char)
        found = self._closing.feed(char)
        if found.stop is not None:
            self._state = self._in_text
            self.ended = self._single
        elif found.text.strip(WHITESPACE):
            self._replay()

    def _between(self, char: str) -> None:
        """After a call of a dialect without closing markers."""
        self._held.append(char)
        if char in WHITESPACE:
            return
        if char == ("," if self._bracket else ";"):
            self._state = self._before_object
        elif char == "]" and self._bracket:
            self._state = self._in_text
        else:
            self._replay()

    def _in_broken_arguments(self, char: str) -> None:
        closed = False
        if self._closing is not None:
            found = self._closing.feed(char)
            char, closed = found.text, found.stop is not None
        if char:
            self._pieces.append(CallPiece(self.called - 1, None, char))
        if closed:
            self._closing = _matcher(self._dialect.closing)
            self._state = self._in_text
            self.ended = self._single

    def _reject(self, char: str) -> None:
        """No call, up to here."""
        self._show("".join(self._held))
        self._only_blanks = False
        self._state = self._in_text
        if char:
            self._in_text(char)

    def _replay(self) -> None:
        """What came after a call is something else."""
        held, self._held = self._held, []
        self._state = self._in_text
        self._go_on(held)

    def _go_on(self, chars: list[str]) -> None:
        for char in chars:
            if not self.ended:
                self._state(char)

    def _show(self, text: str) -> None:
        self._content.add(text, called=self.called > 0)

    def _end(self) -> None:
        if self._state == self._in_text:
            if self._marker is not None and not self._forced:
                self._show(self._marker.flush().text)
            return
        if self._state == self._in_broken_arguments:
            if self._closing is not None and (rest := self._closing.flush().text):
                self._pieces.append(CallPiece(self.called - 1, None, rest))
            return
        held = "".join(self._held)
        words = held.strip(WHITESPACE)
        # What was to follow a call and did not come is no content: a part of the closing marker, a
        # comma.
        cut_off = (
            self._forced
            or (self._state == self._before_closing and self._dialect.closing.startswith(words))
            or (self._state == self._before_object and self.called > 0 and words in (",", ";"))
        )
        if words and not cut_off:
            self._show(held)


class _Object:
    """The object of one call."""

    def __init__(self, names: Collection[str] | None) -> None:
        """Begin one; ``names``: without a marker, only a call of one of these functions is a
        call.
        """
        self.name: str | None = None
        self.begun = False
        """The arguments' first character is there."""
        self.whole = False
        """So is their last."""
        self._names = names
        self._scanner = ObjectScanner()
        self._name: list[str] = []
        self._arguments: list[str] = []

    @property
    def done(self) -> bool:
        return self._scanner.done

    def take(self) -> str:
        """The arguments that were not taken yet."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def push(self, char: str) -> bool:
        """Take a character; False when no call goes on with it."""
        if not self._scanner.push(char):
            return False
        key = self._scanner.key
        if self._names is not None and key not in (None, "name", *ARGUMENT_KEYS, *_IDLE_KEYS):
            return False
        if not self._scanner.inside:
            return True
        if key == "name":
            return self._push_name(char)
        return key not in ARGUMENT_KEYS or self._push_arguments(char)

    def _push_name(self, char: str) -> bool:
        if self.name is not None:
            return False
        self._name.append(char)
        if self._name[0] != '"':
            return False
        if self._scanner.ended:
            name: str = json.loads("".join(self._name))
            self.name = name
            return (
                name != "" and name.isprintable() and (self._names is None or name in self._names)
            )
        return True

    def _push_arguments(self, char: str) -> bool:
        if self.whole or (not self.begun and char != "{"):
            return False
        self.begun = True
        self._arguments.append(char)
        self.whole = self._scanner.ended
        return True


class _Content:
    """The text beside calls, without the blanks around them."""

    def __init__(self) -> None:
        self._ready: list[str] = []
        self._blanks: list[str] = []
        self._shown = False

    def add(self, text: str, *, called: bool) -> None:
        words = text.rstrip(WHITESPACE)
        if words:
            if called and not self._shown:
                words = words.lstrip(WHITESPACE)
            else:
                self._ready += self._blanks
            self._ready.append(words)
            self._shown = True
            self._blanks.clear()
        blanks = text[len(text.rstrip(WHITESPACE)) :]
        if blanks:
            self._blanks.append(blanks)

    def call(self) -> None:
        """A call stands here."""
        self._blanks.clear()

    def end(self, *, called: bool) -> None:
        if not called:
            self._ready += self._blanks
        self._blanks.clear()

    def take(self) -> str:
        taken = "".join(self._ready)
        self._ready.clear()
        return taken


def _matcher(marker: str) -> StopMatcher | None:
    return StopMatcher((marker,)) if marker else None


def merged_pieces(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """The same with one piece for each call."""
    texts: dict[int, list[str]] = {}
    names: dict[int, str | None] = {}
    for piece in pieces:
        names[piece.index] = names.get(piece.index) or piece.name
        texts.setdefault(piece.index, []).append(piece.arguments)
    return tuple(CallPiece(index, names[index], "".join(parts)) for index, parts in texts.items())
