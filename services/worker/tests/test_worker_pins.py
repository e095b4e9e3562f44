"""What of a host pool an engine pins, and in which order. The pool and its reader are real."""

from pathlib import Path

from pinned_pool import (
    COLD,
    FIRST,
    HOT,
    LATE,
    OURS,
    POOL_BYTES,
    SLAB_BYTES,
    Driver,
    fill,
    make,
    mapped,
    numbers,
)
from structlog.testing import capture_logs

from pilotlight.common.clock import ManualClock
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.worker.engine_child.pins import Pins


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
