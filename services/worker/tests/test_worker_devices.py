"""A worker of several devices: its engine runs while all of them are well."""

import asyncio
from typing import Any

import pytest
from fake_nvml import GOOD, GPU, FakeNvml

from pilotlight.common.clock import SystemClock
from pilotlight.common.device_health import DeviceReading
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.policy.cluster import DeviceHealth, HealthState
from pilotlight.worker.device_watch import DeviceWatch, WatchTimes

pytestmark = pytest.mark.anyio
TIMES = WatchTimes(poll_s=0.01, deadline_s=5.0, grace_s=1.0)
LOST = DeviceReading(xids=(79,), lost="GPU is lost")


async def watching(*drivers: FakeNvml) -> tuple[DeviceWatch, list[DeviceHealth], Background]:
    background, told = Background(), list[DeviceHealth]()
    watch = DeviceWatch(drivers, SystemClock(), background, frozenset[int], TIMES)
    await watch.start(told.append)
    return watch, told, background


async def test_one_lost_device_is_the_loss_of_all_until_it_is_back() -> None:
    drivers = FakeNvml(), FakeNvml()
    watch, told, background = await watching(*drivers)
    try:
        assert watch.names == (GPU.name, GPU.name)
        assert (watch.health.state, watch.usable) == (HealthState.HEALTHY, True)
        drivers[1].reading = LOST
        await watch.fresh()
        await until(lambda: not watch.usable)
        assert watch.health.state is HealthState.FAILED
        assert watch.each[0].usable
        drivers[1].reading = GOOD
        await until(lambda: watch.usable)
        assert [health.state for health in told] == [
            HealthState.HEALTHY,
            HealthState.FAILED,
            HealthState.HEALTHY,
        ]
    finally:
        await watch.stop()
        await background.stop()
    await until(lambda: all(driver.closed for driver in drivers))


async def test_a_device_that_is_not_watched_makes_all_of_them_so() -> None:
    watch, told, background = await watching(FakeNvml(), FakeNvml(absent="NVML: library not found"))
    try:
        await until(lambda: watch.health.reason == "not watched: NVML: library not found")
        assert (watch.health.state, watch.usable, watch.names) == (
            HealthState.UNWATCHED,
            True,
            (GPU.name,),
        )
        assert told[-1] == watch.health
    finally:
        await watch.stop()
        await background.stop()


async def test_each_device_is_promised_an_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _, background = await watching(FakeNvml(), FakeNvml())
    promised: list[int] = []
    for one in watch.each:
        monkeypatch.setattr(one, "promise", promised.append)
    watch.promise(100)
    assert promised == [50, 50]
    await watch.stop()
    await background.stop()


async def test_a_start_waits_for_the_first_reading_of_each() -> None:
    first, slow = FakeNvml(), FakeNvml()
    slow.hang()
    starting: Any = asyncio.create_task(watching(first, slow))
    await until(lambda: first.reads >= 2)
    assert not starting.done()
    slow.answer()
    watch, _, background = await starting
    assert [one.readings > 0 for one in watch.each] == [True, True]
    await watch.stop()
    await background.stop()
