"""The device is there and computes what the CPU computes."""

import subprocess
from collections.abc import Callable

import pytest
import torch

from pilotlight.cli.demo_model import demo_model_folder

pytestmark = pytest.mark.gpu

SMI_DEADLINE_S = 30.0
Record = Callable[[str, object], None]


def test_the_device_is_seen(device: torch.device, record_property: Record) -> None:
    properties = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(
        command, capture_output=True, text=True, timeout=SMI_DEADLINE_S, check=True
    ).stdout.split()[0]
    record_property("name", properties.name)
    record_property("memory_bytes", properties.total_memory)
    record_property("capability", f"{properties.major}.{properties.minor}")
    record_property("driver", driver)
    record_property("cuda", torch.version.cuda)
    record_property("torch", torch.__version__)
    assert properties.name
    assert properties.total_memory > 2**30


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float32, 1e-4, 1e-3), (torch.bfloat16, 2e-2, 1e-1)],
    ids=["float32", "bfloat16"],
)
def test_a_matmul_equals_the_cpus(
    device: torch.device, record_property: Record, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    """Against the product in float64; what float32 loses by its own rounding over 512 terms is far
    below the tolerance.
    """
    generator = torch.Generator().manual_seed(7)
    left = torch.randn(257, 512, generator=generator).to(dtype)
    right = torch.randn(512, 129, generator=generator).to(dtype)
    exact = left.double() @ right.double()
    there = (left.to(device) @ right.to(device)).cpu().double()
    record_property("largest_difference", float((there - exact).abs().max()))
    torch.testing.assert_close(there, exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_the_demo_models_tensors_come_back_bit_for_bit(
    device: torch.device, record_property: Record, pinned: bool
) -> None:
    from safetensors import safe_open

    copied_bytes = 0
    with safe_open(demo_model_folder() / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            source = tensor.pin_memory() if pinned else tensor
            back = source.to(device, non_blocking=pinned).cpu()
            assert back.dtype == tensor.dtype
            assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8)), name
            copied_bytes += tensor.nbytes
    record_property("copied_bytes", copied_bytes)
    assert copied_bytes > 10**7
