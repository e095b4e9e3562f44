"""What a worker holds: commands of older leaders, rooms that are asked back, drains."""

from pathlib import Path

import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Epoch
from pilotlight.policy.request import FinishReason
from pilotlight.worker.testing import INSTANCE, ROOM, SLOW_S, MakeRig

pytestmark = pytest.mark.anyio


async def test_an_older_epoch_is_refused(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.command(rig.a_hold(), epoch=5)
    await rig.state(HeldState.READY)
    await rig.command(epoch=4)
    await rig.command(rig.a_hold(), rig.a_hold("inst-2", size=ROOM // 4), epoch=5)
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held() is not None
    assert rig.epoch_seen == 5
    await rig.command(epoch=6)
    await rig.state(None)


async def test_a_worker_that_starts_anew_refuses_what_its_loader_would(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """Before its first lease too: the worker that it follows may have obeyed a newer leader."""
    pool = HostPool.open(tmp_path / "x.pool", 64 * 2**20, SystemClock())
    pool.raise_epoch(Epoch(5))
    rig = await make_rig(pool_path=tmp_path / "x.pool")
    await rig.command(rig.a_hold("inst-old"), epoch=4)
    await rig.command(rig.a_hold(), epoch=5)
    await rig.state(HeldState.READY)
    assert rig.held("inst-old") is None
    assert rig.epoch_seen == 5
    pool.close(remove=True)


async def test_give_up_is_refused_in_flight_and_sticks_when_idle(make_rig: MakeRig) -> None:
    rig = await make_rig(step_s=SLOW_S)
    await rig.ready()
    await rig.submit(max_tokens=200)
    assert await rig.give_up(INSTANCE) == ()
    await rig.cancel()
    await rig.until(lambda: rig.worker.core.table.running == 0)
    assert await rig.give_up(INSTANCE, "inst-unknown") == (INSTANCE,)
    evicted = await rig.state(HeldState.EVICTED)
    assert evicted is not None
    assert evicted.device_bytes == 0
    assert evicted.reason
    assert (await rig.submit("req-2")).code == "not_loaded"
    assert await rig.give_up(INSTANCE) == (INSTANCE,), "asked again, because the answer was lost"
    await rig.command(rig.a_hold(), rig.a_hold("inst-2"))
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held().state is HeldState.EVICTED
    await rig.command(rig.a_hold("inst-2"))
    await rig.state(None)
    await rig.command(rig.a_hold(), rig.a_hold("inst-2"), rig.a_hold("inst-3", size=1 << 18))
    await rig.state(HeldState.READY, "inst-3")
    assert rig.held() is None, "the given up is not loaded by a late command"


async def test_draining_ends_requests_first(make_rig: MakeRig) -> None:
    rig = await make_rig(step_s=SLOW_S)
    await rig.ready()
    await rig.submit(max_tokens=50)
    await rig.command(rig.a_hold(draining=True))
    await rig.state(HeldState.DRAINING)
    assert (await rig.submit("req-2")).code == "not_loaded"
    last = await rig.finish_of()
    assert last.finish is FinishReason.LENGTH
    await rig.state(None)
    await rig.command(rig.a_hold(draining=True), rig.a_hold("inst-2"))
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held() is None


async def test_a_request_that_outlasts_its_drain_can_go_on_elsewhere(make_rig: MakeRig) -> None:
    rig = await make_rig(step_s=0.01)
    await rig.ready()
    await rig.submit(max_tokens=100_000)
    await rig.until(lambda: rig.of())
    await rig.command(rig.a_hold(generation=2, draining=True, drain_within_s=0.0))
    last = await rig.finish_of()
    assert (last.finish, last.code) == (FinishReason.ERROR, "not_loaded")
    await rig.state(None)
    await rig.command(rig.a_hold("inst-2"))
    await rig.state(HeldState.READY, "inst-2")


async def test_what_a_load_took_is_in_the_report_of_its_stage(make_rig: MakeRig) -> None:
    """All of the device's time, where nothing else used it, from the command until it was ready."""
    rig = await make_rig()
    shares, clock = rig.worker.core.table.shares, rig.worker.core.clock
    begun_s = clock.monotonic_s()
    await rig.command(rig.a_hold())
    ready = await rig.state(HeldState.READY)
    passed_s = clock.monotonic_s() - begun_s
    assert ready is not None
    assert 0 < ready.start_device_s <= passed_s
    await rig.submit(max_tokens=5)
    last = await rig.finish_of()
    assert 0 < last.device_s <= clock.monotonic_s() - begun_s - ready.start_device_s
    assert len(shares) == 0


async def test_what_a_stage_had_while_it_was_idle_is_in_its_last_report(make_rig: MakeRig) -> None:
    """With its load and its requests it is all the time that the device held it."""
    rig = await make_rig()
    clock = rig.worker.core.clock
    begun_s = clock.monotonic_s()
    await rig.command(rig.a_hold())
    ready = await rig.state(HeldState.READY)
    await rig.submit(max_tokens=5)
    last = await rig.finish_of()
    await rig.until(lambda: rig.worker.core.table.running == 0)
    assert await rig.give_up(INSTANCE) == (INSTANCE,)
    evicted = await rig.state(HeldState.EVICTED)
    assert ready is not None
    assert evicted is not None
    passed_s = clock.monotonic_s() - begun_s
    assert ready.idle_device_s < evicted.idle_device_s
    assert 0 < evicted.idle_device_s <= passed_s - evicted.start_device_s - last.device_s
