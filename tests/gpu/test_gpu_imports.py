"""The import diet of an engine's process on the device, started as a worker starts it: a cold start
waits for its imports. On cores ``test_worker_imports.py`` has tighter bounds.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import counted_child
import pytest
import torch
from gpu_seen import gpu_of
from pool_files import pool_file

from pilotlight.common.messages.engine import Run, StageLoaded, StepDone
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import Sampling
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

MOST_AT_START = 1400
"""Modules of an engine that is up, half of them torch's: 1,333 with torch 2.13 and triton 3.6 when
all are imported, and no device is open."""
MOST_BESIDE_TORCH = 700
"""Of them, what is neither torch's nor triton's: 637 there."""
MOST_OF_A_FIRST_MODEL = 150
"""More that a first model imports."""
NEVER = {
    "httpx2",
    "llguidance",
    "nats",
    "obstore",
    "pydantic",
    "rich",
    "tokenizers",
    "transformers",
}
DEADLINE_S = 120.0
ROOM_BYTES = 1 << 30
"""Other tests use the device, too."""


async def serve(engine: ProcessEngine, folder: Path) -> None:
    """One prompt of a small model."""
    pool = pool_file(folder / "pool", "llama", Dtype.BFLOAT16, 3)
    events = engine.events()
    await engine.load_stage(pool.load("inst-1", 2048, pool.model.dtype))
    for place in pool.places("inst-1"):
        await engine.place_part(place)
    async for told in events:
        if isinstance(told.message, StageLoaded):
            break
    await engine.run(
        Run(
            request_id=RequestId("one"),
            attempt=1,
            instance_id=InstanceId("inst-1"),
            prompt_ids=[1, 2, 3],
            output_ids=[],
            sampling=Sampling(seed=5, max_tokens=4, ignore_eos=True, temperature=0.0),
        )
    )
    async for told in events:
        step = told.message
        if isinstance(step, StepDone) and any(one.finish is not None for one in step.produced):
            break


async def test_an_engine_on_the_device_imports_little(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "modules"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv(counted_child.FILE, str(file))
    engine = ProcessEngine(
        ChildOptions(
            threads=2,
            log_path=tmp_path / "log",
            device=DeviceKind.CUDA,
            cuda_devices=(gpu_of(device).uuid,),
            device_bytes=ROOM_BYTES,
            module="counted_child",
        )
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            await serve(engine, tmp_path)
    finally:
        await engine.stop()
    up, ended = (set(json.loads(line)) for line in file.read_text().splitlines())
    tops = {name.partition(".")[0] for name in ended}
    assert not NEVER & tops
    assert len(up) <= MOST_AT_START
    beside = [name for name in up if name.partition(".")[0] not in ("torch", "triton")]
    assert len(beside) <= MOST_BESIDE_TORCH, sorted(beside)
    assert len(ended - up) <= MOST_OF_A_FIRST_MODEL, sorted(ended - up)
