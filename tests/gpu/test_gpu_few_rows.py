"""Products of few rows against the same computation in float64 on the CPU: fresh random inputs,
poisoned rows beside them.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

from float64_reference import close

from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.few_rows import (
    FEW,
    FewRowsTiling,
    divisible_product,
    few_rows,
    gated_product,
    product,
    tiling_of,
)
from pilotlight.engine.cuda.kernels.parts import Parts
from pilotlight.engine.models.layers import rms_norm

pytestmark = pytest.mark.gpu

COUNTS = (2, 7, 16, 33, FEW)


def placed(x: Tensor, device: torch.device) -> Tensor:
    """On the device, with rows behind it that must not count."""
    beyond = torch.full((FEW, x.shape[1]), math.nan, dtype=x.dtype)
    return torch.cat((x, beyond)).to(device)[: x.shape[0]]


def added_up(x: Tensor | Parts, dtype: torch.dtype) -> Tensor:
    return x.total(dtype) if isinstance(x, Parts) else x


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("rows", "width"), [(6144, 4096), (2560, 2560), (20480, 1024)])
def test_a_product_of_few_rows(
    device: torch.device, fresh: Callable[..., Tensor], rows: int, width: int, count: int
) -> None:
    weight, x = fresh(rows, width).bfloat16(), fresh(count, width).bfloat16()
    exact = x.double() @ weight.double().T
    there = weight.to(device), placed(x, device)
    close(product(*there), exact, torch.bfloat16)
    close(added_up(divisible_product(*there), x.dtype), exact, torch.bfloat16)


@pytest.mark.parametrize("count", COUNTS)
def test_gates_open_within_a_product(
    device: torch.device, fresh: Callable[..., Tensor], count: int
) -> None:
    weight, x = fresh(2 * 6912, 2560, scale=0.02).bfloat16(), fresh(count, 2560).bfloat16()
    gates, ups = (x.double() @ weight.double().T).chunk(2, dim=-1)
    assert tiling_of(6912, 2560, gated=True, divisible=False) is not None
    found = gated_product(weight.to(device), placed(x, device))
    close(found, torch.nn.functional.silu(gates) * ups, torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "width", "tiling"),
    [
        (300, 1000, FewRowsTiling(64, 128, 3, 4, 5)),
        (70, 48, FewRowsTiling(64, 64, 1, 4, 4)),
        (128, 2560, FewRowsTiling(64, 128, 8, 4, 5)),
        (256, 512, FewRowsTiling(128, 64, 1, 4, 6)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_that_are_not_filled_and_sums_that_are_cut_up(
    device: torch.device,
    fresh: Callable[..., Tensor],
    rows: int,
    width: int,
    tiling: FewRowsTiling,
    dtype: torch.dtype,
) -> None:
    weight, x = fresh(rows, width).to(dtype), fresh(5, width).to(dtype)
    found = few_rows(weight.to(device), placed(x, device), tiling)
    assert isinstance(found, Parts) == (tiling.splits > 1)
    close(added_up(found, dtype), x.double() @ weight.double().T, torch.bfloat16)


def test_a_row_does_not_depend_on_those_beside_it(
    device: torch.device, fresh: Callable[..., Tensor]
) -> None:
    weight, x = fresh(6144, 4096).bfloat16().to(device), fresh(FEW, 4096).bfloat16().to(device)
    assert torch.equal(product(weight, x)[:3], product(weight, x[:3].clone()))


def test_a_norm_adds_parts_up(device: torch.device, fresh: Callable[..., Tensor]) -> None:
    weight, x = fresh(2560, 6912).bfloat16(), fresh(9, 6912).bfloat16()
    residual, norm = fresh(9, 2560).bfloat16(), fresh(2560).bfloat16()
    parts = divisible_product(weight.to(device), placed(x, device))
    assert isinstance(parts, Parts)
    there = residual.to(device)
    normed = elementwise.add_norm(there, parts, norm.to(device), 1e-5)
    added = parts.total(torch.bfloat16).cpu()
    assert torch.equal(there.cpu(), residual + added)
    close(normed, rms_norm(there.cpu().double(), norm.double(), 1e-5), torch.bfloat16)


def test_what_fills_no_tile_or_is_wide_is_torchs(
    device: torch.device, fresh: Callable[..., Tensor]
) -> None:
    for rows, width, dtype in ((70, 48, torch.bfloat16), (6144, 4096, torch.float32)):
        weight, x = fresh(rows, width).to(dtype).to(device), fresh(5, width).to(dtype).to(device)
        assert torch.equal(product(weight, x), torch.mm(x, weight.t()))
