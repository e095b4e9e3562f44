"""JSON from foreign files: parsed without surprises, read with bounds.

A repeated key is refused: which of the two values holds depends on the reader, and a header that
two readers understand differently is a way to smuggle bytes past one of them.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

from pilotlight.checkpoint.errors import BadCheckpoint, quote

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Largest configuration file that is read."""
MAX_KEY_BYTES = 1024
"""Longest key of an object that is walked through: tensors' names have a tenth of that."""

_WINDOWS = (256, 4096, 65536)
"""Bytes that are looked at for a value's end before as many are as it may have."""
_NOT_SPACE = re.compile(rb"[^ \t\n\r]")


def parse_object(data: bytes, file: str) -> dict[str, Any]:
    """Parse a file that holds one JSON object.

    Raises:
        BadCheckpoint: not UTF-8, not JSON, not an object, nested too deeply, a key twice, or NaN
            and infinities.
    """
    try:
        value = _decoder(file).decode(data.decode())
    except RecursionError as error:
        raise BadCheckpoint("the JSON is nested too deeply", file=file) from error
    except ValueError as error:
        raise BadCheckpoint(f"not valid JSON: {error}", file=file) from error
    if not isinstance(value, dict):
        raise BadCheckpoint("not a JSON object", file=file)
    return cast("dict[str, Any]", value)


