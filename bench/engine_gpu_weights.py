"""Writes a checkpoint with random weights of a shape of ``bench/engine_gpu.py``, in bfloat16 or
fp8: arguments are the shape and a folder.
"""

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from engine_gpu_job import (
    HEAD_DIM,
    MAX_CONTEXT_TOKENS,
    QUANTIZED,
    SHAPES,
    SHAPES_TO_MIX,
    SHAPES_TO_TRY,
    VOCAB_SIZE,
)
from medusa_shapes import LLAMA, MEDUSA_SHAPES, MISTRAL, QWEN2
from safetensors.torch import save_file

from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import (
    SCALE_BLOCK,
    Dtype,
    ModelSpec,
    Quantization,
    ScaleKind,
)

MODEL_TYPES = {LLAMA: "llama", MISTRAL: "mistral", QWEN2: "qwen2"}
DEVIATION = 0.02
FP8_MAX = 448.0


def spec_of(shape: str) -> ModelSpec:
    """The model of a shape, with the bytes of its parts."""
    common: dict[str, Any] = {
        "architecture": "Qwen2ForCausalLM",
        "dtype": Dtype.BFLOAT16,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_context_tokens": MAX_CONTEXT_TOKENS,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "tied_embeddings": False,
        "attention_bias": False,
    }
    if shape in QUANTIZED:
        scales = ScaleKind(QUANTIZED[shape])
        common["quantization"] = Quantization(
            scales=scales,
            scale_dtype=Dtype.FLOAT32,
            scale_suffix="weight_scale_inv" if scales is ScaleKind.BLOCK else "weight_scale",
        )
    known = SHAPES | SHAPES_TO_MIX | SHAPES_TO_TRY | MEDUSA_SHAPES
    sizes: dict[str, Any] = common | known[shape]
    bare = ModelSpec(**sizes, part_bytes=(0,) * (sizes["num_layers"] + 2))
    decoder = decoder_of(bare)
    of_parts = (
        sum(
            prod(size) * decoder.stored_dtype_of(name).size_bytes
            for name, size in decoder.stored_shapes(part).items()
        )
        for part in range(bare.num_layers + 2)
    )
    return replace(bare, part_bytes=tuple(of_parts))


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """As Hugging Face writes it."""
    quantized = spec.quantization
    return ({} if quantized is None else {"quantization_config": _said(quantized)}) | {
        "architectures": [spec.architecture],
        "model_type": MODEL_TYPES[spec.architecture],
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_context_tokens,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _said(quantization: Quantization) -> dict[str, Any]:
    """As publishers write it."""
    if quantization.scales is ScaleKind.BLOCK:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
        }
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight, "dynamic": False, "strategy": "channel"},
                "input_activations": {**eight, "dynamic": True, "strategy": "token"},
            }
        },
        "ignore": ["lm_head"],
    }


def _quantized(
    weight: torch.Tensor, quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in fp8 and its scales."""
    block = SCALE_BLOCK if quantization.scales is ScaleKind.BLOCK else None
    rows, width = weight.shape
    tiles = weight.float().view(-1, block or 1, width // (block or width), block or width)
    scales = tiles.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX
    values = (tiles / scales).view(rows, width).to(torch.float8_e4m3fn)
    return values, scales[:, 0, :, 0].contiguous()


def write(shape: str, folder: Path) -> None:
    """One file for each part, named by its number."""
    spec = spec_of(shape)
    decoder = decoder_of(spec)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(1)
    files: dict[str, str] = {}
    for part in range(spec.num_layers + 2):
        tensors: dict[str, torch.Tensor] = {}
        for name, size in decoder.shapes(part).items():
            if spec.quantization is not None and spec.quantization.is_scale(name):
                continue
            made = torch.ones(size, dtype=torch.bfloat16, device=device)
            if "norm" not in name:
                made.normal_(0, DEVIATION, generator=generator)
            if spec.quantization is not None and spec.quantization.covers(name):
                made, scales = _quantized(made, spec.quantization)
                tensors[decoder.prefix(part) + spec.quantization.scale_of(name)] = scales.cpu()
            tensors[decoder.prefix(part) + name] = made.cpu()
        save_file(tensors, folder / f"part-{part}.safetensors")
        files |= dict.fromkeys(tensors, f"part-{part}.safetensors")
    index = {"metadata": {"total_size": spec.total_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(spec)))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
