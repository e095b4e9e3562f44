"""llama.cpp's server, in this process, through ``xllamacpp``.

Its interpreter brings that, ``gguf`` and ``safetensors``.

The checkpoint is written as GGUF first: the same numbers, with queries' and keys' rows in the order
that llama.cpp turns them in.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import job
import numpy as np
import safetensors
import xllamacpp

JOB = job.read()
FILE = Path(JOB.folder) / "model.gguf"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def convert() -> None:
    """Writes the GGUF file."""
    config: dict[str, Any] = json.loads((Path(JOB.folder) / "config.json").read_text())
    writer = gguf.GGUFWriter(FILE, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_BF16 if JOB.dtype == "bfloat16" else gguf.LlamaFileType.ALL_F32
    )
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_add_bos_token(False)
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    for name, stored in safetensors.deserialize(
        (Path(JOB.folder) / "model.safetensors").read_bytes()
    ):
        stem = name.removesuffix(".weight").removeprefix("model.layers.")
        layer, _, inner = stem.partition(".") if stem[0].isdigit() else ("", "", stem)
        numbers = np.frombuffer(
            stored["data"], np.uint16 if JOB.dtype == "bfloat16" else np.float32
        ).reshape(stored["shape"])
        if inner in heads:
            rows, width = numbers.shape
            numbers = (
                numbers.reshape(heads[inner], 2, -1, width).swapaxes(1, 2).reshape(rows, width)
            )
        as_name = f"blk.{layer}.{NAMES[inner]}.weight" if layer else f"{NAMES[inner]}.weight"
        if JOB.dtype == "float32":
            writer.add_tensor(as_name, numbers)
        elif numbers.ndim == 1:  # norms are float32 in every GGUF
            writer.add_tensor(as_name, (numbers.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(
                as_name,
                np.ascontiguousarray(numbers).view(np.uint8),
                raw_dtype=gguf.GGMLQuantizationType.BF16,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve() -> xllamacpp.Server:
    """A server with as many slots as the largest batch."""
    params = xllamacpp.CommonParams()
    params.model.path = str(FILE)
    params.n_parallel = max(JOB.batches)
    params.n_ctx = 512 * params.n_parallel
    params.cpuparams.n_threads = JOB.threads
    params.cpuparams_batch.n_threads = JOB.threads
    params.cache_prompt = False
    params.warmup = False
    params.verbosity = -1
    return xllamacpp.Server(params)


if not FILE.exists():
    convert()
SERVER = serve()
POOL = ThreadPoolExecutor(max(JOB.batches))


def complete(prompt: list[int]) -> list[int]:
    """One prompt."""
    asked = {
        "prompt": prompt,
        "n_predict": JOB.output_tokens,
        "max_tokens": JOB.output_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
    }
    answer = SERVER.handle_completions(asked)
    ids = [int(number) for number in re.findall(r"<(\d+)>", answer["choices"][0]["text"])]
    if len(ids) != answer["usage"]["completion_tokens"]:
        raise SystemExit(
            f"{answer['usage']['completion_tokens']} tokens, but {len(ids)} in the text"
        )
    return ids


def generate(prompts: list[list[int]]) -> list[list[int]]:
    """All at once."""
    return list(POOL.map(complete, prompts))


job.measure(JOB, f"llama.cpp, xllamacpp {xllamacpp.__version__}", generate)
