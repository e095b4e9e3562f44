"""One sample of every message, as bytes; and whether such bytes decode.

Also a program, for the code of another release: ``python message_samples.py write FOLDER`` and ``…
read FOLDER``. So it imports only what every release has under the same name: the messages and their
codec.
"""

import dataclasses
import enum
import importlib
import json
import pkgutil
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from pilotlight.common import messages
from pilotlight.common.messages.codec import (
    Message,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
)

BINARY_EDGES = ("engine", "link", "pool", "tokens")
"""Edges that speak msgpack; ``tokens`` speaks both."""
PARTS_OF = {"pipelines": "engine", "prompts": "tokens"}
"""Modules that hold a part of another's edge."""

REFUSED_BEFORE = ("float8_e4m3fn",)
"""Values that the release before refuses, with the models that need them: nothing is computed in
fp8, and a manifest that has tensors of it names a model that came with this release."""


def message_types() -> list[type[Message]]:
    found: list[type[Message]] = []
    for info in pkgutil.iter_modules(messages.__path__):
        module = importlib.import_module(f"{messages.__name__}.{info.name}")
        own = (
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
        )
        found += [value for value in own if issubclass(value, Message) and value is not Message]
    return found


def sample(hint: Any, name: str, default: Any = None) -> Any:
    """A value of a type, different from the field's default, so that it is in the bytes."""
    if isinstance(hint, typing.NewType):
        return sample(hint.__supertype__, name, default)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return sample(
            next(argument for argument in arguments if argument is not type(None)), name, default
        )
    if origin is typing.Literal:
        return next(one for one in arguments if one != default)
    if origin in (tuple, list):
        return origin(sample(arguments[0], name) for _ in range(2))
    if origin is dict:
        key = 7 if arguments[0] is int else "key"
        return {key: msgspec.Raw(b"1") if msgspec.Raw in arguments else 1}
    simple = {
        str: f"{name}-1",
        bytes: f"{name}-1".encode(),
        int: 7,
        float: 1.5,
        bool: default is not True,
    }
    if hint in simple:
        return simple[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [one for one in hint if one.value not in REFUSED_BEFORE][-1]
    if hint.__name__ == "Stage":  # each release has it in another module
        return hint(1, 3)
    hints = typing.get_type_hints(hint)
    return hint(
        **{
            field: sample(hints[field], field, getattr(hint, field, None))
            for field in field_names(hint)
        }
    )


def field_names(kind: Any) -> tuple[str, ...]:
    return (
        tuple(field.name for field in dataclasses.fields(kind))
        if dataclasses.is_dataclass(kind)
        else kind.__struct_fields__
    )


def edge_of(kind: type[Message]) -> str:
    module = kind.__module__.rsplit(".", 1)[1]
    return PARTS_OF.get(module, module)


def name_of(kind: type[Message]) -> str:
    """Edge and class: what a sample's file is called."""
    return f"{edge_of(kind)}.{kind.__name__}"


def write(folder: Path) -> None:
    """Write a sample of every message that this code knows."""
    for kind in message_types():
        value = sample(kind, kind.__name__.lower())
        (folder / f"{name_of(kind)}.json").write_bytes(encode_json(value))
        if edge_of(kind) in BINARY_EDGES:
            (folder / f"{name_of(kind)}.msgpack").write_bytes(encode_msgpack(value))


def read(folder: Path) -> tuple[list[str], list[str]]:
    """Decode what another release wrote, as far as this code knows the messages: what was decoded,
    and what was not and why.
    """
    decoded: list[str] = []
    failed: list[str] = []
    known = {name_of(kind): kind for kind in message_types()}
    for path in sorted(folder.iterdir()):
        kind = known.get(path.stem)
        if kind is None:
            continue
        try:
            (decode_json if path.suffix == ".json" else decode_msgpack)(path.read_bytes(), kind)
            decoded.append(path.name)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test is after
            failed.append(f"{path.name}: {error}")
    return decoded, failed


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        print(json.dumps(read(Path(sys.argv[2]))))
