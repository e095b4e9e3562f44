"""One engine of a build that holds one range of a model's layers after the other, on cores."""

from pathlib import Path

import pytest
from gpu_builds import FileSource
from pool_files import pool_file

from pilotlight.common.clock import SystemClock
from pilotlight.policy.coldstart.cuts import usual_ranges
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.worker.build_session import BuildSession
from pilotlight.worker.engines.child_process import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine

pytestmark = pytest.mark.anyio


async def test_an_engine_of_a_build_loads_one_range_after_the_other(tmp_path: Path) -> None:
    pool = pool_file(tmp_path / "pool", "llama", Dtype.FLOAT32, 3)
    spec = pool.model.spec
    engine = ProcessEngine(ChildOptions(threads=1, log_path=tmp_path / "engine.log"))
    session = BuildSession(engine, FileSource(pool), WorkerId("worker-1"), SystemClock())
    try:
        await session.start()
        rooms: dict[Stage, int] = {}
        for layers in usual_ranges(spec):
            rooms[layers] = await session.load(pool.model, 64 << 20, layers=layers)
            await session.unload()
        whole = await session.load(pool.model, 64 << 20)
        took = session.took
    finally:
        await session.close()
    assert (took.load_s or 0.0) > 0
    assert (took.init_s or 0.0) > 0
    assert took.restore_s is None, "there was no artifact"
    assert len(rooms) == 2
    assert min(rooms.values()) > whole > 0, "less of the memory is parameters"
