"""An engine that has nothing to do pins its host pool, and does what it is told at once."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from pinned_pool import (
    HOT,
    JOIN_S,
    LATE,
    OURS,
    SLAB_BYTES,
    Driver,
    fill,
    make,
    mapped,
    numbers,
)
from scripted_engine import Parent, ScriptedEngine, run

from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.engine import (
    Abort,
    StageLoaded,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_slabs import PoolSlabs
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.worker.engine_child import loop
from pilotlight.worker.engine_child.ahead import IDLE_S
from pilotlight.worker.engine_child.pins import Pins


@pytest.fixture
def ours(host: HostPool, clock: ManualClock, pool: Any) -> Any:
    """The tiny model in the host pool."""
    parts: dict[int, Any] = {}
    content = pool.path.read_bytes()
    for part, places in pool.parts.items():
        start, stop = places[0].offset, places[-1].offset + places[-1].size_bytes
        image = host.reserve(OURS, part, stop - start, 1)
        host.write(image, 0, memoryview(content[start:stop]))
        host.enter_chunk(image, (0, stop - start), OURS)
        offset = host.file_offset(image) - start
        parts[part] = tuple(
            msgspec.structs.replace(place, offset=place.offset + offset) for place in places
        )
    return replace(pool, path=host.path, parts=parts)


def own(ours: Any) -> set[int]:
    """The slabs that hold the tiny model."""
    ends = [
        (one.offset, one.offset + one.size_bytes) for part in ours.parts.values() for one in part
    ]
    return {
        slab for start, stop in ends for slab in range(start // SLAB_BYTES, -(-stop // SLAB_BYTES))
    }


def until_pinned(driver: Driver, slabs: set[int]) -> None:
    while not slabs <= set(driver.pinned):
        assert driver.done.acquire(timeout=JOIN_S)


def is_told(parent: Parent) -> None:
    """The loop has come around: what was asked before it is done."""
    parent.send(UnloadStage(instance_id=InstanceId("nothing")))
    parent.until(StageUnloaded)


def test_an_idle_engine_pins_others_models_and_those_that_come_later(
    start_child: Callable[..., Parent],
    ours: Any,
    host: HostPool,
    clock: ManualClock,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.01)
    other = fill(host, clock, HOT, 3)
    parent = start_child(pins=make(driver))
    parent.send(ours.load(), *ours.places())
    parent.until(StageLoaded)
    until_pinned(driver, own(ours) | set(numbers(host, other)))
    late = fill(host, clock, LATE, 2)
    until_pinned(driver, set(numbers(host, late)))
    is_told(parent)
    held = own(ours) | {*numbers(host, other), *numbers(host, late)}
    assert sorted(driver.pinned) == sorted(held)
    assert set(driver.pinned[: len(own(ours))]) == own(ours)


def test_an_engine_that_has_loaded_nothing_pins_nothing(
    start_child: Callable[..., Parent],
    host: HostPool,
    clock: ManualClock,
    driver: Driver,
    scripted: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.01)
    looks: list[str] = []

    class Noting(Pins):
        def pin_ahead(self) -> bool:
            looks.append("look")
            return super().pin_ahead()

    fill(host, clock, HOT, 3)
    pins = Noting(driver.slabs, SLAB_BYTES, held_of=PoolSlabs.of)
    pins.moved(mapped(host))
    scripted.unprepared = ["graph"]
    parent = start_child(pins=pins)
    assert scripted.prepared.wait(JOIN_S), "it has had nothing to do for a while"
    is_told(parent)
    assert (driver.pinned, looks) == ([], []), "nor does it wake to look"


def test_a_request_waits_for_one_slab_at_most(
    start_child: Callable[..., Parent],
    ours: Any,
    host: HostPool,
    clock: ManualClock,
    driver: Driver,
) -> None:
    other = fill(host, clock, HOT, 8)
    of_ours = len(own(ours))
    driver.may = threading.Semaphore(of_ours)
    parent = start_child(pins=make(driver))
    parent.send(ours.load(), *ours.places())
    parent.until(StageLoaded)
    for _ in range(of_ours + 1):
        assert driver.asked.acquire(timeout=JOIN_S), "one of the other model's is being pinned"
    parent.send(run())
    driver.may.release(100)
    step = parent.until(StepDone, lambda step: bool(step.produced))
    assert [one.request_id for one in step.produced] == ["req-1"]
    for _ in range(5):
        parent.until(StepDone)
    assert len(driver.pinned) == of_ours + 1, "nothing is pinned beside a request"
    parent.send(Abort(request_id=RequestId("req-1"), attempt=1))
    until_pinned(driver, own(ours) | set(numbers(host, other)))


def test_others_models_wait_until_nothing_has_come_for_a_moment(
    start_child: Callable[..., Parent],
    ours: Any,
    host: HostPool,
    clock: ManualClock,
    driver: Driver,
    scripted: ScriptedEngine,
) -> None:
    other = set(numbers(host, fill(host, clock, HOT, 3))) - own(ours)
    scripted.clock = time = ManualClock()
    parent = start_child(pins=make(driver))
    parent.send(ours.load(), *ours.places())
    parent.until(StageLoaded)
    until_pinned(driver, own(ours))
    for _ in range(3):
        parent.send(run())
        parent.until(StepDone, lambda step: bool(step.produced))
        time.advance(IDLE_S)
        parent.send(Abort(request_id=RequestId("req-1"), attempt=1))
        parent.until(StepDone, lambda step: any(one.finish for one in step.produced))
        is_told(parent)
        is_told(parent)
        time.advance(IDLE_S / 2)
    assert set(driver.pinned) == own(ours)
    time.advance(IDLE_S)
    until_pinned(driver, other)
