"""What two engines of ``bench/engine_gpu.py`` say to the same prompts: tokens, and all logits."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from engine_gpu_agreement import agreement, checked
from engine_gpu_logits import PLACES, judged
from engine_gpu_process import Child, DeviceMemory

PROMPTS = [161] * 8
"""Their tokens."""
COMPARED_TOKENS = 64


@dataclass(frozen=True)
class Said:
    """Greedy tokens of both for the same prompts."""

    seed: int
    outputs: dict[str, list[list[int]]]
    tops: dict[str, list[Any]]
    """The most probable ones at each."""


def said(engines: dict[str, Child], seed: int, memory: DeviceMemory) -> Said:
    """What both say."""
    answers: dict[str, dict[str, Any]] = {}
    for name, engine in engines.items():
        with memory.of(name):
            answers[name] = engine.ask(
                do="likeliest",
                seed=seed,
                prompt_tokens=PROMPTS,
                output_tokens=COMPARED_TOKENS,
            )
    outputs, tops = (
        {name: answer[key] for name, answer in answers.items()} for key in ("outputs", "tops")
    )
    return Said(seed, outputs, tops)


def compared(engine: Child, both: Said) -> dict[str, Any]:
    """Judged by our engine in float32, which takes memory of its own: after everything that is
    measured.
    """
    ours, theirs = both.outputs["ours"], both.outputs["vllm"]
    places, prompts = checked(ours, theirs), PROMPTS
    tops = engine.ask(
        do="exact", seed=both.seed, prompt_tokens=prompts, outputs=ours, places=places
    )["tops"]
    exact = [
        dict(zip(where, there, strict=True)) for where, there in zip(places, tops, strict=True)
    ]
    return agreement(ours, theirs, both.tops["ours"], both.tops["vllm"], exact)


def judged_logits(engines: dict[str, Child], seed: int) -> dict[str, Any]:
    """All logits behind the same tokens, beside what the checkpoint means; see
    ``engine_gpu_logits``. Our process computes that, of memory of its own: after everything that
    is measured.
    """
    ask = {"seed": seed, "prompt_tokens": PROMPTS, "places": PLACES}
    files = {name: engine.ask(do="logits", **ask)["file"] for name, engine in engines.items()}
    emulation = engines["ours"].ask(do="emulated", **ask)["file"]
    return judged(np.load(emulation), {name: np.load(file) for name, file in files.items()})
