"""Recognises a JSON object while it comes, character by character: strictly, without building its
value.
"""

import json
import re
from enum import Enum, auto

WHITESPACE = " \t\r\n"
MAX_DEPTH = 128
"""Deeper nesting is refused, as what reads the arguments afterwards would."""

MAX_NUMBER_CHARS = 1024

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("0123456789+-.eE")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_HEX = frozenset("0123456789abcdefABCDEF")


class _At(Enum):
    BEGIN = auto()
    FIRST_KEY = auto()
    """After ``{``: a key or the end."""
    KEY = auto()
    COLON = auto()
    FIRST_VALUE = auto()
    """After ``[``: a value or the end."""
    VALUE = auto()
    AFTER = auto()
    """After a value: a comma or the end of what it stands in."""
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()
    DONE = auto()


class ObjectScanner:
    """One JSON object. After a character was refused nothing more may be pushed."""

    def __init__(self) -> None:
        self.key: str | None = None
        """The member of the outer object that is being read, or was read last."""
        self.inside = False
        """Whether the last character belongs to that member's value."""
        self.ended = False
        """Whether that value, a string, an object or an array, ended with the last character."""
        self._at = _At.BEGIN
        self._open: list[str] = []
        """The brackets that are open, outermost first."""
        self._is_key = False
        self._text: list[str] = []
        """The outer object's key, or the number that is being read."""
        self._left = ""
        """What is still to come of a literal."""
        self._hex_left = 0

    @property
    def done(self) -> bool:
        """The object is complete."""
        return self._at is _At.DONE

    def push(self, char: str) -> bool:
        """Take a character; False when a JSON object cannot go on with it."""
        inside = self._is_part_of_member(char)
        taken = self._take(char)
        self.inside = inside and taken
        self.ended = self.inside and self._at is _At.AFTER and len(self._open) == 1
        return taken

    def _is_part_of_member(self, char: str) -> bool:
        if len(self._open) != 1:
            return len(self._open) > 1
        match self._at:
            case _At.VALUE:
                return char not in WHITESPACE
            case _At.NUMBER:
                return char in _NUMBER_CHARS
            case _At.STRING | _At.ESCAPE | _At.HEX:
                return not self._is_key
            case at:
                return at is _At.LITERAL

    def _take(self, char: str) -> bool:
        match self._at:
            case _At.STRING | _At.ESCAPE | _At.HEX:
                return self._take_in_string(char)
            case _At.LITERAL:
                taken, self._left = self._left.startswith(char), self._left[1:]
                self._at = _At.LITERAL if self._left else _At.AFTER
                return taken
            case _At.NUMBER:
                return self._take_in_number(char)
            case _At.DONE:
                return False
            case at:
                return char in WHITESPACE or self._take_between(char, at)

    def _take_between(self, char: str, at: _At) -> bool:
        """A character that is no blank and stands in no string, number or literal."""
        match at:
            case _At.FIRST_KEY | _At.KEY if char == '"':
                self._is_key, self._at, self._text = True, _At.STRING, []
                return True
            case _At.COLON if char == ":":
                self._at = _At.VALUE
                return True
            case _At.AFTER if char == ",":
                self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
                return True
            case _At.FIRST_KEY if char == "}":
                return self._close(char)
            case _At.FIRST_VALUE if char == "]":
                return self._close(char)
            case _At.AFTER if char in "}]":
                return self._close(char)
            case _At.FIRST_VALUE | _At.VALUE:
                return self._begin_value(char)
            case _At.BEGIN if char == "{":
                return self._begin_value(char)
            case _:
                return False

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self._at = _At.FIRST_KEY if char == "{" else _At.FIRST_VALUE
            return len(self._open) <= MAX_DEPTH
        if char == '"':
            self._is_key, self._at = False, _At.STRING
            return True
        if char in _LITERALS:
            self._left, self._at = _LITERALS[char], _At.LITERAL
            return True
        self._text, self._at = [char], _At.NUMBER
        return char in "-0123456789"

    def _close(self, char: str) -> bool:
        matches = self._open[-1] + char in ("{}", "[]")
        self._open.pop()
        self._at = _At.AFTER if self._open else _At.DONE
        return matches

    def _take_in_number(self, char: str) -> bool:
        if char in _NUMBER_CHARS:
            self._text.append(char)
            return len(self._text) <= MAX_NUMBER_CHARS
        if _NUMBER.fullmatch("".join(self._text)) is None:
            return False
        self._at = _At.AFTER
        return self._take(char)

    def _take_in_string(self, char: str) -> bool:
        if self._is_key and len(self._open) == 1 and (char != '"' or self._at is _At.ESCAPE):
            self._text.append(char)
        match self._at:
            case _At.ESCAPE:
                self._hex_left, self._at = (4, _At.HEX) if char == "u" else (0, _At.STRING)
                return char in 'u"\\/bfnrt'
            case _At.HEX:
                self._hex_left -= 1
                self._at = _At.HEX if self._hex_left else _At.STRING
                return char in _HEX
            case _ if char == "\\":
                self._at = _At.ESCAPE
                return True
            case _ if char == '"':
                return self._end_string()
            case _:
                return char >= " "

    def _end_string(self) -> bool:
        if self._is_key and len(self._open) == 1:
            self.key = json.loads('"' + "".join(self._text) + '"')
        self._at = _At.COLON if self._is_key else _At.AFTER
        self._is_key = False
        return True
