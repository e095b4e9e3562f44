"""Tokens are handed out when the device has written them, and a step's end is waited for where it
writes none.
"""

import pytest
import torch

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

from pilotlight.engine.cuda.kernels import sampling
from pilotlight.engine.cuda.sampler import CudaTokens
from pilotlight.engine.device.sampler import NotSampled, SampledToken

pytestmark = pytest.mark.gpu

CYCLES = 300_000_000
"""A tenth of a second or more: longer than tokens are looked for without the driver."""


@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize("cycles", [0, CYCLES // 30, CYCLES])
def test_tokens_come_behind_all_that_was_launched_before(rows: int, cycles: int) -> None:
    chosen = torch.arange(rows, dtype=torch.int32, device="cuda")
    # The driver pins memory of a new size here, beside no wait that might end meanwhile.
    CudaTokens(chosen).wait()
    torch.cuda.synchronize()
    launched = torch.cuda.Event()
    if cycles:
        torch.cuda._sleep(cycles)
    launched.record()
    tokens = CudaTokens(chosen)
    assert not cycles or not launched.query(), "the device is at it"
    assert tokens.wait() == [SampledToken(number, None) for number in range(rows)]
    assert launched.query()


def test_a_row_without_a_token_is_told() -> None:
    chosen = torch.tensor([5, sampling.NOT_FINITE, 0], dtype=torch.int32, device="cuda")
    assert CudaTokens(chosen).wait() == [
        SampledToken(5, None),
        NotSampled.NOT_FINITE,
        SampledToken(0, None),
    ]
