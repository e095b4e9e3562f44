"""What of a host pool an engine pins, and when: what it has loaded from, then what else there is,
while it has nothing to do. The pool and its readers are real; the driver is not.
"""

import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scripted_engine import Parent, ScriptedEngine, run
from structlog.testing import capture_logs

from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.engine import (
    Abort,
    StageLoaded,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.pool_slabs import PoolSlabs
from pilotlight.engine.cuda.stream import PinnedSlabs
from pilotlight.engine.errors import EngineFailed
from pilotlight.policy.ids import Digest, InstanceId, RequestId
from pilotlight.worker.engine_child import loop
from pilotlight.worker.engine_child.ahead import IDLE_S
from pilotlight.worker.engine_child.pins import Pins

UNIT_BYTES = 64 * 1024
SLAB_BYTES = 2 * UNIT_BYTES
POOL_BYTES = 64 * UNIT_BYTES
FIRST = 2 * 1024 * 1024 // SLAB_BYTES
"""The slab in which the data begins."""
OURS, COLD, HOT, LATE = (Digest(f"{number:064x}") for number in range(1, 5))
JOIN_S = 5.0


class Driver:
    """The streamer of a device: notes which slabs it pins, one at a time where it is not let."""

    def __init__(self) -> None:
        self.base = 0
        self.pinned: list[int] = []
        self.taken_back: list[int] = []
        self.refuses = False
        self.asked, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.may = threading.Semaphore(1 << 20)

    def slabs(self, pool: memoryview, slab_bytes: int) -> PinnedSlabs:
        self.base = self._address(pool)
        return PinnedSlabs(self, pool, slab_bytes)  # type: ignore[arg-type]

    def pin(self, buffer: memoryview) -> None:
        if self.refuses:
            raise EngineFailed("no")
        self.asked.release()
        assert self.may.acquire(timeout=JOIN_S)
        self.pinned.append((self._address(buffer) - self.base) // SLAB_BYTES)
        self.done.release()

    def unpin(self, buffer: memoryview) -> None:
        self.taken_back.append((self._address(buffer) - self.base) // SLAB_BYTES)

    def _address(self, buffer: memoryview) -> int:
        return np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def host(tmp_path: Path, clock: ManualClock) -> Iterator[HostPool]:
    """The pool, as its loader has it."""
    pool = HostPool.open(tmp_path / "host", POOL_BYTES, clock)
    yield pool
    pool.close(remove=True)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def fill(
    host: HostPool, clock: ManualClock, model: Digest, slabs: int, *, ready: bool = True
) -> PartImage:
    """A part that takes whole slabs."""
    clock.advance(1)
    image = host.reserve(model, 0, slabs * SLAB_BYTES, 2)
    half = image.image_bytes // 2
    host.enter_chunk(image, (0, half), model)
    if ready:
        host.enter_chunk(image, (half, image.image_bytes), model)
    return image


def mapped(host: HostPool) -> memoryview:
    """As an engine's process maps the pool."""
    with host.path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def make(driver: Driver, **options: Any) -> Pins:
    return Pins(driver.slabs, SLAB_BYTES, held_of=PoolSlabs.of, **options)


def load(pins: Pins, host: HostPool, image: PartImage) -> None:
    start = host.file_offset(image)
    pins.want(start, start + image.image_bytes)


def settle(pins: Pins) -> int:
    """All that can be pinned now; how many pieces that took."""
    pieces = 0
    while pins.waiting:
        pins.pin_one()
    while pins.looks_ahead and pins.pin_ahead():
        pieces += 1
    return pieces


def numbers(host: HostPool, image: PartImage) -> list[int]:
    start = host.file_offset(image)
    return list(range(start // SLAB_BYTES, -(-(start + image.image_bytes) // SLAB_BYTES)))


def test_what_was_loaded_goes_first_and_then_the_hottest(
    host: HostPool, clock: ManualClock, driver: Driver
) -> None:
    ours, cold, hot = (fill(host, clock, one, 2) for one in (OURS, COLD, HOT))
    fill(host, clock, LATE, 3, ready=False)
    pins = make(driver)
    pins.moved(mapped(host))
    load(pins, host, ours)
    assert pins.waiting
    assert not pins.looks_ahead, "its own are first"
    assert not pins.pin_ahead()
    with capture_logs() as said:
        assert settle(pins) == 4, "a look, and each slab but the last"
    assert sorted(driver.pinned[:2]) == numbers(host, ours)
    assert driver.pinned[2:] == [*numbers(host, hot), *numbers(host, cold)]
    assert [(one["action"], one["which"], one["pinned_bytes"]) for one in said] == [
        ("pool_pinned", "loaded", 2 * SLAB_BYTES),
        ("pool_pinned", "occupied", 6 * SLAB_BYTES),
    ]
    with capture_logs() as said:
        assert settle(pins) == 0
    assert said == []
    assert len(driver.pinned) == 6, "no slab twice, and none that holds nothing that is ready"


def test_nothing_is_pinned_before_a_first_start(
    host: HostPool, clock: ManualClock, driver: Driver
) -> None:
    image = fill(host, clock, OURS, 1)
    pins = make(driver)
    assert not pins.looks_ahead
    pins.moved(mapped(host))
    assert not pins.looks_ahead
    assert not pins.pin_ahead()
    assert driver.pinned == []
    load(pins, host, image)
    settle(pins)
    assert driver.pinned == [FIRST]


def test_what_came_later_is_found_and_what_is_gone_is_left(
    host: HostPool, clock: ManualClock, driver: Driver
) -> None:
    ours, cold, hot = (fill(host, clock, one, 2) for one in (OURS, COLD, HOT))
    pins = make(driver)
    pins.moved(mapped(host))
    load(pins, host, ours)
    while pins.waiting:
        pins.pin_one()
    assert pins.pin_ahead(), "it looks"
    assert pins.pin_ahead()
    assert driver.pinned[2:] == numbers(host, hot)[:1]
    free = numbers(host, cold)
    host.drop(COLD)
    settle(pins)
    assert not set(free) & set(driver.pinned)
    assert driver.pinned[2:] == numbers(host, hot)
    late = fill(host, clock, LATE, 1)
    host.touch(LATE)
    settle(pins)
    assert driver.pinned[4:] == numbers(host, late)
    # What is loaded next from pages that are pinned needs nothing.
    load(pins, host, late)
    assert not pins.waiting


def test_its_own_load_goes_before_what_is_left_of_others(
    host: HostPool, clock: ManualClock, driver: Driver
) -> None:
    ours, cold, _ = (fill(host, clock, one, 2) for one in (OURS, COLD, HOT))
    pins = make(driver)
    pins.moved(mapped(host))
    load(pins, host, ours)
    while pins.waiting:
        pins.pin_one()
    assert pins.pin_ahead()
    load(pins, host, cold)
    settle(pins)
    assert sorted(driver.pinned[2:4]) == numbers(host, cold)
    assert len(driver.pinned) == 6


def test_another_pool_is_pinned_anew(
    host: HostPool, clock: ManualClock, driver: Driver, tmp_path: Path
) -> None:
    pins = make(driver)
    pins.moved(mapped(host))
    load(pins, host, fill(host, clock, OURS, 2))
    settle(pins)
    other = HostPool.open(tmp_path / "other", POOL_BYTES, clock)
    images = [fill(other, clock, one, 1) for one in (COLD, HOT)]
    pins.moved(mapped(other))
    assert sorted(driver.taken_back) == sorted(driver.pinned) == [FIRST, FIRST + 1]
    driver.pinned.clear()
    settle(pins)
    assert driver.pinned == [*numbers(other, images[1]), *numbers(other, images[0])]
    other.close(remove=True)


def test_a_driver_that_refuses_is_asked_no_more(
    host: HostPool, clock: ManualClock, driver: Driver
) -> None:
    ours, _ = fill(host, clock, OURS, 1), fill(host, clock, COLD, 2)
    pins = make(driver)
    pins.moved(mapped(host))
    load(pins, host, ours)
    pins.pin_one()
    assert pins.pin_ahead()
    driver.refuses = True
    with capture_logs() as said:
        assert not pins.pin_ahead()
    assert [one["action"] for one in said] == ["pin_refused"]
    driver.refuses = False
    fill(host, clock, HOT, 2)
    assert not pins.looks_ahead
    assert not pins.pin_ahead()
    assert driver.pinned == [FIRST]


def test_there_is_a_limit_and_what_is_hottest_is_within(
    host: HostPool, clock: ManualClock, driver: Driver
) -> None:
    ours, _, hot = (fill(host, clock, one, 2) for one in (OURS, COLD, HOT))
    pins = make(driver, most_ahead_bytes=3 * SLAB_BYTES)
    pins.moved(mapped(host))
    load(pins, host, ours)
    with capture_logs() as said:
        settle(pins)
    assert driver.pinned[2:] == numbers(host, hot)[:1]
    assert (said[-1]["pinned_bytes"], said[-1]["left_bytes"]) == (3 * SLAB_BYTES, 3 * SLAB_BYTES)
    fill(host, clock, LATE, 2)
    with capture_logs() as said:
        settle(pins)
    assert len(driver.pinned) == 3
    assert said == []


def test_a_loader_that_counts_no_changes_is_read_at_every_look(
    host: HostPool, clock: ManualClock, driver: Driver
) -> None:
    view = mapped(host)
    pins = make(driver)
    pins.moved(view)
    load(pins, host, fill(host, clock, OURS, 1))

    def as_before() -> None:
        host._mapped[192:200] = bytes(8)

    as_before()
    settle(pins)
    late = fill(host, clock, LATE, 2)
    as_before()
    assert pins.pin_ahead()
    settle(pins)
    assert driver.pinned[1:] == numbers(host, late)


def test_where_the_pool_cannot_be_read_only_what_was_loaded_is_pinned(driver: Driver) -> None:
    pins = make(driver)
    pins.moved(memoryview(bytes(4 * SLAB_BYTES)))
    pins.want(0, 1)
    pins.pin_one()
    assert pins.looks_ahead
    assert not pins.pin_ahead()
    assert not pins.looks_ahead, "it need not wake for it"
    assert driver.pinned == [0]


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
