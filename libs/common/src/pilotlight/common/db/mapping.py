"""Facts to and from the JSON of their rows.

The dataclasses of ``pilotlight.policy`` are the only types of facts.
"""

from typing import Any, TypeVar

import msgspec

from pilotlight.common.errors import InternalError

T = TypeVar("T")


def to_row_json(fact: object) -> Any:
    """What a JSON column stores of a fact, a plan, or a list of them."""
    return msgspec.to_builtins(fact)


def from_row_json(value: Any, as_type: type[T]) -> T:
    """The fact that a JSON column holds.

    Raises:
        InternalError: the column holds something else.
    """
    try:
        return msgspec.convert(value, as_type)
    except msgspec.ValidationError as error:
        raise InternalError(f"a row holds no valid {as_type.__name__}: {error}") from error
