"""A worker's engine child on the device: the tokens of the CPU's, and what becomes of it when it is
killed or the device fails it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import faulty_child
import pynvml
import pytest
import torch
from gpu_seen import gpu_of
from pool_files import PoolFile, pool_file

from pilotlight.common.device_health import Judgement, judge
from pilotlight.common.driver_thread import DriverThread
from pilotlight.common.messages.engine import Abort, Run, StageLoaded, StepDone, UnloadStage
from pilotlight.common.nvml import NvmlReader
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff
from pilotlight.policy.cluster import DeviceKind, HealthState
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.engines.spare import Spare

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

Record = Callable[[str, object], None]
DEADLINE_S = 120.0
"""The first child on a machine compiles its kernels."""
ROOM_BYTES = 4 << 30
KV_TOKENS = 2048


class Listener:
    """Everything that an engine says."""

    def __init__(self, engine: ProcessEngine) -> None:
        self.engine = engine
        self.events = engine.events()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}

    async def until(self, kind: type, reached: Callable[[], bool] = lambda: True) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            async for told in self.events:
                event = told.message
                for produced in event.produced if isinstance(event, StepDone) else ():
                    self.tokens.setdefault(produced.request_id, []).extend(produced.token_ids)
                    if produced.finish is not None:
                        self.ends[produced.request_id] = produced
                if isinstance(event, kind) and reached():
                    return event
        raise AssertionError(f"no {kind.__name__} came")

    async def end_of(self, request_id: str) -> Any:
        await self.until(StepDone, lambda: request_id in self.ends)
        return self.ends[request_id]

    async def load(self, pool: PoolFile, instance_id: str = "inst-1") -> StageLoaded:
        await self.engine.load_stage(pool.load(instance_id, KV_TOKENS, pool.model.dtype))
        for place in pool.places(instance_id):
            await self.engine.place_part(place)
        return await self.until(StageLoaded)

    async def run(
        self,
        request_id: str,
        prompt_tokens: int,
        max_tokens: int,
        outputs: tuple[int, ...] = (),
        **more: Any,
    ) -> None:
        sampling = Sampling(
            seed=5, max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **more}
        )
        prompt = [(7 * place + prompt_tokens) % 900 for place in range(prompt_tokens)]
        await self.engine.run(
            Run(
                request_id=RequestId(request_id),
                attempt=1,
                instance_id=InstanceId("inst-1"),
                prompt_ids=prompt,
                output_ids=list(outputs),
                sampling=sampling,
            )
        )


MakeEngine = Callable[..., Awaitable[tuple[ProcessEngine, Listener]]]


@pytest.fixture
async def make_engine(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeEngine]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    uuid = gpu_of(device).uuid
    made: list[ProcessEngine] = []

    async def make(
        kind: DeviceKind = DeviceKind.CUDA, *, module: str = "", spare: bool = False
    ) -> tuple[ProcessEngine, Listener]:
        options = ChildOptions(
            threads=2,
            log_path=tmp_path / f"{kind.value}.log",
            device=kind,
            cuda_devices=(uuid,) if kind is DeviceKind.CUDA else (),
            device_bytes=ROOM_BYTES if kind is DeviceKind.CUDA else None,
            step_tokens=512,
            module=module or "pilotlight.worker.engine_main",
        )
        engine = ProcessEngine(
            options, Spare(options, Backoff(first_s=0.01, limit_s=0.05)) if spare else None
        )
        made.append(engine)
        await engine.start()
        return engine, Listener(engine)

    yield make
    for engine in made:
        await engine.stop()


@pytest.fixture
def pool(tmp_path: Path) -> PoolFile:
    return pool_file(tmp_path / "pool", "llama", Dtype.FLOAT32, 3)


async def talk(listener: Listener) -> dict[str, list[int]]:
    """Requests beside each other: greedy, noisy, filtered, and one that is cancelled."""
    for number, prompt_tokens in enumerate((5, 70, 300)):
        await listener.run(f"greedy {number}", prompt_tokens, 40)
    await listener.run("noisy", 31, 40, temperature=0.9)
    await listener.run("filtered", 33, 20, temperature=0.8, top_k=40, top_p=0.9)
    await listener.run("cancelled", 20, 1000)
    await listener.until(StepDone, lambda: len(listener.tokens.get("cancelled", ())) > 3)
    await listener.engine.abort(Abort(request_id=RequestId("cancelled"), attempt=1))
    for name in ("greedy 0", "greedy 1", "greedy 2", "noisy", "filtered", "cancelled"):
        if name not in listener.ends:
            await listener.end_of(name)
    assert listener.ends["cancelled"].finish is FinishReason.CANCELLED
    return {name: tokens for name, tokens in listener.tokens.items() if name != "cancelled"}


async def test_a_child_on_the_device_gives_the_cpus_tokens(
    make_engine: MakeEngine, pool: PoolFile, record_property: Record
) -> None:
    engine, listener = await make_engine()
    up = await engine.start()
    record_property("device", up.device_name)
    record_property("load_gb_per_s", up.load_bytes_per_s / 1e9)
    assert up.device_bytes == ROOM_BYTES
    loaded = await listener.load(pool)
    assert {phase.name.value for phase in loaded.phases} == {"init", "load"}
    tokens = await talk(listener)
    _, reference = await make_engine(DeviceKind.CPU)
    await reference.load(pool)
    assert tokens == await talk(reference)
    # Loaded anew, from memory that is pinned by now.
    await engine.unload_stage(UnloadStage(instance_id=InstanceId("inst-1")))
    await listener.load(pool)
    await listener.run("again", 5, 40)
    await listener.end_of("again")
    assert listener.tokens["again"] == tokens["greedy 0"]


async def test_a_child_that_says_itself_what_it_has(device: torch.device, tmp_path: Path) -> None:
    gpu = gpu_of(device)
    options = ChildOptions(
        threads=2, log_path=tmp_path / "log", device=DeviceKind.CUDA, cuda_devices=(gpu.uuid,)
    )
    engine = ProcessEngine(options)
    up = await engine.start()
    await engine.stop()
    assert up.device_name == gpu.name
    assert 0.3 * gpu.memory_bytes < up.device_bytes < 0.98 * gpu.memory_bytes


async def test_a_killed_child_is_replaced_by_its_spare_and_the_stream_goes_on(
    make_engine: MakeEngine, pool: PoolFile
) -> None:
    engine, listener = await make_engine(spare=True)
    await listener.load(pool)
    await listener.run("whole", 50, 60)
    await listener.end_of("whole")
    spare = engine._spare
    await until(lambda: spare is not None and spare.pid is not None, deadline_s=DEADLINE_S)
    promoted = spare.pid if spare is not None else None
    await listener.run("cut", 50, 1000)
    await listener.until(StepDone, lambda: len(listener.tokens.get("cut", ())) >= 10)
    os.kill(engine.pid or 0, signal.SIGKILL)
    await listener.until(EngineDied)
    assert (await engine.start()).pid == promoted
    await listener.load(pool)
    # As a gateway does it: the prompt and what came of it.
    came = tuple(listener.tokens["cut"][:10])
    await listener.run("rest", 50, 60, came)
    await listener.end_of("rest")
    assert [*came, *listener.tokens["rest"]] == listener.tokens["whole"]


def opened_devices(pid: int) -> set[str]:
    """Device files of NVIDIA's that a process has open."""
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    return {path for path in links if path.startswith("/dev/nvidia")}


def compute_pids() -> set[int]:
    """Processes with a context on some device, by the driver."""
    pynvml.nvmlInit()
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    pids = {
        process.pid
        for handle in handles
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    }
    pynvml.nvmlShutdown()
    return pids


def libraries_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_a_spare_has_no_context_on_the_device(
    make_engine: MakeEngine, record_property: Record
) -> None:
    engine, _ = await make_engine(spare=True)
    spare = engine._spare
    await until(lambda: spare is not None and spare.pid is not None, deadline_s=DEADLINE_S)
    spare_pid, pid = (spare.pid if spare else None) or 0, engine.pid or 0
    assert "libtorch" in libraries_of(spare_pid), "it has imported torch"
    assert opened_devices(spare_pid) == set()
    assert opened_devices(pid) != set()
    pids = compute_pids()
    # In a container the driver may know processes by other numbers.
    record_property("the_driver_shows_our_processes", pid in pids)
    assert spare_pid not in pids


async def test_a_batch_without_memory_ends_one_request(
    make_engine: MakeEngine, pool: PoolFile
) -> None:
    engine, listener = await make_engine(module="faulty_child")
    pid = engine.pid
    await listener.load(pool)
    await listener.run("alone", 50, 200)
    await listener.end_of("alone")
    await listener.run("beside", 50, 200)
    await listener.until(StepDone, lambda: len(listener.tokens.get("beside", ())) > 3)
    await listener.run("large", faulty_child.NO_ROOM_TOKENS, 10)
    large = await listener.end_of("large")
    assert (large.finish, large.code) == (FinishReason.ERROR, "engine_failed")
    if "beside" not in listener.ends:
        await listener.end_of("beside")
    assert listener.tokens["beside"] == listener.tokens["alone"]
    assert engine.pid == pid


async def test_an_illegal_address_ends_the_child_and_the_device_is_well(
    make_engine: MakeEngine, pool: PoolFile, record_property: Record
) -> None:
    reader, driver = NvmlReader("0"), DriverThread("nvml")
    await driver.call(reader.open)
    engine, listener = await make_engine(module="faulty_child")
    await listener.load(pool)
    await listener.run("before", 50, 20)
    await listener.end_of("before")
    await listener.run("ill", faulty_child.ILLEGAL_TOKENS, 10)
    died = await listener.until(EngineDied)
    assert died.code == "engine_failed"
    assert "illegal memory access" in died.reason
    await engine.start()
    await listener.load(pool)
    await listener.run("after", 50, 20)
    await listener.end_of("after")
    assert listener.tokens["after"] == listener.tokens["before"]
    # The driver tells of it some time later, as of a program's fault; where it tells of none, that
    # is recorded.
    reading = await driver.call(lambda: reader.read(engine.pids))
    record_property("xids", str(reading.xids))
    record_property("recovery", reading.recovery.value)
    assert judge(Judgement(), reading).health.state in (HealthState.HEALTHY, HealthState.DEGRADED)
    await driver.call(reader.close)


async def test_the_driver_is_read(device: torch.device, record_property: Record) -> None:
    reader, driver = NvmlReader("0"), DriverThread("nvml")
    gpu = await driver.call(reader.open)
    reading = await driver.call(lambda: reader.read((os.getpid(),)))
    for name in ("recovery", "uncorrected_errors", "remap_pending", "used_bytes", "own_bytes"):
        record_property(name, str(getattr(reading, name)))
    assert reading.memory_bytes == gpu.memory_bytes > 1 << 30
    assert judge(Judgement(), reading).health.state is not HealthState.FAILED
    await driver.call(reader.close)
