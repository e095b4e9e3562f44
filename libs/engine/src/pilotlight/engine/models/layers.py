"""What the architectures share.

Rounding follows transformers', step by step, so that greedy tokens are equal.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.models.quantized import product
from pilotlight.policy.model import Experts

Weights = Mapping[str, Tensor]
"""Tensors of one part, named within it: ``self_attn.q_proj.weight`` in a layer."""

Activation = Callable[[Tensor], Tensor]


FEW_ROWS = 32
"""Up to this many rows a projection's time is that of reading its weights."""
FEW_SIZES = (8, 16, 32)
"""Their time is that of the next larger of these."""
SIZES_BETWEEN_DOUBLES = 8
"""Of larger numbers of rows: what is added to make one of them up is an eighth at most."""
_HALVES = (torch.bfloat16, torch.float16)


def scales_of(weights: Weights, name: str) -> Tensor | None:
    """The scales of a projection with quantized weights; None: it has none."""
    return weights.get(f"{name}.weight_scale", weights.get(f"{name}.weight_scale_inv"))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """One projection; its bias counts if the part has one. [num_tokens, in] -> [num_tokens,
    out].
    """
    weight, scales = weights[f"{name}.weight"], scales_of(weights, name)
    projected = project(x, weight) if scales is None else product(x, weight, scales)
    bias = weights.get(f"{name}.bias")
    return projected if bias is None else projected + bias


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies rows by a matrix: [num_tokens, in] times [out, in] -> [num_tokens, out].

    For few rows of half precision on a CPU, torch's own ``linear`` reads the weights at little more
    than half of the speed of memory: it treats the rows as the larger matrix. The same product the
    other way round comes close to it.

    Of bfloat16, oneDNN compiles a kernel for every shape that it meets (2 to 3 ms), and torch keeps
    it (0.5 MiB). So rows are made up to one of a few numbers.
    """
    rows = x.shape[0]
    if not rows or x.dtype not in _HALVES or x.is_cuda:
        return functional.linear(x, weight)
    if rows == 1:
        return torch.mv(weight, x[0])[None]
    padded = (
        functional.pad(x, (0, 0, 0, padded_rows(rows) - rows)) if x.dtype is torch.bfloat16 else x
    )
    if rows > FEW_ROWS:
        return functional.linear(padded, weight)[:rows]
    return torch.mm(weight, padded.T).T[:rows].contiguous()


def padded_rows(rows: int) -> int:
    """The number of rows that ``rows``, two or more, are made up to.

    Up to 512 there are 35 of them.
    """
    for size in FEW_SIZES:
        if rows <= size:
            return size
    step = (1 << (rows - 1).bit_length() - 1) // SIZES_BETWEEN_DOUBLES
    return -(-rows // step) * step


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Computed in float32, even for float64, as transformers does.
    """
    return weight * _normed(x, eps).to(x.dtype)


def centred_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same, for weights that are stored as their distance from 1.

    The product is float32 too before it is rounded.
    """
    return (_normed(x, eps) * (1.0 + weight.to(torch.float32))).to(x.dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def gated(weights: Weights, name: str, x: Tensor, activation: Activation) -> Tensor:
    """A gated feed-forward network, [num_tokens, hidden].

    Args:
        weights: of the part.
        name: what the names of the network's tensors begin with, such as ``mlp``.
        x: hidden states after the norm, [num_tokens, hidden].
        activation: what opens the gates, element by element.
    """
    gates, ups = linear(weights, f"{name}.gate_up_proj", x).chunk(2, dim=-1)
    return linear(weights, f"{name}.down_proj", activation(gates) * ups)


def mixture(
    weights: Weights, name: str, x: Tensor, experts: Experts, activation: Activation
) -> Tensor:
    """The experts that the router ``name.gate`` chooses for each token, by their shares:
    [num_tokens, hidden].

    Shares are float32, as in transformers. A token's experts are added up in the order of their
    shares, whatever else is in the batch.

    Args:
        weights: of the part.
        name: what the names of the router's and the experts' tensors begin with, such as ``mlp``.
        x: hidden states after the norm, [num_tokens, hidden].
        experts: how many a token has, and whether their shares are made to add up to 1.
        activation: what opens the gates, element by element.
    """
    probabilities = linear(weights, f"{name}.gate", x).softmax(dim=-1, dtype=torch.float32)
    shares, chosen = probabilities.topk(
        experts.experts_per_token, dim=-1
    )  # [num_tokens, experts_per_token]
    if experts.normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    outputs = x.new_empty(*chosen.shape, x.shape[-1])
    (hit,) = torch.where(chosen.flatten().bincount() > 0)
    for expert in hit:
        rows, ranks = torch.where(chosen == expert)
        outputs[rows, ranks] = gated(weights, f"{name}.experts.{int(expert)}", x[rows], activation)
    return (outputs * shares.to(x.dtype)[:, :, None]).sum(dim=1)
