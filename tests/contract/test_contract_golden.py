"""Bytes of earlier releases decode for ever.

``golden/`` holds one sample of every message. A new message gets its sample from ``PILOTLIGHT_WRITE_GOLDEN=1 pytest`` on this file;
a sample that is there is never written again.
"""

import dataclasses
import enum
import importlib
import os
import pkgutil
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotlight.common import messages
from pilotlight.common.messages.codec import Message, decode_json, decode_msgpack, encode_json, encode_msgpack
from pilotlight.policy.types import Stage

GOLDEN = Path(__file__).parent / "golden"
BINARY_MODULES = ("engine", "pool", "tokens")
"""Edges that speak msgpack; ``tokens`` speaks both."""


def message_types() -> list[type[Message]]:
    found: list[type[Message]] = []
    for info in pkgutil.iter_modules(messages.__path__):
        module = importlib.import_module(f"{messages.__name__}.{info.name}")
        own = (value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)
        found += [value for value in own if issubclass(value, Message) and value is not Message]
    return found


def sample(hint: Any, name: str, default: Any = None) -> Any:
    """A value of a type, different from the field's default, so that it is in the bytes."""
    if isinstance(hint, typing.NewType):
        return sample(hint.__supertype__, name, default)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return sample(next(argument for argument in arguments if argument is not type(None)), name, default)
    if origin in (tuple, list):
        return origin(sample(arguments[0], name) for _ in range(2))
    if origin is dict:
        return {"key": 1}
    simple = {str: f"{name}-1", int: 7, float: 1.5, bool: default is not True}
    if hint in simple:
        return simple[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint)[-1]
    if hint is Stage:
        return Stage(1, 3)
    hints = typing.get_type_hints(hint)
    return hint(**{field: sample(hints[field], field, getattr(hint, field, None)) for field in field_names(hint)})


def field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else kind.__struct_fields__


def kept(golden: Any, now: Any) -> bool:
    """Whether everything that the golden bytes say is still said."""
    if isinstance(golden, dict):
        return isinstance(now, dict) and all(key in now and kept(value, now[key]) for key, value in golden.items())
    if isinstance(golden, list):
        return isinstance(now, list) and len(now) >= len(golden) and all(map(kept, golden, now))
    return golden == now


def golden_bytes(kind: type[Message], suffix: str, fresh: bytes) -> bytes:
    path = GOLDEN / f"{kind.__module__.rsplit('.', 1)[1]}.{kind.__name__}.{suffix}"
    if not path.exists():
        assert os.environ.get("PILOTLIGHT_WRITE_GOLDEN"), f"{path.name} is missing: run with PILOTLIGHT_WRITE_GOLDEN=1"
        path.write_bytes(fresh)
    return path.read_bytes()


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_old_bytes_decode(kind: type[Message]) -> None:
    value = sample(kind, kind.__name__.lower())
    old = golden_bytes(kind, "json", encode_json(value))
    assert kept(msgspec.json.decode(old), msgspec.json.decode(encode_json(decode_json(old, kind))))
    assert decode_json(encode_json(value), kind) == value
    if kind.__module__.endswith(BINARY_MODULES):
        old = golden_bytes(kind, "msgpack", encode_msgpack(value))
        assert kept(msgspec.msgpack.decode(old), msgspec.msgpack.decode(encode_msgpack(decode_msgpack(old, kind))))
        assert decode_msgpack(encode_msgpack(value), kind) == value


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_fields_of_a_later_release_are_ignored(kind: type[Message]) -> None:
    value = sample(kind, kind.__name__.lower())
    tree = msgspec.json.decode(encode_json(value))
    if isinstance(tree, dict):
        tree["of_a_later_release"] = {"x": [1]}
    else:
        tree.append("of a later release")
    assert decode_json(msgspec.json.encode(tree), kind) == value


def test_no_sample_is_without_its_message() -> None:
    known = {f"{kind.__module__.rsplit('.', 1)[1]}.{kind.__name__}" for kind in message_types()}
    assert {path.stem for path in GOLDEN.iterdir()} <= known
