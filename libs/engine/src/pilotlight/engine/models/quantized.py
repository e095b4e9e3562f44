"""Products with fp8 weights as the format means them: both factors in fp8 with their scales, the
products summed in float32.

::

    out[m, n] = sum over k of  values[m, k] * scales[m, k // group]  *  weight[n, k] * weight_scales[n // rows, k // columns]
"""

import torch
from torch import Tensor

from pilotlight.policy.model import SCALE_BLOCK

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest value of e4m3."""
SMALLEST = 1e-10
"""An absolute maximum counts as this at least: a row of zeros has a scale, too."""


def scale_group(weight: Tensor, scales: Tensor) -> int:
    """How many activations of a token share a scale, by the scales of the weight that they meet."""
    by_channel = scales.shape[0] == weight.shape[0]
    return weight.shape[1] if by_channel else SCALE_BLOCK


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Activations in fp8, and their scales: [num_tokens, width] -> [num_tokens, width] and
    [num_tokens, width / group] in float32.

    Each group's largest becomes the largest value of fp8.
    """
    grouped = x.to(torch.float32).view(*x.shape[:-1], -1, group)
    scales = grouped.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    values = (grouped / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values.view(x.shape), scales[..., 0]


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight's values, [out, in], from fp8 and its scales by block or by row."""
    wide = scales.to(dtype)
    if scales.shape[0] != weight.shape[0]:
        rows, width = weight.shape
        wide = wide.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)
        wide = wide[:, :width]
    return weight.to(dtype) * wide


def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """[num_tokens, in] times [out, in] in fp8 -> [num_tokens, out].

    What CPUs run, and layers that have no kernels of their own: slow, since the weight is widened
    each time.
    """
    group = scale_group(weight, scales)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    values, by_token = quantize(x, group)
    activations = values.to(wide) * by_token.to(wide).repeat_interleave(group, dim=-1)
    return (activations @ dequantize(weight, scales, wide).t()).to(x.dtype)
