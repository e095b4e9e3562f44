"""A worker whose device fails, hangs and comes back: what it reports, what becomes of its engine and its requests."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, GOOD, FakeNvml, ScriptedNvml

from pilotlight.common.buckets import WORKERS
from pilotlight.common.messages.hold import Hold, WorkerHold, worker_hold_subject
from pilotlight.common.messages.reports import WORKER_REPORTS, WorkerReport
from pilotlight.common.messages.tokens import Submit, SubmitReply, TokenBatch, TokenEntry, submit_subject, tokens_subject
from pilotlight.common.nvml import NvmlReader
from pilotlight.common.phases import PhaseReporter
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff
from pilotlight.policy.device_health import GOOD_READINGS, UNTOLD_READINGS, DeviceReading, Recovery
from pilotlight.policy.types import (
    DeviceHealth,
    DeviceKind,
    Epoch,
    GatewayId,
    Generation,
    HealthState,
    HeldState,
    InstanceId,
    ModelName,
    NodeId,
    RequestId,
    Sampling,
    WorkerFacts,
    WorkerId,
)
from pilotlight.worker.app import build
from pilotlight.worker.child_process import ChildOptions, bury, kill_group, spawn
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.device_watch import DeviceWatch, WatchTimes
from pilotlight.worker.engine_client import EngineDied
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.metrics import WorkerMetrics
from pilotlight.worker.process_engine import ProcessEngine
from pilotlight.worker.requests import RequestTable
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.spare import Spare
from pilotlight.worker.vocabularies import Vocabularies
from pilotlight.worker.worker import Worker

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WORKER, INSTANCE, GATEWAY = WorkerId("node-1-w0"), InstanceId("inst-1"), GatewayId("gw-1")
ROOM = 1 << 20
DEADLINE_S = 30.0
TIMES = WatchTimes(poll_s=0.02, deadline_s=0.8, grace_s=0.2)
XID_79 = DeviceReading(xids=(79,), lost="GPU is lost")


class Rig:
    """A worker with a real engine child on cores, whose device is a fake; and a gateway."""

    def __init__(self, worker: Worker, engine: ProcessEngine, nvml: FakeNvml, bus: Any, model: Any) -> None:
        self.worker, self.engine, self.nvml, self.bus, self.model = worker, engine, nvml, bus, model
        self.facts: WorkerFacts | None = None
        self.entries: list[TokenEntry] = []
        self.starts = 0
        start = engine.start

        async def counted() -> Any:
            self.starts += 1
            return await start()

        engine.start = counted

    async def listen(self) -> None:
        await self.bus.subscribe(WORKER_REPORTS, WorkerReport, self._on_report)
        await self.bus.subscribe(tokens_subject(GATEWAY), TokenBatch, self._on_tokens, binary=True)

    async def _on_report(self, report: WorkerReport) -> None:
        self.facts = report.facts

    async def _on_tokens(self, batch: TokenBatch) -> None:
        self.entries += batch.entries

    async def health(self, state: HealthState) -> WorkerFacts:
        await until(lambda: self.facts is not None and self.facts.health.state is state, deadline_s=DEADLINE_S)
        assert self.facts is not None
        return self.facts

    async def state(self, state: HeldState) -> None:
        def reached() -> bool:
            return self.facts is not None and any(held.state is state for held in self.facts.held)

        await until(reached, deadline_s=DEADLINE_S)

    async def hold(self, generation: int = 1) -> None:
        hold = Hold(
            instance_id=INSTANCE,
            generation=Generation(generation),
            model=self.model,
            stage=self.model.spec.whole,
            device_bytes=ROOM // 2,
        )
        message = WorkerHold(worker_id=WORKER, epoch=Epoch(1), holds=(hold,))
        await self.bus.publish(worker_hold_subject(WORKER), message)

    async def submit(self, request_id: str, max_tokens: int) -> SubmitReply:
        submit = Submit(
            request_id=RequestId(request_id),
            attempt=1,
            gateway_id=GATEWAY,
            instance_id=INSTANCE,
            model=ModelName("tiny"),
            prompt_ids=[1, 2, 3],
            sampling=Sampling(seed=5, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        return await self.bus.request(submit_subject(WORKER), submit, SubmitReply, deadline_s=2.0)

    async def end_of(self, request_id: str) -> TokenEntry:
        def ended() -> list[TokenEntry]:
            return [entry for entry in self.entries if entry.request_id == request_id and entry.finish]

        await until(lambda: bool(ended()), deadline_s=DEADLINE_S)
        return ended()[0]


MakeRig = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def make_rig(make_context: Any, connect_bus: Any, leases: Any, model: Any, tmp_path: Path) -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []

    async def make(nvml: FakeNvml, *, spare: bool = False, module: str = "pilotlight.worker.child") -> Rig:
        context = make_context("worker", WorkerSettings())
        options = ChildOptions(threads=1, log_path=tmp_path / "engine.log", module=module)
        engine = ProcessEngine(options, Spare(options, Backoff(first_s=0.01, limit_s=0.05)) if spare else None)
        core = WorkerCore(
            worker_id=WORKER,
            node_id=NodeId("node-1"),
            device_bytes=ROOM,
            engine=engine,
            table=RequestTable(8),
            bus=context.bus,
            clock=context.clock,
            background=context.background,
            metrics=WorkerMetrics(context.metrics),
            phases=PhaseReporter(context.bus, context.clock, context.background, "worker"),
            vocabularies=Vocabularies(context.store),
        )
        bucket = await context.bus.bucket(WORKERS)
        watch = DeviceWatch(nvml, context.clock, context.background, lambda: engine.pids, TIMES)
        worker = Worker(core, DeviceKind.CUDA, StageLoader(core, leases, None), bucket, context.incarnation, watch)
        rig = Rig(worker, engine, nvml, await connect_bus("gateway"), model)
        rigs.append(rig)
        await rig.listen()
        await worker.start()
        return rig

    yield make
    for rig in rigs:
        rig.nvml.answer()
        await rig.worker.stop()


async def serving(rig: Rig) -> None:
    await rig.health(HealthState.HEALTHY)
    await rig.hold()
    await rig.state(HeldState.READY)


async def readings(rig: Rig, count: int) -> None:
    seen = rig.nvml.reads
    await until(lambda: rig.nvml.reads >= seen + count, deadline_s=DEADLINE_S)


async def test_a_device_that_fails_ends_its_engine_and_none_is_started_before_it_is_well(make_rig: MakeRig) -> None:
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
    assert (await rig.end_of("req-1")).code == "device_failed", "a gateway resumes it elsewhere"
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
    await rig.hold(generation=2)
    await rig.state(HeldState.READY)
    assert (await rig.submit("req-3", 3)).accepted
    assert (await rig.end_of("req-3")).code == ""


async def test_a_driver_that_does_not_answer_is_the_finding_and_is_asked_nothing_more(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await serving(rig)
    rig.nvml.hang()
    facts = await rig.health(HealthState.FAILED)
    assert facts.health.reason == "wedged: the driver does not answer"
    await rig.state(HeldState.FAILED)
    asked = rig.nvml.reads
    late = rig.worker._watch.readings
    await until(lambda: rig.worker._watch.readings >= late + 3, deadline_s=DEADLINE_S)
    assert rig.nvml.reads == asked
    assert rig.starts == 1
    rig.nvml.answer()
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
    assert (await rig.end_of("req-1")).code == "engine_failed"
    await until(lambda: rig.engine.pid == promoted, deadline_s=DEADLINE_S)
    assert (await rig.health(HealthState.HEALTHY)).device.name == "cpu (1 threads)"


async def test_an_engine_that_dies_of_its_device_is_not_started_though_nobody_knew_before(make_rig: MakeRig) -> None:
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
    await until(lambda: not rig.worker._restarting, deadline_s=DEADLINE_S)
    assert {path.name for path in opened.iterdir()} == {"hang", str(first), str(promoted)}
    assert rig.engine.pids == frozenset()
    assert rig.starts == 2

    (opened / "hang").unlink()
    rig.nvml.reading = GOOD
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    assert rig.starts == 3


async def test_an_engine_that_comes_up_on_a_failed_device_all_the_same_is_ended(make_rig: MakeRig) -> None:
    """As with an engine that cannot be killed before it is up."""
    rig = await make_rig(FakeNvml())
    await rig.health(HealthState.HEALTHY)
    start, kill = rig.engine.start, rig.engine.kill

    async def unheard(reason: str, code: str = "") -> None:
        pass

    async def unawares() -> Any:
        up = await start()
        rig.nvml.reading, rig.engine.kill = XID_79, unheard
        rig.worker._watch._take(XID_79)
        rig.engine.kill = kill
        return up

    rig.engine.start = unawares
    os.kill(rig.engine.pid or 0, signal.SIGKILL)
    await rig.health(HealthState.FAILED)
    await until(lambda: not rig.engine.alive and not rig.worker._restarting, deadline_s=DEADLINE_S)
    await readings(rig, 3)
    assert rig.engine.pid is None
    assert rig.starts == 2


async def test_two_who_want_the_engine_back_in_one_turn_get_one_start(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await rig.health(HealthState.HEALTHY)
    rig.nvml.reading = XID_79
    await rig.health(HealthState.FAILED)
    await until(lambda: not rig.engine.alive and not rig.worker._restarting, deadline_s=DEADLINE_S)

    def well(health: DeviceHealth) -> None:
        rig.worker._on_health(health)
        rig.worker._on_death(EngineDied(reason="told late"))

    rig.worker._watch._on_change = well
    rig.nvml.reading = GOOD
    await until(lambda: rig.engine.alive and not rig.worker._restarting, deadline_s=DEADLINE_S)
    assert rig.starts == 2


async def test_a_worker_on_a_device_that_hangs_from_the_beginning_reports_it_and_starts_nothing(make_rig: MakeRig) -> None:
    nvml = FakeNvml()
    nvml.hang()
    rig = await make_rig(nvml)
    facts = await rig.health(HealthState.FAILED)
    assert (facts.engine_up, rig.starts, facts.device.name) == (False, 0, "")
    nvml.answer()
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    assert rig.starts == 1


@pytest.mark.parametrize("named", ["0", "GPU-0"])
async def test_a_device_that_is_lost_when_the_worker_starts_is_watched_until_it_is_back(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    nvml = ScriptedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
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
    assert (await rig.end_of("req-1")).code == ""
    assert rig.starts == 1


async def test_memory_that_others_use_is_told_where_it_was_promised_to_models(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await rig.health(HealthState.HEALTHY)
    rig.worker._watch.promise(70 * GIB)
    rig.nvml.reading = DeviceReading(memory_bytes=80 * GIB, used_bytes=60 * GIB, own_bytes=10 * GIB)
    assert (await rig.health(HealthState.DEGRADED)).health.reason.startswith("memory: others use 50 GiB; 40 GiB")
    rig.nvml.reading = GOOD
    await rig.health(HealthState.HEALTHY)


async def test_without_nvml_the_worker_works_and_says_that_nobody_watches(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml(absent="NVML: library not found"))
    facts = await rig.health(HealthState.UNWATCHED)
    assert facts.health.reason == "not watched: NVML: library not found"
    await until(lambda: rig.facts is not None and rig.facts.engine_up, deadline_s=DEADLINE_S)
    os.kill(rig.engine.pid or 0, signal.SIGKILL)
    await until(lambda: rig.starts == 2 and rig.engine.alive, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(("named", "shown", "meant"), [("", "2,3", "2"), ("1", "2,3", "1"), ("", "", "")])
async def test_engine_and_watch_mean_the_same_device(
    make_context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, shown: str, meant: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    settings = WorkerSettings(device="cuda", cuda_device=named, pool_socket=tmp_path / "pool.sock")
    worker = (await build(make_context("worker", settings))).components[-1]
    assert isinstance(worker, Worker)
    assert isinstance(worker.core.engine, ProcessEngine)
    assert worker._watch is not None
    assert worker.core.engine._options.cuda_device == meant
    assert worker._watch._reader._device == (meant or "0")


async def test_a_gpus_worker_is_built_with_a_watch_and_a_child_of_its_device(make_context: Any, tmp_path: Path) -> None:
    settings = WorkerSettings(
        device="cuda",
        cuda_device="GPU-1a",
        step_tokens=4096,
        pool_socket=tmp_path / "pool.sock",
        pool_path=tmp_path / "pool",
        log_dir=tmp_path,
    )
    application = await build(make_context("worker", settings))
    worker = application.components[-1]
    assert isinstance(worker, Worker)
    assert worker._watch is not None
    assert worker.core.device_bytes == 0, "its engine says"
    assert isinstance(worker.core.engine, ProcessEngine)
    options = worker.core.engine._options
    assert (options.device, options.cuda_device, options.step_tokens, options.device_bytes) == (
        DeviceKind.CUDA,
        "GPU-1a",
        4096,
        None,
    )
    child = await spawn(options, spare=True)
    try:
        process = f"/proc/{child.process.pid}"
        # The kernel shows neither for a moment after it has begun to run the program.
        await until(lambda: b"CUDA" in content(process, "environ"))
        words = content(process, "cmdline").split(b"\0")
        assert words[words.index(b"--device") + 1] == b"cuda"
        assert words[words.index(b"--step-tokens") + 1] == b"4096"
        environment = content(process, "environ").split(b"\0")
        assert {b"CUDA_VISIBLE_DEVICES=GPU-1a", b"CUDA_DEVICE_ORDER=PCI_BUS_ID"} <= set(environment)
    finally:
        kill_group(child.process)
        await bury(child)


def content(folder: str, name: str) -> bytes:
    return (Path(folder) / name).read_bytes()


async def test_stopping_does_not_wait_for_a_driver_that_hangs(make_rig: MakeRig) -> None:
    rig = await make_rig(FakeNvml())
    await serving(rig)
    rig.nvml.hang()
    await rig.health(HealthState.FAILED)
    async with asyncio.timeout(DEADLINE_S):
        await rig.worker.stop()
    assert not rig.nvml.closed
    rig.nvml.answer()
    await until(lambda: rig.nvml.closed)
