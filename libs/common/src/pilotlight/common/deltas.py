"""What changed between two values of one type, small enough to be written down many times a second.

Values are frozen dataclasses, mappings and tuples of them, as facts are. A part that is the same
object before and after costs one comparison, since facts share what did not change.

::

    change             [SAME]
                       [WHOLE, value]                          as msgpack has it
                       [FIELDS, {number of the field: change}] of a dataclass
                       [KEYS, [[key, change], ...], [key, ...]]  of a mapping: put, gone
                       [ITEMS, [[index, change], ...]]         of a tuple of the same length
                       [NAMES, [name, ...], [name, ...]]       of a set of strings: come, gone
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from pilotlight.common.errors import InternalError

T = TypeVar("T")
SAME, WHOLE, FIELDS, KEYS, ITEMS, NAMES = range(6)
Change = list[Any]
_ABSENT = object()


def change_of(before: object, after: object) -> Change:
    """What makes ``after`` of ``before``."""
    if after is before:
        return [SAME]
    if dataclasses.is_dataclass(after) and type(before) is type(cast("object", after)):
        return _fields_changed(before, cast("object", after))
    if isinstance(after, Mapping):
        known: Mapping[Any, Any] = {}
        if isinstance(before, Mapping):
            known = cast("Mapping[Any, Any]", before)
        return _keys_changed(known, cast("Mapping[Any, Any]", after))
    if isinstance(after, tuple) and isinstance(before, tuple):
        return _items_changed(cast("tuple[Any, ...]", before), cast("tuple[Any, ...]", after))
    if isinstance(after, frozenset) and isinstance(before, frozenset):
        come, gone = _names_changed(
            cast("frozenset[object]", before), cast("frozenset[object]", after)
        )
        return [NAMES, come, gone] if come or gone else [SAME]
    value = cast("object", after)
    if value == before and type(value) is type(before):
        return [SAME]
    return [WHOLE, msgspec.to_builtins(value)]


def changed_by(before: T, change: Change, as_type: Any) -> T:
    """The value after a change.

    Args:
        before: The value that the change was made from.
        change: As ``change_of`` answered, or as it was read from msgpack.
        as_type: Of both values, as a field is annotated.

    Raises:
        InternalError: it is no change of such a value.
    """
    try:
        return _changed(before, change, as_type)
    except (msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
        raise InternalError(f"this is no change of a {as_type}: {error}") from error


def _fields_changed(before: object, after: object) -> Change:
    fields: dict[int, Change] = {}
    for number, name in enumerate(_names(type(after))):
        old, new = getattr(before, name), getattr(after, name)
        if old is not new:
            change = change_of(old, new)
            if change[0] != SAME:
                fields[number] = change
    return [FIELDS, fields] if fields else [SAME]


def _keys_changed(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Change:
    put: list[list[Any]] = []
    for key, new in after.items():
        old = before.get(key, _ABSENT)
        if old is new:
            continue
        change = change_of(None if old is _ABSENT else old, new)
        if change[0] != SAME or old is _ABSENT:
            put.append([msgspec.to_builtins(key), change])
    gone = [msgspec.to_builtins(key) for key in before if key not in after]
    return [KEYS, put, gone] if put or gone else [SAME]


def _names_changed(
    before: frozenset[object], after: frozenset[object]
) -> tuple[list[object], list[object]]:
    each = (sorted(msgspec.to_builtins(one)) for one in (after - before, before - after))
    come, gone = each
    return come, gone


def _items_changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> Change:
    alike = len(before) == len(after) and type(before) is type(after)
    if not alike or not all(map(dataclasses.is_dataclass, after)):
        same = alike and before == after
        return [SAME] if same else [WHOLE, msgspec.to_builtins(after)]
    changes = [
        [index, change]
        for index, (old, new) in enumerate(zip(before, after, strict=True))
        if (change := change_of(old, new))[0] != SAME
    ]
    return [ITEMS, changes] if changes else [SAME]


def _changed(before: Any, change: Change, as_type: Any) -> Any:
    match change[0]:
        case 0:
            return before
        case 1:
            return msgspec.convert(change[1], as_type)
        case 2:
            kind = cast("type[Any]", type(before))
            hints, names = _hints(kind), _names(kind)
            news: dict[str, Any] = {}
            for number, one in cast("dict[int, Change]", change[1]).items():
                name = names[number]
                news[name] = _changed(getattr(before, name), one, hints[name])
            return dataclasses.replace(before, **news)
        case 3:
            of_key, of_value = get_args(_without_none(as_type))
            found = dict(cast("Mapping[Any, Any]", before or {}))
            for key, one in change[1]:
                name = msgspec.convert(key, of_key)
                found[name] = _changed(found.get(name), one, of_value)
            for key in change[2]:
                del found[msgspec.convert(key, of_key)]
            return found
        case 4:
            items = list(before)
            of_item = get_args(_without_none(as_type))[0]
            for index, one in change[1]:
                items[index] = _changed(items[index], one, of_item)
            return tuple(items)
        case 5:
            come, gone = (msgspec.convert(names, as_type) for names in change[1:])
            return (before | come) - gone
        case other:
            raise ValueError(f"there is no change of kind {other}")


def _without_none(as_type: Any) -> Any:
    while isinstance(as_type, NewType):
        as_type = as_type.__supertype__
    if get_origin(as_type) in (Union, UnionType):
        return next(one for one in get_args(as_type) if one is not NoneType)
    return as_type


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(kind))


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return get_type_hints(kind)
