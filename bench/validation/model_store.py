"""The store of a validation: a small S3 server in a namespace of its own, with models of any size.

A process that obeys (``children.obey``): ``put`` makes a model of so many layers. Weights are
random and small; the vocabulary and the tokenizer are those of the demo model.
"""

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "dataplane"), str(ROOT / "tests" / "support")]

from children import obey  # noqa: E402
from standin_s3 import ACCESS_KEY, SECRET_KEY, StandinS3, etag_of  # noqa: E402

from pilotlight.checkpoint.testing import frame_header, tiny_config, tiny_tensors  # noqa: E402
from pilotlight.policy.model import Dtype  # noqa: E402

BUCKET = "bench"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
DEMO = ROOT / "models" / "ember-7m"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
PIECE_BYTES = 1 << 20
HIDDEN_SIZE, HEADS, VOCAB_SIZE = 192, 3, 4096
HEAD_DIM = HIDDEN_SIZE // HEADS
LAYER_BYTES = 16 * HIDDEN_SIZE**2 * Dtype.BFLOAT16.size_bytes
"""So little that slow links, and not the machine's processors, bound what a start takes."""
ENDS_BYTES = 2 * VOCAB_SIZE * HIDDEN_SIZE * Dtype.BFLOAT16.size_bytes
"""Of the vocabulary, at both ends."""
SIGNS = bytes(0x3C | (0x80 & byte) for byte in range(256))
"""High bytes of small bfloat16 numbers, one in eight bits random: the sign."""


class Store(StandinS3):
    """It can be reached from other namespaces."""

    host = "0.0.0.0"


def config_of(layers: int, hidden_size: int) -> dict[str, Any]:
    """A model whose layers have ``LAYER_BYTES`` each where it is as wide as ``HIDDEN_SIZE``; they
    grow with the square of its width.
    """
    return tiny_config(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
    )


def files_of(layers: int, hidden_size: int) -> dict[str, bytes]:
    """A checkpoint; no two pieces of it are the same."""
    config = config_of(layers, hidden_size)
    header: dict[str, Any] = {}
    total_bytes = 0
    for name, shape in tiny_tensors(config).items():
        stop = total_bytes + math.prod(shape) * Dtype.BFLOAT16.size_bytes
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [total_bytes, stop]}
        total_bytes = stop
    weights = bytearray(frame_header(json.dumps(header).encode()))
    for _ in range(math.ceil(total_bytes / PIECE_BYTES)):
        piece = bytearray(PIECE_BYTES)
        piece[0::2] = os.urandom(PIECE_BYTES // 2)
        piece[1::2] = os.urandom(PIECE_BYTES // 2).translate(SIGNS)
        weights += piece
    surplus = -total_bytes % PIECE_BYTES
    texts = {name: (DEMO / name).read_bytes() for name in TEXT_FILES}
    return {
        **texts,
        "config.json": json.dumps(config).encode(),
        "model.safetensors": bytes(weights[: len(weights) - surplus]),
    }


async def serve() -> None:
    """Until the input ends."""
    store = Store(BUCKET)

    async def where(_: dict[str, Any]) -> dict[str, Any]:
        return {"port": store.port}

    async def put(order: dict[str, Any]) -> dict[str, Any]:
        files = await asyncio.to_thread(files_of, order["layers"], order["hidden_size"])
        store.put(BUCKET, order["name"], files)
        # Else it is found anew for each of many reads.
        for file, data in files.items():
            store.etags[BUCKET, f"{order['name']}/{file}"] = etag_of(data)
        return {"bytes": len(files["model.safetensors"])}

    try:
        await obey({"where": where, "put": put})
    finally:
        store.stop()


if __name__ == "__main__":
    asyncio.run(serve())
