"""How a kernel's result is compared with a computation in float64."""

import math

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Relative to the whole: float32 far below 1e-5, bfloat16 below 1e-2. NaN never passes."""
    error = float((found.cpu().double() - exact).norm() / exact.norm())
    assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)
