"""Every kernel but attention's against the same computation in float64 on the CPU: fresh random
inputs, poisoned outputs.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

from float64_reference import DTYPES, close

from pilotlight.engine.core.philox import uniform
from pilotlight.engine.cuda.kernels import elementwise, sampling
from pilotlight.engine.cuda.kernels.gemv import Gemv
from pilotlight.engine.models.layers import rms_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 2560])
def test_a_norm_adds_the_residual(
    device: torch.device, fresh: Callable[..., Tensor], dtype: torch.dtype, hidden: int
) -> None:
    residual, x, weight = (
        fresh(*shape).to(dtype) for shape in ((7, hidden), (7, hidden), (hidden,))
    )
    there = residual.to(device, copy=True)
    normed = elementwise.add_norm(
        there, x.to(device, copy=True), weight.to(device, copy=True), 1e-5
    )
    summed = residual + x
    assert torch.equal(there.cpu(), summed)
    close(normed, rms_norm(summed.double(), weight.double(), 1e-5), dtype)
    plain = elementwise.add_norm(there, None, weight.to(device, copy=True), 1e-5)
    assert torch.equal(plain, normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 2560), (16, 1000), (300, 48)])
def test_rows_are_those_that_torch_takes(
    device: torch.device, fresh: Callable[..., Tensor], dtype: torch.dtype, count: int, width: int
) -> None:
    table = fresh(1013, width).to(dtype)
    # The last row, rows that come twice, and none in order.
    places = ((torch.arange(count) * 7919 + 1012) % 1013).to(torch.int32)
    taken = elementwise.rows_at(places.to(device, copy=True), table.to(device, copy=True))
    assert torch.equal(taken.cpu(), torch.nn.functional.embedding(places, table))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_open(device: torch.device, fresh: Callable[..., Tensor], dtype: torch.dtype) -> None:
    both = fresh(5, 2 * 1300).to(dtype)
    gates, ups = both.double().chunk(2, dim=-1)
    close(
        elementwise.silu_mul(both.to(device, copy=True)),
        torch.nn.functional.silu(gates) * ups,
        dtype,
    )


def test_angles_are_those_of_the_cpu(device: torch.device) -> None:
    positions = torch.tensor([0, 1, 77, 8191, 131071], dtype=torch.int32)
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    cosines, sines = elementwise.rotations(
        positions.to(device, copy=True), frequencies.to(device, copy=True), 1.5, torch.float32
    )
    angles = (positions[:, None].to(torch.float32) * frequencies).double()
    assert float((cosines.cpu() - 1.5 * angles.cos()).abs().max()) < 1e-6
    assert float((sines.cpu() - 1.5 * angles.sin()).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(96, 2560), (70, 48), (33, 6912)])
def test_one_row_times_a_matrix(
    device: torch.device, fresh: Callable[..., Tensor], dtype: torch.dtype, rows: int, width: int
) -> None:
    product = Gemv(1e-5, {})
    weight, both, x, norm, residual = (
        fresh(*shape).to(dtype)
        for shape in ((rows, width), (2 * rows, width), (1, width), (width,), (1, rows))
    )
    there = {
        name: tensor.to(device, copy=True)
        for name, tensor in (("weight", weight), ("both", both), ("x", x))
    }
    exact = x.double() @ weight.double().T
    close(product(there["weight"], there["x"]), exact, dtype)
    close(
        product(there["weight"], there["x"], residual=residual.to(device, copy=True)),
        exact + residual.double(),
        dtype,
    )
    normed = rms_norm(x.double(), norm.double(), 1e-5)
    close(
        product(there["weight"], there["x"], norm=norm.to(device, copy=True)),
        normed @ weight.double().T,
        dtype,
    )
    gates, ups = (normed @ both.double().T).chunk(2, dim=-1)
    found = product(there["both"], there["x"], norm=norm.to(device, copy=True), gated=True)
    close(found, torch.nn.functional.silu(gates) * ups, dtype)


def test_sampled_tokens_are_those_of_the_cpu(
    device: torch.device, fresh: Callable[..., Tensor]
) -> None:
    """Greedy rows take the first of the largest; noisy ones the token in whose share, in the order
    of ids, the noise falls.
    """
    rows, vocab_size = 9, 5003
    logits = fresh(rows, vocab_size, scale=3).to(torch.bfloat16)
    logits[0, 17] = logits[0, 4000] = 90.0
    logits[7, 3] = math.inf
    logits[8, 4999] = math.nan
    temperatures = torch.tensor([0.0, 0.0, 0.3, 1.0, 1.0, 2.0, 1e-9, 1.0, 0.0], dtype=torch.float64)
    seeds = [3, 2**63 - 1, 2**40 + 11, -1, 5, 0, 77, 1, 2]
    positions = [0, 5, 1, 2, 90_000, 4, 5, 6, 7]
    low, high = (
        np.array([seed >> shift & 0xFFFFFFFF for seed in seeds], np.uint32).view(np.int32)
        for shift in (0, 32)
    )
    out = torch.full((rows,), -7, dtype=torch.int32, device=device)
    sampling.sample(
        logits.to(device, copy=True),
        temperatures.to(device, copy=True),
        (torch.from_numpy(low).to(device, copy=True), torch.from_numpy(high).to(device, copy=True)),
        torch.tensor(positions, dtype=torch.int32, device=device),
        sampling.SamplingScratch(rows, vocab_size, device),
        out,
    )
    expected: list[int] = []
    for row in range(rows):
        wide = logits[row].double()
        if not wide.isfinite().all():
            expected.append(sampling.NOT_FINITE)
        elif temperatures[row] == 0:
            expected.append(int(wide.argmax()))
        else:
            cumulated = ((wide - wide.max()) / temperatures[row]).softmax(dim=-1).cumsum(dim=0)
            noise = uniform(seeds[row], positions[row])
            expected.append(int(torch.searchsorted(cumulated, cumulated[-1] * noise, right=True)))
    assert expected[0] == 17
    assert out.tolist() == expected
