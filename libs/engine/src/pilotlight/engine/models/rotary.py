"""Rotary position embeddings: frequencies from a model's settings, and the rotation of one
batch.
"""

import math

import torch
from torch import Tensor

from pilotlight.policy.model import RopeKind, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle that each pair of a head's dimensions turns by from one position to the next. [head_dim
    / 2], float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = theta**exponents
    frequencies = 1.0 / periods
    if scaling is None:
        return frequencies
    match scaling.kind:
        case RopeKind.LINEAR:
            return frequencies / scaling.factor
        case RopeKind.LLAMA3:
            return _llama3(frequencies, scaling)
        case RopeKind.YARN:
            return _yarn(periods, head_dim, theta, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slows the low frequencies down by ``factor``, keeps the high ones, and blends those
    between.
    """
    wavelengths = 2 * math.pi / frequencies
    low = wavelengths > scaling.original_max_position_tokens / scaling.low_freq_factor
    high = wavelengths < scaling.original_max_position_tokens / scaling.high_freq_factor
    slowed = torch.where(low, frequencies / scaling.factor, frequencies)
    share = scaling.original_max_position_tokens / wavelengths - scaling.low_freq_factor
    share = share / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - share) * slowed / scaling.factor + share * slowed
    return torch.where(~high & ~low, blended, slowed)


def _yarn(periods: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Slows by ``factor`` what turns less than ``beta_slow`` times in the original context, keeps
    what turns more than ``beta_fast`` times, and blends over the dimensions between (Peng et al.,
    "YaRN", section 3.2).
    """

    def dimension_of(turns: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_max_position_tokens / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers does, so that the ramp has a slope
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


class Rotation:
    """The rotation of one batch's queries and keys: the same for all layers that share frequencies.

    Computed from the positions each time, not kept as a table: a step has at most some hundred
    rows, a table of a long context takes tens of megabytes and part of the cold start. Angles are
    float32 whatever the dtype, as in transformers.
    """

    def __init__(
        self, frequencies: Tensor, factor: float, positions: Tensor, dtype: torch.dtype
    ) -> None:
        angles = positions[:, None].to(torch.float32) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = (angles.cos() * factor).to(dtype)[:, None, :]  # [num_tokens, 1, head_dim]
        self._sin = (angles.sin() * factor).to(dtype)[:, None, :]

    def apply(self, x: Tensor) -> Tensor:
        """Turns queries or keys. [num_tokens, heads, head_dim] -> the same."""
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin
