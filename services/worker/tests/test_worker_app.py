"""How a GPU's worker is built: its engine, its watch and its child are of one device."""

from pathlib import Path
from typing import Any

import pytest

from pilotlight.common.testing import until
from pilotlight.policy.cluster import DeviceKind
from pilotlight.worker.app import build
from pilotlight.worker.engines.child_process import bury, kill_group, spawn
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.worker import Worker

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize(
    ("named", "shown", "meant"), [("", "2,3", "2"), ("1", "2,3", "1"), ("", "", "")]
)
async def test_engine_and_watch_mean_the_same_device(
    make_context: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    shown: str,
    meant: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    settings = WorkerSettings(device="cuda", cuda_device=named, pool_socket=tmp_path / "pool.sock")
    application = await build(make_context("worker", settings))
    (worker,) = [one for one in application.components if isinstance(one, Worker)]
    engine = worker.core.engine.main
    assert isinstance(engine, ProcessEngine)
    assert worker._watch is not None
    assert engine._options.cuda_devices == ((meant,) if meant else ())
    assert worker._watch.each[0]._reader._device == (meant or "0")


async def test_a_gpus_worker_is_built_with_a_watch_and_a_child_of_its_device(
    make_context: Any, tmp_path: Path
) -> None:
    settings = WorkerSettings(
        device="cuda",
        cuda_device="GPU-1a",
        step_tokens=4096,
        pool_socket=tmp_path / "pool.sock",
        pool_path=tmp_path / "pool",
        log_dir=tmp_path,
    )
    application = await build(make_context("worker", settings))
    (worker,) = [one for one in application.components if isinstance(one, Worker)]
    assert isinstance(worker, Worker)
    assert worker._watch is not None
    assert worker.core.device_bytes == 0, "its engine says"
    engine = worker.core.engine.main
    assert isinstance(engine, ProcessEngine)
    options = engine._options
    assert (options.device, options.cuda_devices, options.step_tokens, options.device_bytes) == (
        DeviceKind.CUDA,
        ("GPU-1a",),
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
