"""A checkpoint of half a megabyte: what its parameters take on a link is next to nothing."""

import json
import shutil
from math import prod
from pathlib import Path

from embedded_system import DEMO_FOLDER

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 4, 2, 16
SMALL, ONE = b"\x00\x3c", b"\x80\x3f"
"""2 ** -7 and 1 in bfloat16."""


def write_tiny(folder: Path) -> Path:
    """One layer below the demo model's tokenizer; every weight is alike, so it says nothing of
    sense.
    """
    shutil.copytree(DEMO_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], HIDDEN),
        "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    header: dict[str, object] = {}
    content = b""
    for name, shape in shapes.items():
        added = (ONE if len(shape) == 1 else SMALL) * prod(shape)
        offsets = [len(content), len(content) + len(added)]
        header[f"model.{name}"] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        content += added
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return folder
