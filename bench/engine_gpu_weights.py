"""Writes a checkpoint with random bfloat16 weights of a shape of ``bench/engine_gpu.py``: arguments
are the shape and a folder.
"""

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from engine_gpu_job import HEAD_DIM, MAX_CONTEXT_TOKENS, SHAPES, SHAPES_TO_TRY, VOCAB_SIZE
from safetensors.torch import save_file

from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype, ModelSpec

DEVIATION = 0.02


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
    sizes: dict[str, Any] = (SHAPES | SHAPES_TO_TRY)[shape]
    bare = ModelSpec(**common, **sizes, part_bytes=(0,) * (sizes["num_layers"] + 2))
    decoder = decoder_of(bare)
    of_parts = (
        sum(map(prod, decoder.shapes(part).values())) * 2 for part in range(bare.num_layers + 2)
    )
    return replace(bare, part_bytes=tuple(of_parts))


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """As Hugging Face writes it."""
    return {
        "architectures": [spec.architecture],
        "model_type": "qwen2",
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
            made = torch.ones(size, dtype=torch.bfloat16, device=device)
            if "norm" not in name:
                made.normal_(0, DEVIATION, generator=generator)
            tensors[decoder.prefix(part) + name] = made.cpu()
        save_file(tensors, folder / f"part-{part}.safetensors")
        files |= dict.fromkeys(tensors, f"part-{part}.safetensors")
    index = {"metadata": {"total_size": spec.total_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(spec)))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
