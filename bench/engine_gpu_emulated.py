"""What a checkpoint of ``bench/engine_gpu_weights.py`` means, by torch alone and in float32: no
kernel of either engine has a part in it.

Weights in fp8 are widened by their scales, and activations before them are rounded to fp8, one
scale for each token or for each 128 of its values, as the format says; sums, norms, attention and
the residual are float32. One part's weights are there at a time.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.models.quantized import product
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import ModelSpec


@torch.inference_mode()
def emulated(
    folder: Path, spec: ModelSpec, sequences: Sequence[Sequence[int]], last: int
) -> Tensor:
    """Logits behind the last tokens of each sequence.

    Args:
        folder: of the checkpoint, a file for each part.
        spec: of the model, of the architecture that the shapes have.
        sequences: token ids, all equally many.
        last: at how many places, counted from the end.

    Returns:
        [sequences, last, vocab_size], float32, on the host.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        parts = _Parts(folder, spec, device)
        ids = torch.tensor([list(each) for each in sequences], device=device)
        hidden = parts.read(0)["embed_tokens.weight"][ids].float()
        for layer in range(spec.num_layers):
            hidden = _layer(hidden, parts.read(layer + 1), spec)
        head = parts.read(spec.num_layers + 1)
        rows = _norm(hidden[:, -last:], head["model.norm.weight"], spec.rms_norm_eps)
        return (rows @ head["lm_head.weight"].float().t()).cpu()
    finally:
        torch.set_float32_matmul_precision(precision)


class _Parts:
    """A checkpoint's tensors, named within their parts."""

    def __init__(self, folder: Path, spec: ModelSpec, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._decoder = decoder_of(spec)

    def read(self, part: int) -> dict[str, Tensor]:
        """Of one part."""
        prefix = self._decoder.prefix(part)
        with safe_open(self._folder / f"part-{part}.safetensors", "pt") as file:
            return {
                name.removeprefix(prefix): file.get_tensor(name).to(self._device)
                for name in file.keys()  # noqa: SIM118 - it is no mapping
            }


def _layer(hidden: Tensor, weights: dict[str, Tensor], spec: ModelSpec) -> Tensor:
    normed = _norm(hidden, weights["input_layernorm.weight"], spec.rms_norm_eps)
    hidden = hidden + _projected(weights, "self_attn.o_proj", _attended(normed, weights, spec))
    normed = _norm(hidden, weights["post_attention_layernorm.weight"], spec.rms_norm_eps)
    gates, ups = (_projected(weights, f"mlp.{name}_proj", normed) for name in ("gate", "up"))
    return hidden + _projected(weights, "mlp.down_proj", functional.silu(gates) * ups)


def _attended(normed: Tensor, weights: dict[str, Tensor], spec: ModelSpec) -> Tensor:
    """Heads side by side."""
    sequences, length, _ = normed.shape
    queries, keys, values = (
        _projected(weights, f"self_attn.{name}_proj", normed)
        .view(sequences, length, -1, spec.head_dim)
        .transpose(1, 2)
        for name in "qkv"
    )
    queries, keys = (_turned(each, spec.rope_theta) for each in (queries, keys))
    scores = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    return scores.transpose(1, 2).reshape(sequences, length, -1)


def _projected(weights: dict[str, Tensor], name: str, rows: Tensor) -> Tensor:
    weight = weights[f"{name}.weight"]
    scales = weights.get(f"{name}.weight_scale_inv", weights.get(f"{name}.weight_scale"))
    flat = rows.reshape(-1, rows.shape[-1])
    found = flat @ weight.float().t() if scales is None else product(flat, weight, scales.float())
    if (bias := weights.get(f"{name}.bias")) is not None:
        found = found + bias.float()
    return found.view(*rows.shape[:-1], -1)


def _norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _turned(heads: Tensor, theta: float) -> Tensor:
    """Rotated by place: the first half of a head's values with the second."""
    length, half = heads.shape[-2], heads.shape[-1] // 2
    powers = torch.arange(half, device=heads.device, dtype=torch.float64) / half
    places = torch.arange(length, device=heads.device, dtype=torch.float64)
    angles = places[:, None] / theta**powers
    cosines, sines = angles.cos().float(), angles.sin().float()
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
