"""The small model that warms an engine up, and what is left of it when it is interrupted."""

from collections.abc import Callable
from itertools import count

import pytest
from torch import Tensor
from torch.nn import functional

from pilotlight.common.clock import SystemClock
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.kernel_store import KernelStore
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import NotWanted
from pilotlight.worker.engine_child.warmup import CPU_PROBE, warm_up


@pytest.fixture
def engine() -> Engine:
    arena = CpuArena(num_slots=1, slot_bytes=1 << 30)
    return Engine(1, SystemClock().monotonic_s, BatchLimits(), arena)


def after(times: int) -> Callable[[], bool]:
    """Interrupts when it has been asked so often before."""
    asked = count()
    return lambda: next(asked) >= times


def is_empty(engine: Engine) -> bool:
    return not engine.has_work and engine.arena.backed_bytes == 0 and not engine.step().produced


def test_it_runs_to_its_end(engine: Engine) -> None:
    assert warm_up(engine, CPU_PROBE)
    assert is_empty(engine)


@pytest.mark.parametrize("steps", range(4))
def test_interrupted_between_two_steps_it_leaves_an_empty_engine(
    engine: Engine, steps: int
) -> None:
    assert not warm_up(engine, CPU_PROBE, after(steps))
    assert is_empty(engine)
    assert warm_up(engine, CPU_PROBE), "what was interrupted can be done"


@pytest.mark.parametrize("kernels", range(4))
def test_interrupted_before_a_kernel_that_a_step_lacks_it_leaves_an_empty_engine(
    engine: Engine, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step asks for one in the middle of its layer here; on a GPU, where its kernel is not
    there.
    """
    store, lacks, silu = KernelStore(), count(), functional.silu

    def lacking(rows: Tensor) -> Tensor:
        next(lacks)
        store.lack()
        return silu(rows)

    monkeypatch.setattr(functional, "silu", lacking)
    with store.wanted_until(after(kernels)):
        assert not warm_up(engine, CPU_PROBE)
    assert next(lacks) == kernels + 1
    assert is_empty(engine)
    assert warm_up(engine, CPU_PROBE)


def test_kernels_are_wanted_until_somebody_says_otherwise() -> None:
    store, unwanted = KernelStore(), list[bool]()
    store.lack()
    with store.wanted_until(lambda: bool(unwanted)):
        store.lack()
        unwanted.append(True)
        with pytest.raises(NotWanted):
            store.lack()
    store.lack()
