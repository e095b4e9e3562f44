"""Bytes of earlier releases decode for ever.

``golden/`` holds one sample of every message. A new message gets its sample from
``PILOTLIGHT_WRITE_GOLDEN=1 pytest`` on this file; a sample that is there is never written again.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from message_samples import BINARY_EDGES, edge_of, message_types, name_of, sample

from pilotlight.common.messages.codec import (
    Message,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
)

GOLDEN = Path(__file__).parent / "golden"


def kept(golden: Any, now: Any) -> bool:
    """Whether everything that the golden bytes say is still said."""
    if isinstance(golden, dict):
        return isinstance(now, dict) and all(
            key in now and kept(value, now[key]) for key, value in golden.items()
        )
    if isinstance(golden, list):
        return isinstance(now, list) and len(now) >= len(golden) and all(map(kept, golden, now))
    return golden == now


def golden_bytes(kind: type[Message], suffix: str, fresh: bytes) -> bytes:
    path = GOLDEN / f"{name_of(kind)}.{suffix}"
    if not path.exists():
        assert os.environ.get("PILOTLIGHT_WRITE_GOLDEN"), (
            f"{path.name} is missing: run with PILOTLIGHT_WRITE_GOLDEN=1"
        )
        path.write_bytes(fresh)
    return path.read_bytes()


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_old_bytes_decode(kind: type[Message]) -> None:
    value = sample(kind, kind.__name__.lower())
    old = golden_bytes(kind, "json", encode_json(value))
    assert kept(msgspec.json.decode(old), msgspec.json.decode(encode_json(decode_json(old, kind))))
    assert decode_json(encode_json(value), kind) == value
    if edge_of(kind) in BINARY_EDGES:
        old = golden_bytes(kind, "msgpack", encode_msgpack(value))
        assert kept(
            msgspec.msgpack.decode(old),
            msgspec.msgpack.decode(encode_msgpack(decode_msgpack(old, kind))),
        )
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
    known = {name_of(kind) for kind in message_types()}
    assert {path.stem for path in GOLDEN.iterdir()} <= known
