"""A worker whose device fails, hangs and comes back: what it reports, what becomes of its engine
and its requests.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from device_rig import IMPATIENT, PATIENT, DeviceRig
from fake_nvml import GIB, GOOD, FakeNvml, ScriptedNvml

from pilotlight.common.buckets import WORKERS
from pilotlight.common.device_health import GOOD_READINGS, UNTOLD_READINGS, DeviceReading, Recovery
from pilotlight.common.nvml import NvmlReader
from pilotlight.common.phase_reports import reported_phases
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff
from pilotlight.policy.cluster import DeviceHealth, DeviceKind, HealthState, HeldState
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import EngineKind
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.device_watch import DeviceWatch, WatchTimes
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.engines.spare import Spare
from pilotlight.worker.engines.switch import EngineSwitch
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.metrics import WorkerMetrics
from pilotlight.worker.requests import RequestTable
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.testing import DEADLINE_S, ROOM, SLOW_S, WORKER
from pilotlight.worker.vocabularies import Vocabularies
from pilotlight.worker.worker import Worker

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
XID_79 = DeviceReading(xids=(79,), lost="GPU is lost")


MakeRig = Callable[..., Awaitable[DeviceRig]]


@pytest.fixture
async def make_rig(
    make_context: Any, connect_bus: Any, leases: Any, model: Any, tmp_path: Path
) -> AsyncIterator[MakeRig]:
    rigs: list[DeviceRig] = []

    async def make(
        nvml: FakeNvml,
        *,
        spare: bool = False,
        module: str = "pilotlight.worker.engine_main",
        times: WatchTimes = PATIENT,
    ) -> DeviceRig:
        context = make_context("worker", WorkerSettings())
        options = ChildOptions(
            threads=1, log_path=tmp_path / "engine.log", module=module, faults=f"step={SLOW_S}"
        )
        engine = ProcessEngine(
            options, Spare(options, Backoff(first_s=0.01, limit_s=0.05)) if spare else None
        )
        core = WorkerCore(
            worker_id=WORKER,
            node_id=NodeId("node-1"),
            device_bytes=ROOM,
            engine=EngineSwitch({EngineKind.NATIVE: lambda: engine}, context.background),
            table=RequestTable(8),
            bus=context.bus,
            clock=context.clock,
            background=context.background,
            metrics=WorkerMetrics(context.metrics),
            phases=reported_phases(context.bus, context.clock, context.background, "worker"),
            vocabularies=Vocabularies(context.store),
        )
        bucket = await context.bus.bucket(WORKERS)
        watch = DeviceWatch((nvml,), context.clock, context.background, lambda: engine.pids, times)
        worker = Worker(
            core,
            DeviceKind.CUDA,
            StageLoader(core, leases, None),
            bucket,
            context.incarnation,
            watch,
        )
        rig = DeviceRig(worker, engine, nvml, await connect_bus("gateway"), model)
        rigs.append(rig)
        await rig.listen()
        await worker.start()
        return rig

    yield make
    for rig in rigs:
        rig.answer()
        await rig.worker.stop()


async def serving(rig: DeviceRig) -> None:
    await rig.health(HealthState.HEALTHY)
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)


async def readings(rig: DeviceRig, count: int) -> None:
    seen = rig.nvml.reads
    await until(lambda: rig.nvml.reads >= seen + count, deadline_s=DEADLINE_S)


async def test_a_device_that_fails_ends_its_engine_and_none_is_started_before_it_is_well(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig(FakeNvml())
    await serving(rig)
    assert rig.nvml.pids == {rig.engine.pid}
    assert (await rig.submit("req-1", 200)).accepted
    await until(lambda: bool(rig.entries))
    pid = rig.engine.pid
    rig.nvml.reading = XID_79
    facts = await rig.health(HealthState.FAILED)
    assert facts.health.reason == "lost: GPU is lost"
    assert not facts.engine_up
    assert (await rig.finish_of("req-1")).code == "device_failed", "a gateway resumes it elsewhere"
    await rig.state(HeldState.FAILED)
    assert rig.facts is not None
    assert rig.facts.held[0].reason.startswith("device_failed: the engine ended: lost: GPU is lost")
    assert rig.worker.not_ready() == f"the device of {WORKER} has failed: lost: GPU is lost"
    refused = await rig.submit("req-2", 4)
    assert (refused.accepted, refused.code) == (False, "not_loaded")

    await readings(rig, 20)
    assert rig.starts == 1, "left alone"
    assert rig.engine.pid is None

    # The driver answers again and does not say that nothing is to be done: what the Xid said stays.
    rig.nvml.reading = DeviceReading(recovery=Recovery.UNKNOWN)
    await readings(rig, 3 * GOOD_READINGS)
    assert rig.starts == 1
    rig.nvml.reading = GOOD
    await rig.health(HealthState.HEALTHY)
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    assert rig.engine.pid != pid
    assert rig.starts == 2
    await rig.command(rig.a_hold(generation=2))
    await rig.state(HeldState.READY)
    assert (await rig.submit("req-3", 3)).accepted
    assert (await rig.finish_of("req-3")).code == ""


async def test_a_driver_that_does_not_answer_is_the_finding_and_is_asked_nothing_more(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig(FakeNvml())
    await serving(rig)
    rig.hang()
    facts = await rig.health(HealthState.FAILED)
    assert facts.health.reason == "wedged: the driver does not answer"
    await rig.state(HeldState.FAILED)
    asked = rig.nvml.reads
    late = rig.worker._watch.each[0].readings
    await until(lambda: rig.worker._watch.each[0].readings >= late + 3, deadline_s=DEADLINE_S)
    assert rig.nvml.reads == asked
    assert rig.starts == 1
    rig.answer()
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    assert (await rig.health(HealthState.HEALTHY)).health.reason == ""
    assert rig.starts == 2


async def test_a_program_that_the_driver_ended_is_replaced_by_the_spare(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml(), spare=True)
    await serving(rig)
    spare = rig.engine._spare
    await until(lambda: spare.pid is not None, deadline_s=DEADLINE_S)
    promoted = spare.pid
    await readings(rig, 2)
    assert rig.nvml.pids == {rig.engine.pid, promoted}
    assert (await rig.submit("req-1", 200)).accepted
    await until(lambda: bool(rig.entries))
    # As after an illegal address: the driver tells of 31 and cleans up, which it calls 45.
    rig.nvml.once(DeviceReading(xids=(31, 45), recovery=Recovery.NONE))
    os.kill(rig.engine.pid or 0, signal.SIGKILL)
    assert (await rig.finish_of("req-1")).code == "engine_failed"
    await until(lambda: rig.engine.pid == promoted, deadline_s=DEADLINE_S)
    assert (await rig.health(HealthState.HEALTHY)).device.name == "cpu (1 threads)"


async def test_an_engine_that_dies_of_its_device_is_not_started_though_nobody_knew_before(
    make_rig: MakeRig,
) -> None:
    """The reading that tells is asked for between the death and the next start."""
    nvml = FakeNvml()
    rig = await make_rig(nvml)
    await serving(rig)
    nvml.reading = DeviceReading(xids=(48,))
    os.kill(rig.engine.pid or 0, signal.SIGKILL)
    facts = await rig.health(HealthState.FAILED)
    assert facts.health.reason == "xid: 48, a double-bit ECC error"
    await readings(rig, 5)
    assert rig.starts == 1


async def test_a_device_that_fails_while_the_spare_starts_gets_no_other_engine(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    opened = tmp_path / "opened"
    opened.mkdir()
    monkeypatch.setenv("UNREADY_DIR", str(opened))
    rig = await make_rig(FakeNvml(), spare=True, module="unready_child")
    await rig.health(HealthState.HEALTHY)
    spare = rig.engine._spare
    await until(lambda: spare.pid is not None, deadline_s=DEADLINE_S)
    first, promoted = rig.engine.pid, spare.pid
    (opened / "hang").touch()
    os.kill(first or 0, signal.SIGKILL)
    await until((opened / str(promoted)).exists, deadline_s=DEADLINE_S)
    rig.nvml.reading = XID_79
    assert not (await rig.health(HealthState.FAILED)).engine_up
    await until(lambda: not rig.worker._starts.busy, deadline_s=DEADLINE_S)
    assert {path.name for path in opened.iterdir()} == {"hang", str(first), str(promoted)}
    assert rig.engine.pids == frozenset()
    assert rig.starts == 2

    (opened / "hang").unlink()
    rig.nvml.reading = GOOD
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    assert rig.starts == 3


async def test_an_engine_that_comes_up_on_a_failed_device_all_the_same_is_ended(
    make_rig: MakeRig,
) -> None:
    """As with an engine that cannot be killed before it is up."""
    rig = await make_rig(FakeNvml())
    await rig.health(HealthState.HEALTHY)
    start, kill = rig.engine.start, rig.engine.kill

    async def unheard(reason: str, code: str = "") -> None:
        pass

    async def unawares() -> Any:
        up = await start()
        rig.nvml.reading, rig.engine.kill = XID_79, unheard
        rig.worker._watch.each[0]._take(XID_79)
        rig.engine.kill = kill
        return up

    rig.engine.start = unawares
    os.kill(rig.engine.pid or 0, signal.SIGKILL)
    await rig.health(HealthState.FAILED)
    await until(lambda: not rig.engine.alive and not rig.worker._starts.busy, deadline_s=DEADLINE_S)
    await readings(rig, 3)
    assert rig.engine.pid is None
    assert rig.starts == 2


async def test_two_who_want_the_engine_back_in_one_turn_get_one_start(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await rig.health(HealthState.HEALTHY)
    rig.nvml.reading = XID_79
    await rig.health(HealthState.FAILED)
    await until(lambda: not rig.engine.alive and not rig.worker._starts.busy, deadline_s=DEADLINE_S)

    def well(health: DeviceHealth) -> None:
        rig.worker._on_health(health)
        rig.worker._on_death(EngineDied(reason="told late"))

    rig.worker._watch._on_change = well
    rig.nvml.reading = GOOD
    await until(lambda: rig.engine.alive and not rig.worker._starts.busy, deadline_s=DEADLINE_S)
    assert rig.starts == 2


async def test_a_worker_on_a_device_that_hangs_from_the_beginning_reports_it_and_starts_nothing(
    make_rig: MakeRig,
) -> None:
    nvml = FakeNvml()
    nvml.hang()
    rig = await make_rig(nvml, times=IMPATIENT)
    facts = await rig.health(HealthState.FAILED)
    assert (facts.engine_up, rig.starts, facts.device.name) == (False, 0, "")
    rig.answer()
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    assert rig.starts == 1


@pytest.mark.parametrize("named", ["0", "GPU-0"])
async def test_a_device_that_is_lost_when_the_worker_starts_is_watched_until_it_is_back(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    nvml = ScriptedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    nvml.lose(0)
    rig = await make_rig(FakeNvml(reads_as=NvmlReader(named)))
    facts = await rig.health(HealthState.FAILED)
    assert (facts.health.reason, facts.engine_up, rig.starts) == ("lost: GPU is lost", False, 0)
    nvml.lost.clear()
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    assert rig.starts == 1


async def test_an_error_of_the_driver_ends_the_engine_only_when_it_stays(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await serving(rig)
    pid = rig.engine.pid
    for _ in range(UNTOLD_READINGS - 1):
        rig.nvml.once(DeviceReading(untold="Unknown Error"))
    await readings(rig, UNTOLD_READINGS)
    assert rig.engine.pid == pid
    rig.nvml.reading = DeviceReading(untold="Unknown Error")
    facts = await rig.health(HealthState.FAILED)
    assert facts.health.reason.startswith("untold: the driver answers with errors alone")


async def test_a_degraded_device_goes_on_and_says_so(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await serving(rig)
    rig.nvml.once(DeviceReading(xids=(94,), recovery=Recovery.NONE))
    facts = await rig.health(HealthState.DEGRADED)
    assert facts.engine_up
    assert facts.health.reason.startswith("xid: 94, an ECC error that is contained")
    assert (await rig.submit("req-1", 3)).accepted
    assert (await rig.finish_of("req-1")).code == ""
    assert rig.starts == 1


async def test_memory_that_others_use_is_told_where_it_was_promised_to_models(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig(FakeNvml())
    await rig.health(HealthState.HEALTHY)
    rig.worker._watch.promise(70 * GIB)
    rig.nvml.reading = DeviceReading(memory_bytes=80 * GIB, used_bytes=60 * GIB, own_bytes=10 * GIB)
    assert (await rig.health(HealthState.DEGRADED)).health.reason.startswith(
        "memory: others use 50 GiB; 40 GiB"
    )
    rig.nvml.reading = GOOD
    await rig.health(HealthState.HEALTHY)


async def test_without_nvml_the_worker_works_and_says_that_nobody_watches(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig(FakeNvml(absent="NVML: library not found"))
    facts = await rig.health(HealthState.UNWATCHED)
    assert facts.health.reason == "not watched: NVML: library not found"
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    os.kill(rig.engine.pid or 0, signal.SIGKILL)
    await until(lambda: rig.starts == 2 and rig.engine.alive, deadline_s=DEADLINE_S)


async def test_stopping_does_not_wait_for_a_driver_that_hangs(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await serving(rig)
    rig.hang()
    await rig.health(HealthState.FAILED)
    async with asyncio.timeout(DEADLINE_S):
        await rig.worker.stop()
    assert not rig.nvml.closed
    rig.answer()
    await until(lambda: rig.nvml.closed)
