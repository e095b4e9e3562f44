"""How DLPack names devices and the dtypes of tensors."""

import torch

_CPU, _CUDA = 1, 2
DLPACK_TYPES: dict[torch.dtype, tuple[int, int]] = {
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.uint8: (1, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
}
"""DLPack's type code and bits."""


def dlpack_kind(device: torch.device) -> tuple[int, int]:
    """A device's kind and number, as DLPack has them."""
    return (_CUDA, device.index) if device.type == "cuda" else (_CPU, 0)
