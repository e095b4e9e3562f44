"""Warming up on a machine that has compiled nothing, interrupted before each kernel but the first:
the engine is empty then, the next try compiles one more, and the last one does all of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

END_S = 120.0

SCRIPT = """
import json, time
from itertools import count
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.compiled import IMAGE
from pilotlight.engine.cuda.kernel_store import STORE
from pilotlight.engine.engine import Engine
from pilotlight.worker.engine_child.kernels import compiling_until
from pilotlight.worker.engine_child.warmup import CUDA_PROBE, warm_up

engine = Engine(1, time.monotonic, BatchLimits(), CudaArena())
empty, took_s, done = [], [], False
while not done and len(took_s) < 60:
    asked, began_s = count(), time.monotonic()
    with compiling_until(lambda: next(asked) > 0):
        done = warm_up(engine, CUDA_PROBE)
    took_s.append(time.monotonic() - began_s)
    empty.append(not engine.has_work and not engine.step().produced)
images = sum(name.endswith(IMAGE) for name in STORE.compiled)
print(json.dumps([done, empty, images, max(took_s), warm_up(engine, CUDA_PROBE)]))
"""
"""In a process of its own: kernels of other tests would be there in this one."""


def test_it_can_be_interrupted_before_each_kernel(
    device: torch.device, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(tmp_path / "nothing"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=END_S,
    )
    assert ran.returncode == 0, ran.stderr
    done, empty, images, longest_s, again = json.loads(ran.stdout.splitlines()[-1])
    assert done
    assert again
    assert all(empty)
    assert images > 1, "there is something to interrupt"
    assert len(empty) >= images, "a try compiles one at most"
    record_property("images", images)
    record_property("longest_s", round(longest_s, 2))
