"""What tests on a device share. Without one they fail and say so: `make test` leaves them out, `make test-gpu` asks for them."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first CUDA device."""
    if torch.version.cuda is None:
        pytest.fail(f"torch {torch.__version__} is built without CUDA: install the build for this machine's driver")
    if not torch.cuda.is_available():
        pytest.fail(f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no device: look at nvidia-smi")
    return torch.device("cuda", 0)
