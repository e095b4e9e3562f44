"""Warming up on a machine that has compiled nothing, interrupted before each kernel: the engine is
empty then, the next try compiles one more, and what it gives in the end is what it gives.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.kernel_store import STORE
from pilotlight.engine.engine import Engine
from pilotlight.worker.engine_child.kernels import compiling_until
from pilotlight.worker.engine_child.warmup import CUDA_PROBE, never, warm_up

pytestmark = pytest.mark.gpu

MOST_TRIES = 60


@pytest.fixture
def engine(device: torch.device) -> Iterator[Engine]:
    arena = CudaArena(device.index)
    yield Engine(1, time.monotonic, BatchLimits(), arena)
    arena.close()


def test_it_can_be_interrupted_before_each_kernel(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nothing"))
    longest_s, lacked = 0.0, len(STORE.compiled)
    for tries in count(1):
        asked = count()
        began_s = time.monotonic()
        with compiling_until(lambda asked=asked: next(asked) > 0):  # type: ignore[misc]
            done = warm_up(engine, CUDA_PROBE, never)
        longest_s = max(longest_s, time.monotonic() - began_s)
        assert not engine.has_work
        assert not engine.step().produced
        if done:
            break
        assert tries < MOST_TRIES
    record_property("tries", tries)
    record_property("longest_s", round(longest_s, 2))
    record_property("compiled", len(STORE.compiled) - lacked)
    assert warm_up(engine, CUDA_PROBE)
