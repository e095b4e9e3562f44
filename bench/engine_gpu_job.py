"""What ``bench/engine_gpu.py`` asks of an engine, line by line.

The standard library alone: an engine may bring its own interpreter.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 151_936
MAX_CONTEXT_TOKENS = 16_384
SHAPES = {
    "4B": {
        "num_layers": 40,
        "hidden_size": 2560,
        "num_heads": 20,
        "num_kv_heads": 20,
        "intermediate_size": 6912,
    },
    "8B": {
        "num_layers": 36,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "intermediate_size": 12_288,
    },
}
SHAPES |= {"8B-fp8": SHAPES["8B"], "8B-fp8-channel": SHAPES["8B"]}
QUANTIZED = {
    "8B-fp8": "block",
    "8B-fp8-channel": "channel",
    "tiny-fp8": "block",
    "tiny-fp8-channel": "channel",
}
"""Shapes whose weights are in fp8, and what of them shares a scale."""
HEAD_DIM = 128
SHAPES_TO_TRY = {
    "tiny": {
        "num_layers": 2,
        "hidden_size": 128,
        "num_heads": 1,
        "num_kv_heads": 1,
        "intermediate_size": 256,
    }
}
SHAPES_TO_TRY |= dict.fromkeys(("tiny-fp8", "tiny-fp8-channel"), SHAPES_TO_TRY["tiny"])
SHAPES_TO_TRY |= {
    f"tiny-{times}": SHAPES_TO_TRY["tiny"] | {"intermediate_size": 256 * times} for times in (2, 3)
}
"""For a machine without a GPU: everything but the speed."""
SHAPES_TO_MIX = {
    "2B": {
        "num_layers": 24,
        "hidden_size": 2048,
        "num_heads": 16,
        "num_kv_heads": 8,
        "intermediate_size": 5632,
    }
}
"""Beside the others, where models of several sizes share a device."""
KV_TOKENS = 98_304
"""Of either engine."""
TOP = 5
"""The most probable tokens that are told with each, where they are asked for."""


def weights_bytes(shape: str) -> int:
    """Of a shape, without norms, biases and scales."""
    sizes = SHAPES[shape]
    hidden, heads = (
        sizes["hidden_size"],
        HEAD_DIM * (2 * sizes["num_heads"] + 2 * sizes["num_kv_heads"]),
    )
    layers = sizes["num_layers"] * (heads + 3 * sizes["intermediate_size"])
    return hidden * (4 * VOCAB_SIZE + (1 if shape in QUANTIZED else 2) * layers)


Generate = Callable[[list[list[int]], list[int], int | None], list[list[int]]]
"""Prompts, how many tokens each is to be given, and how many requests there are at a time (None:
all) -> those tokens, greedy, to the end of the last.
"""
Handler = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """Read from the command line."""

    folder: str
    shape: str

    @property
    def kv_bytes(self) -> int:
        """Keys and values of ``KV_TOKENS`` tokens in bfloat16."""
        shape = SHAPES[self.shape]
        return KV_TOKENS * 2 * shape["num_layers"] * shape["num_kv_heads"] * HEAD_DIM * 2


def prompts_of(seed: int, lengths: list[int]) -> list[list[int]]:
    """Random prompts: those of different seeds have nothing in common, so no prefix cache helps."""
    dice = random.Random(seed)
    return [dice.choices(range(VOCAB_SIZE), k=length) for length in lengths]


def read() -> Job:
    """The job of this process."""
    return Job(**json.loads(sys.argv[1]))


def take_stdout() -> Any:
    """Answers go where stdout went; whatever the engine prints goes to stderr.

    To be called before the engine is imported.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    answers: Any,
    about: dict[str, Any],
    generate: Generate,
    others: dict[str, Handler] | None = None,
    rest: Callable[[], None] = lambda: None,
) -> None:
    """Says that it is ready, then answers what it is asked until its input ends.

    Args:
        answers: where answers go.
        about: the first of them.
        generate: runs prompts, which is timed.
        others: whatever else may be asked.
        rest: what the engine does behind each ``generate`` while it has nothing to do; not timed.

    Raises:
        SystemExit: the engine gave another number of tokens than it was asked for.
    """
    _say(answers, about)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["do"] == "generate":
            answer = _generate(ask, generate)
            rest()  # Before the answer: another engine on the device is asked next.
            _say(answers, answer)
        else:
            _say(answers, (others or {})[ask["do"]](ask))


def _generate(ask: dict[str, Any], generate: Generate) -> dict[str, Any]:
    prompts, wanted = prompts_of(ask["seed"], ask["prompt_tokens"]), ask["output_tokens"]
    began_s = time.perf_counter()
    outputs = generate(prompts, wanted, ask["at_once"])
    took_s = time.perf_counter() - began_s
    if [len(each) for each in outputs] != wanted:
        raise SystemExit(f"asked for {wanted} tokens, got {[len(each) for each in outputs]}")
    return {"seconds": took_s}


def _say(answers: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)
