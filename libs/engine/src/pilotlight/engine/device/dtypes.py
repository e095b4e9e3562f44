"""torch's names for the dtypes of checkpoints."""

import torch

from pilotlight.policy.model import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT64: torch.float64,
    Dtype.FLOAT8: torch.float8_e4m3fn,
}
