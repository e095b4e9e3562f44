"""What the architectures share. Rounding follows transformers', step by step, so that greedy tokens are equal."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.policy.types import ModelSpec

Weights = Mapping[str, Tensor]
"""Tensors of one part, named within it: ``self_attn.q_proj.weight`` in a layer."""


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """One projection; its bias counts if the part has one. [..., in] -> [..., out]."""
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension. Computed in float32, even for float64, as transformers does."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def swiglu(weights: Weights, x: Tensor) -> Tensor:
    """The gated feed-forward network. [num_tokens, hidden] -> [num_tokens, hidden]."""
    gated = functional.silu(linear(weights, "mlp.gate_proj", x)) * linear(weights, "mlp.up_proj", x)
    return linear(weights, "mlp.down_proj", gated)


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Angle that each pair of a head's dimensions turns by from one position to the next. [head_dim / 2], float32.

    Llama-3 scaling slows the low frequencies down by ``factor``, keeps the high ones, and blends those between.
    """
    frequencies = 1.0 / (spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim))
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low = wavelengths > scaling.original_max_position_tokens / scaling.low_freq_factor
    high = wavelengths < scaling.original_max_position_tokens / scaling.high_freq_factor
    slowed = torch.where(low, frequencies / scaling.factor, frequencies)
    share = scaling.original_max_position_tokens / wavelengths - scaling.low_freq_factor
    share = share / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - share) * slowed / scaling.factor + share * slowed
    return torch.where(~high & ~low, blended, slowed)


class Rotation:
    """Rotary position embedding of one batch: the same for all of its layers.

    Computed from the positions each time, not kept as a table: a step has at most some hundred rows, a table of a long context
    takes tens of megabytes and part of the cold start. Angles are float32 whatever the dtype, as in transformers.
    """

    def __init__(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        angles = positions[:, None].to(torch.float32) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = angles.cos().to(dtype)[:, None, :]  # [num_tokens, 1, head_dim]
        self._sin = angles.sin().to(dtype)[:, None, :]

    def apply(self, x: Tensor) -> Tensor:
        """Turns queries or keys. [num_tokens, heads, head_dim] -> the same."""
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin
