"""Small checkpoints for tests: written by hand, the same bytes every time, no machine-learning
library needed.
"""

import json
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from pilotlight.checkpoint.architectures import Shape, expected_dtype, expected_parts
from pilotlight.checkpoint.config import parse_config
from pilotlight.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE
from pilotlight.checkpoint.strict_json import CONFIG_FILE
from pilotlight.policy.model import Dtype

_FORMAT_NAMES = {
    Dtype.BFLOAT16: "BF16",
    Dtype.FLOAT16: "F16",
    Dtype.FLOAT32: "F32",
    Dtype.FLOAT64: "F64",
    Dtype.FLOAT8: "F8_E4M3",
}


_FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Qwen3MoeForCausalLM": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
    "Gemma3ForCausalLM": {
        "head_dim": 8,
        "rope_theta": None,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
}


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A configuration of two small layers; a change to None takes a key out."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
        **_FAMILY_SETTINGS.get(architecture, {}),
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def tiny_tensors(config: Mapping[str, Any], dtype: Dtype = Dtype.BFLOAT16) -> dict[str, Shape]:
    """Name and shape of each tensor that a configuration asks for, in execution order."""
    spec = parse_config(json.dumps(config).encode(), dtype)
    return {name: shape for part in expected_parts(spec) for name, shape in part.items()}


def tensor_bytes(name: str, size_bytes: int) -> bytes:
    """Content that depends on the tensor's name, so that a misplaced byte is noticed.

    Not sensible as weights.
    """
    return blake3(name.encode()).digest(length=size_bytes)


def encode_safetensors(
    tensors: Iterable[tuple[str, Shape]],
    dtype: Dtype = Dtype.BFLOAT16,
    others: Mapping[str, Dtype] = MappingProxyType({}),
) -> bytes:
    """A safetensors file with these tensors in this order, each filled by ``tensor_bytes``.

    ``others`` are those of another element type than ``dtype``.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in tensors:
        stored = others.get(name, dtype)
        content = tensor_bytes(name, math.prod(shape) * stored.size_bytes)
        offsets = [len(data), len(data) + len(content)]
        header[name] = {
            "dtype": _FORMAT_NAMES[stored],
            "shape": list(shape),
            "data_offsets": offsets,
        }
        data += content
    return frame_header(json.dumps(header).encode()) + bytes(data)


def frame_header(header: bytes) -> bytes:
    """A header as it stands at the start of a file: its length, itself, and spaces up to a multiple
    of eight bytes.
    """
    padded = header + b" " * (-len(header) % 8)
    return len(padded).to_bytes(8, "little") + padded


def tiny_files(
    config: Mapping[str, Any], dtype: Dtype = Dtype.BFLOAT16, shards: int = 1
) -> dict[str, bytes]:
    """The files of a whole checkpoint, without text files.

    Tensors are dealt out to the shards in turn.
    """
    files = {CONFIG_FILE: json.dumps(config).encode()}
    tensors = list(tiny_tensors(config, dtype).items())
    spec = parse_config(files[CONFIG_FILE], dtype)
    others = {name: expected_dtype(spec, name) for name, _ in tensors}
    if shards == 1:
        return {**files, SINGLE_FILE: encode_safetensors(tensors, dtype, others)}
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        dealt = tensors[number::shards]
        files[file] = encode_safetensors(dealt, dtype, others)
        weight_map.update(dict.fromkeys((name for name, _ in dealt), file))
    files[INDEX_FILE] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files
