"""Small models with fp8 weights in every published format: tensors and configuration as they are
published, and the same model in transformers, with weights multiplied out and activations rounded
by hooks.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pilotlight.checkpoint.config import parse_config
from pilotlight.policy.model import Dtype, ModelSpec

FP8_MAX = 448.0
BLOCK = 128
SMALLEST = 1e-10
"""An absolute maximum counts as this at least: zeros have a scale, too."""
SIZES = {
    "vocab_size": 199,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}


def _compressed(weights: dict[str, Any], activations: dict[str, Any]) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight, "dynamic": False, **weights},
                "input_activations": {**eight, "dynamic": True, **activations},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


FORMATS: dict[str, dict[str, Any]] = {
    "fp8-block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "compressed-channel": _compressed({"strategy": "channel"}, {"strategy": "token"}),
    "compressed-tensor": _compressed({"strategy": "tensor"}, {"strategy": "token"}),
    "compressed-block": _compressed(
        {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        {"strategy": "group", "group_size": BLOCK},
    ),
}
"""``quantization_config`` as publishers write it."""


def quantized_weight(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """A weight in fp8 and its scales, float32, as a format has them."""
    wide = weight.detach().float()
    if form.endswith("tensor"):
        scales = wide.abs().amax().view(1).clamp(min=SMALLEST) / FP8_MAX
        return (wide / scales).to(torch.float8_e4m3fn), scales
    if form.endswith("channel"):
        scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
        return (wide / scales).to(torch.float8_e4m3fn), scales
    rows, width = wide.shape
    tiles = wide.view(rows // BLOCK, BLOCK, width // BLOCK, BLOCK)
    scales = tiles.abs().amax(dim=(1, 3), keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    values = (tiles / scales).view(rows, width).to(torch.float8_e4m3fn)
    return values, scales[:, 0, :, 0].contiguous()


def multiplied_out(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A stored weight's values."""
    if scales.ndim < 2 or (scales.shape[1] == 1 and scales.shape[0] == values.shape[0]):
        return values.to(dtype) * scales.to(dtype)
    rows, width = values.shape
    tiles = values.to(dtype).view(rows // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return (tiles * scales.to(dtype)[:, None, :, None]).view(rows, width)


def rounded_activations(x: Tensor, group: int) -> Tensor:
    """Activations as fp8 leaves them, each token by groups."""
    groups = x.float().reshape(-1, group)
    scales = groups.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    values = (groups / scales).to(torch.float8_e4m3fn)
    return (values.to(x.dtype) * scales.to(x.dtype)).reshape(x.shape)


@dataclass(frozen=True)
class QuantizedModel:
    """A model as published, and as transformers runs it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    model: PreTrainedModel
    spec: ModelSpec

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[tokens, vocabulary]."""
        device = next(self.model.parameters()).device
        inputs = torch.tensor([token_ids], device=device)
        return self.model(input_ids=inputs, use_cache=False).logits[0]

    def widened(self) -> "QuantizedModel":
        """The same stored tensors, run by transformers in float64."""
        model = deepcopy(self.model)
        for name, parameter in model.named_parameters():
            stored = self.tensors[name]
            scales = self.tensors.get(f"{name}_scale", self.tensors.get(f"{name}_scale_inv"))
            parameter.data = (
                stored.double() if scales is None else multiplied_out(stored, scales, torch.float64)
            )
        return replace(self, model=model)

    def part_of(self, name: str) -> int:
        """The part that a tensor belongs to."""
        if name.startswith("model.layers."):
            return 1 + int(name.split(".")[2])
        return 0 if name.startswith("model.embed") else self.spec.num_layers + 1

    def parts(self) -> list[dict[str, Tensor]]:
        """The tensors of each part."""
        found: list[dict[str, Tensor]] = [{} for _ in range(self.spec.num_layers + 2)]
        for name, tensor in self.tensors.items():
            found[self.part_of(name)][name] = tensor
        return found


def quantized_model(
    kind: str, form: str, dtype: Dtype, scale_dtype: Dtype = Dtype.FLOAT32
) -> QuantizedModel:
    """A random model.

    Args:
        kind: one of ``MODELS``.
        form: one of ``FORMATS``.
        dtype: of everything that is not quantized, and in which transformers runs.
        scale_dtype: of the scales.
    """
    torch.manual_seed(0)
    wide, suffix = getattr(torch, dtype.value), "_scale_inv" if form == "fp8-block" else "_scale"
    model = MODELS[kind]()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(wide)
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.1)
            tensors[name] = parameter.detach().clone()
            if name.endswith("_proj.weight"):
                values, scales = quantized_weight(parameter, form)
                scales = scales.to(getattr(torch, scale_dtype.value))
                tensors[name], tensors[name + suffix] = values, scales
                parameter.copy_(multiplied_out(values, scales, wide))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            group = BLOCK if form.endswith("block") else module.in_features
            module.register_forward_pre_hook(
                lambda _, inputs, group=group: (rounded_activations(inputs[0], group),)
            )
    config = {
        **model.config.to_diff_dict(),
        "architectures": [type(model).__name__],
        "quantization_config": FORMATS[form],
    }
    spec = parse_config(json.dumps(config).encode(), dtype, scale_dtype)
    return QuantizedModel(config, tensors, model.eval(), spec)