class ObjectCursor:
    """Walks through one large JSON object member by member, with the strictness of
    ``parse_object``.

    JSON takes up to thirty times its bytes once it is made of objects, which a hostile file of many
    small values makes use of. Here only one member is made at a time, and of each it is known
    beforehand how long it may be::

        {"name": {...}, "name": {...}, ...}
         text    value   text   value         each from the bytes where it stands to a limit, not further
    """

    def __init__(self, data: bytes, file: str, at: int = 0) -> None:
        """``data`` holds the object from ``at`` on, and nothing after it but white space."""
        self._data = data
        self._file = file
        self._at = at
        self._decoder = _decoder(file)

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here.

        The caller takes a key's value before it asks for the next key.

        Raises:
            BadCheckpoint: as ``parse_object``, and where a key is longer than ``MAX_KEY_BYTES``.
        """
        self._take(b"{")
        seen: set[str] = set()
        ended = self.peek() == b"}"
        if ended:
            self._take(b"}")
        while not ended:
            key = self.text(MAX_KEY_BYTES)
            if key in seen:
                raise BadCheckpoint(f"the key {quote(key)!r} appears twice", file=self._file)
            seen.add(key)
            self._take(b":")
            yield key
            ended = self._take(b",}") == b"}"

    def peek(self) -> bytes:
        """The next byte that is not white space, which is where this now is; nothing at the end."""
        found = _NOT_SPACE.search(self._data, self._at)
        self._at = found.start() if found is not None else len(self._data)
        return self._data[self._at : self._at + 1]

    def text(self, limit_bytes: int) -> str:
        """The string that begins here."""
        if self.peek() != b'"':
            raise self._fault("a string is missing")
        start = self._at
        self._value(limit_bytes)
        # The bytes have been read one by one so far; here they are put together as characters.
        text = cast("str", json.loads(self._data[start : self._at].decode()))
        _refuse_halves((text,), self._file)
        return text

    def value(self, limit_bytes: int) -> Any:
        """What begins here, for looking at its structure: characters beyond ASCII are not put
        together in its strings.
        """
        self.peek()
        return self._value(limit_bytes)

    def end(self) -> None:
        """Nothing may follow the object."""
        if self.peek():
            raise self._fault("there is something behind the object")

    def _value(self, limit_bytes: int) -> Any:
        left = len(self._data) - self._at
        for size_bytes in (*(size for size in _WINDOWS if size < limit_bytes), limit_bytes):
            window = self._data[self._at : self._at + size_bytes]
            try:
                # One byte, one character: so an index into the one is an index into the other.
                value, length = self._decoder.raw_decode(window.decode("latin-1"))
                window[:length].decode()
            except RecursionError as error:
                raise BadCheckpoint("the JSON is nested too deeply", file=self._file) from error
            except ValueError as error:
                if len(window) == left:
                    raise self._fault(str(error)) from error
            else:
                if length < len(window) or length == left:
                    self._at += length
                    return value
        raise self._fault(f"no value ends within {limit_bytes} bytes")

    def _take(self, expected: bytes) -> bytes:
        """Step over the next byte, which must be one of those that are expected."""
        found = self.peek()
        if not found or found not in expected:
            raise self._fault(f"expected {' or '.join(chr(byte) for byte in expected)}")
        self._at += 1
        return found

    def _fault(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"not valid JSON: {what} (at byte {self._at})", file=self._file)


class JsonObject:
    """One JSON object of a file, with checked access. A null counts as absent.

    Every method raises ``BadCheckpoint`` when the value is of another type or out of bounds, and
    when it is absent and there is no default.
    """

    def __init__(self, values: dict[str, Any], file: str, path: str = "") -> None:
        self._values = values
        self._file = file
        self._path = path

    @classmethod
    def parse(cls, data: bytes, file: str) -> "JsonObject":
        """Parse a whole file; raises ``BadCheckpoint`` like ``parse_object``."""
        return cls(parse_object(data, file), file)

    def has(self, name: str) -> bool:
        """Whether there is a value other than null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as parsed, None when absent."""
        return self._values.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer within [low, high].

        Args:
            name: The member's.
            low: The least that will do.
            high: The most.
            default: For a member that is not there; None: it has to be.
        """
        value = self._value(name, default)
        if type(value) is not int:
            raise self.fault(name, "is not an integer")
        if not low <= value <= high:
            raise self.fault(name, f"is not within {low} and {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number within [low, high].

        Args:
            name: The member's.
            low: The least that will do.
            high: The most.
            default: For a member that is not there; None: it has to be.
        """
        value = self._value(name, default)
        if type(value) not in (int, float):
            raise self.fault(name, "is not a number")
        if not (low <= value <= high and math.isfinite(value)):
            raise self.fault(name, f"is not within {low:g} and {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "is neither true nor false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.fault(name, "is not a string")
        return value

    def items(self, name: str) -> Sequence[Any]:
        """A list; an absent one is empty."""
        value = self._value(name, [])
        if not isinstance(value, list):
            raise self.fault(name, "is not a list")
        return cast("list[Any]", value)

    def child(self, name: str) -> "JsonObject | None":
        """A nested object, None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, "is not an object")
        return JsonObject(cast("dict[str, Any]", value), self._file, f"{self._path}{name}.")

    def names(self) -> tuple[str, ...]:
        """Every key, also those whose value is null."""
        return tuple(self._values)

    def fault(self, name: str, what: str) -> BadCheckpoint:
        """The error that says what is wrong with one value."""
        return BadCheckpoint(f"{quote(self._path + name)} {what}", file=self._file)

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.fault(name, "is missing")
        return value


def _decoder(file: str) -> json.JSONDecoder:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise BadCheckpoint(f"the key {quote(twice)!r} appears twice", file=file)
        _refuse_halves(
            (*found, *(value for value in found.values() if isinstance(value, str))), file
        )
        return found

    def refuse_constant(name: str) -> NoReturn:
        raise BadCheckpoint(f"{name} is not a JSON number", file=file)

    return json.JSONDecoder(
        object_pairs_hook=unique, parse_constant=refuse_constant, parse_int=_integer_of
    )


def _integer_of(text: str) -> int | float:
    """As other readers have it, minus zero is no integer: there is none that it could be."""
    return -0.0 if text == "-0" else int(text)


def _refuse_halves(texts: Iterable[str], file: str) -> None:
    """An escaped half of a character is JSON, but no text: it could be stored nowhere."""
    for text in texts:
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise BadCheckpoint(f"{quote(text)} holds half of a character", file=file)
