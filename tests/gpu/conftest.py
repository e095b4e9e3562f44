"""What tests on a device share.

Without one they fail and say so: `make test` leaves them out, `make test-gpu` asks for them.
"""

from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor

from pilotlight.engine.cuda.arena import CudaArena


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """References are computed on cores.

    Tests run side by side, and as many threads as cores in each take turns at waiting.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first CUDA device."""
    if torch.version.cuda is None:
        pytest.fail(
            f"torch {torch.__version__} is built without CUDA: install the build for this machine's driver"
        )
    if not torch.cuda.is_available():
        pytest.fail(
            f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no device: look at nvidia-smi"
        )
    return torch.device("cuda", 0)


@pytest.fixture
def record_property(
    record_property: Callable[[str, object], None],
) -> Callable[[str, object], None]:
    """pytest's own, in words: tests run side by side, and nothing but plain values passes between
    their processes.
    """
    return lambda name, value: record_property(name, str(value))


@pytest.fixture
def fresh() -> Callable[..., Tensor]:
    """fresh(*shape, scale=1): normal float64 numbers that no earlier run has had."""
    generator = torch.Generator()
    generator.seed()

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    return make


@pytest.fixture
def arena(device: torch.device) -> Generator[CudaArena]:
    """All of it is given back after the test."""
    torch.zeros(1, device=device)
    made = CudaArena(0)
    yield made
    torch.cuda.synchronize()
    made.close()
