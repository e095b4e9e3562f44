"""JSON from foreign files: parsed without surprises, read with bounds.

A repeated key is refused: which of the two values holds depends on who reads, and a header that two readers understand
differently is a way to smuggle bytes past one of them.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from pilotlight.checkpoint.errors import BadCheckpoint, quote

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Largest configuration file that is read."""


def parse_object(data: bytes, file: str) -> dict[str, Any]:
    """Parse a file that holds one JSON object.

    Raises:
        BadCheckpoint: not UTF-8, not JSON, not an object, nested too deeply, a key twice, or NaN and infinities.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise BadCheckpoint(f"the key {quote(twice)!r} appears twice", file=file)
        for text in (*found, *(value for value in found.values() if isinstance(value, str))):
            # An escaped half of a character is JSON, but no text: it could be stored nowhere.
            if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
                raise BadCheckpoint(f"{quote(text)} holds half of a character", file=file)
        return found

    def refuse_constant(name: str) -> NoReturn:
        raise BadCheckpoint(f"{name} is not a JSON number", file=file)

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse_constant)
    except RecursionError as error:
        raise BadCheckpoint("the JSON is nested too deeply", file=file) from error
    except ValueError as error:
        raise BadCheckpoint(f"not valid JSON: {error}", file=file) from error
    if not isinstance(value, dict):
        raise BadCheckpoint("not a JSON object", file=file)
    return cast("dict[str, Any]", value)


class JsonObject:
    """One JSON object of a file, with checked access. A null counts as absent.

    Every method raises ``BadCheckpoint`` when the value is of another type or out of bounds, and when it is absent and there is
    no default.
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
        """An integer within [low, high]."""
        value = self._value(name, default)
        if type(value) is not int:
            raise self.fault(name, "is not an integer")
        if not low <= value <= high:
            raise self.fault(name, f"is not within {low} and {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number within [low, high]."""
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
