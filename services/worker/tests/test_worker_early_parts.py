"""A stage of which an engine is told while its parts are leased: the first of them is waited for a
moment, and each says in which pool it lies.
"""

import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_engine import Parent, ScriptedEngine

from pilotlight.common.envelope import Timed
from pilotlight.common.messages import codec
from pilotlight.common.messages.codec import frame
from pilotlight.common.messages.engine import (
    LoadStage,
    PlacePart,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageUnloaded,
    UnloadStage,
)
from pilotlight.worker.engine_child import inbox
from pilotlight.worker.engine_child.inbox import EARLY_PARTS, Inbox

JOIN_S = 10.0


def told_before(pool: Any) -> tuple[LoadStage, list[PlacePart]]:
    """A load whose lease is asked for still, and its parts, which say where they are."""
    path = str(pool.path)
    parts = [replace(one, pool_path=path) for one in pool.places()]
    return replace(pool.load(), pool_path=""), parts


def test_the_first_part_is_waited_for_before_the_rest_of_a_stage_is_set_up(
    scripted: ScriptedEngine, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "FIRST_PART_S", JOIN_S)
    parent = Parent(scripted)
    load, (first, *others) = told_before(pool)
    scripted.before_rest = lambda: parent.send(*others)
    parent.send(load)
    parent.send(first)
    parent.until(StageLoaded)
    assert scripted.first_parts == [[0]]
    come = [first.part, *(one.part for one in others)]
    assert scripted.early_parts == [come[:EARLY_PARTS]], "and the others when it is set up"
    parent.close()


def test_a_first_part_is_waited_for_no_longer_than_something_else_comes(
    scripted: ScriptedEngine, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "FIRST_PART_S", 2 * JOIN_S)
    parent = Parent(scripted)
    load, parts = told_before(pool)
    parent.send(load)
    parent.send(UnloadStage(instance_id=load.instance_id))
    parent.until(StageUnloaded)
    assert scripted.first_parts == [[]]
    parent.send(load, *parts)
    parent.until(StageLoaded)
    assert scripted.first_parts == [[], [0]]
    parent.close()


def test_a_stage_whose_first_part_does_not_come_in_time_is_set_up_without(
    scripted: ScriptedEngine, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "FIRST_PART_S", 0.001)
    parent = Parent(scripted)
    load, parts = told_before(pool)
    parent.send(load)
    parent.until(StageOpened)
    assert (scripted.first_parts, scripted.early_parts) == ([[]], [[]])
    parent.send(*parts)
    parent.until(StageLoaded)
    parent.close()


def test_parts_come_from_the_pool_that_they_name_and_not_from_the_one_of_before(
    scripted: ScriptedEngine, pool: Any, tmp_path: Path
) -> None:
    parent = Parent(scripted)
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    other = tmp_path / "other.pool"
    other.write_bytes(bytes(~byte & 0xFF for byte in pool.path.read_bytes()))
    parts = [replace(one, pool_path=str(other)) for one in pool.places("inst-2")]
    scripted.seen.clear()
    parent.send(replace(pool.load("inst-2"), pool_path=""), *parts)
    parent.until(StageLoaded)
    image = other.read_bytes()
    assert [first for _, first in scripted.seen] == [
        image[place.offset : place.offset + 8] for one in parts for place in one.tensors
    ]
    lost = [replace(one, pool_path=str(tmp_path / "gone")) for one in pool.places("inst-3")]
    parent.send(replace(pool.load("inst-3"), pool_path=""), *lost)
    assert parent.until(StageFailed).instance_id == "inst-3"
    parent.close()


def test_parts_of_a_load_that_was_called_off_are_not_those_of_the_next_one(
    scripted: ScriptedEngine, pool: Any, tmp_path: Path
) -> None:
    parent = Parent(scripted)
    load, parts = told_before(pool)
    other = tmp_path / "other.pool"
    other.write_bytes(bytes(64) + pool.path.read_bytes())
    theirs = [
        replace(
            one,
            pool_path=str(other),
            tensors=tuple(replace(place, offset=place.offset + 64) for place in one.tensors),
        )
        for one in parts
    ]
    parent.send(load, *parts, UnloadStage(instance_id=load.instance_id), load, *theirs)
    parent.until(StageLoaded)
    image = other.read_bytes()
    assert [first for _, first in scripted.seen] == [
        image[place.offset : place.offset + 8] for one in theirs for place in one.tensors
    ]
    parent.close()


def test_an_inbox_looks_at_no_more_parts_than_it_is_asked_for(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    decode = codec.decode_msgpack
    monkeypatch.setattr(
        codec, "decode_msgpack", lambda *given: seen.append(given) or decode(*given)
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Inbox(theirs)
        parts = pool.places()
        ours.sendall(b"".join(frame(Timed(one)) for one in parts))
        (first,) = box.first_part_of(parts[0].instance_id)
        assert (first, len(seen)) == (parts[0], 1)
        assert [one.message for one in box.commands()] == parts
