"""The native engine on one GPU, with random bfloat16 weights of common shapes: ``make bench-engine-gpu``.

For each shape: decode milliseconds a step at batch 1, 8 and 64 (through ``Engine.step``, and of the device alone), output tokens per second
for 128 requests of 161 tokens in and 128 out, time to first token of a warm engine at 161, 2,048 and 8,192 prompt tokens, peak memory.
Prompts are random and all different, output is greedy, nothing stops early. ``--profile`` adds the device's time by kernel.

Prints one JSON document: medians, and every single figure.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from pilotlight.engine.core.scheduler import BatchLimits
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.types import Dtype, InstanceId, ModelSpec, RequestId, Sampling

VOCAB_SIZE = 151_936
COMMON = {
    "architecture": "Qwen2ForCausalLM",
    "dtype": Dtype.BFLOAT16,
    "head_dim": 128,
    "vocab_size": VOCAB_SIZE,
    "max_context_tokens": 16_384,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tied_embeddings": False,
    "attention_bias": False,
    "part_bytes": (),
}
SHAPES = {
    "4B": {"num_layers": 40, "hidden_size": 2560, "num_heads": 20, "num_kv_heads": 20, "intermediate_size": 6912},
    "8B": {"num_layers": 36, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 12_288},
}
KV_TOKENS = 65_536
STEP_TOKENS = 8_192
BATCHES = (1, 8, 64, 128)
PROMPTS = (161, 2_048, 8_192)
INSTANCE = InstanceId("bench")


class Bench:
    """One engine with one model."""

    def __init__(self, arena: Arena, shape: str, seed: int) -> None:
        self.spec = _with_bytes(ModelSpec(**COMMON, **SHAPES[shape]))  # type: ignore[arg-type]
        self.engine = Engine(1, time.monotonic, BatchLimits(step_tokens=STEP_TOKENS, running=256), arena)
        self._random = random.Random(seed)
        self._number = 0
        room = KV_TOKENS * self.spec.kv_bytes_per_token(self.spec.whole, Dtype.BFLOAT16)
        self.engine.begin_load(INSTANCE, self.spec, self.spec.whole, Dtype.BFLOAT16, self.spec.total_bytes + room)
        start_s = time.monotonic()
        self._load(seed)
        torch.cuda.synchronize()
        self.load_s = time.monotonic() - start_s

    def _load(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        decoder = decoder_of(self.spec)
        made: dict[tuple[int, ...], torch.Tensor] = {}
        for part in range(self.spec.num_layers + 2):
            sources: dict[str, Any] = {}
            for name, shape in decoder.shapes(part).items():
                if shape not in made:
                    # The same numbers in every layer: it is all the same to the device's speed.
                    base = torch.randn(1 << 20, generator=generator)
                    count = prod(shape)
                    made[shape] = base.repeat(-(-count // len(base)))[:count].mul_(0.02).to(torch.bfloat16)
                tensor = torch.ones(shape, dtype=torch.bfloat16) if "norm" in name else made[shape]
                sources[decoder.prefix(part) + name] = (
                    Dtype.BFLOAT16, shape, memoryview(tensor.view(-1).view(torch.uint8).numpy())
                )  # fmt: skip
            self.engine.place_part(INSTANCE, part, sources)

    def add(self, prompt_tokens: int, output_tokens: int, temperature: float = 0.0) -> None:
        """One request with a prompt of its own."""
        self._number += 1
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)]
        sampling = Sampling(seed=self._number, max_tokens=output_tokens, temperature=temperature)
        self.engine.add(RequestId(f"r{self._number}"), 1, INSTANCE, prompt, (), sampling)

    def finish(self) -> int:
        """Runs everything to its end; how many tokens came."""
        tokens = 0
        while self.engine.has_work:
            tokens += sum(len(produced.token_ids) for produced in self.engine.step().produced)
        return tokens

    def ttft_ms(self, prompt_tokens: int) -> float:
        """From the call that adds a request to its first token."""
        self.add(prompt_tokens, 1)
        start_s = time.monotonic()
        self.finish()
        return (time.monotonic() - start_s) * 1e3

    def decode_ms(self, batch: int, steps: int, temperature: float = 0.0) -> list[float]:
        """Of single steps, with prompts of 161 tokens behind them."""
        for _ in range(batch):
            self.add(161, steps + 8, temperature)
        while self.engine.step().running < batch or self.engine.step().batch_tokens > batch:
            pass
        for _ in range(3):
            self.engine.step()
        times_ms: list[float] = []
        for _ in range(steps - 16):
            start_s = time.monotonic()
            self.engine.step()
            times_ms.append((time.monotonic() - start_s) * 1e3)
        self.finish()
        return times_ms

    def output_tokens_per_s(self, requests: int, prompt_tokens: int, output_tokens: int) -> float:
        """All requests at once, to the end of the last."""
        for _ in range(requests):
            self.add(prompt_tokens, output_tokens)
        start_s = time.monotonic()
        tokens = self.finish()
        assert tokens == requests * output_tokens
        return tokens / (time.monotonic() - start_s)

    def profile(self, batch: int, prompt_tokens: int, steps: int) -> list[tuple[str, float, int]]:
        """Device time by kernel, milliseconds a step, the largest first."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(batch):
            self.add(prompt_tokens, steps + 12 if steps > 1 else 1)
        if steps > 1:
            for _ in range(6):
                self.engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(steps):
                self.engine.step()
            torch.cuda.synchronize()
        self.finish()
        kernels = [
            (event.key[:90], round(event.self_device_time_total / 1e3 / steps, 4), event.count // steps)
            for event in recorded.key_averages()
        ]
        return sorted(kernels, key=lambda kernel: -kernel[1])[:14]


def _with_bytes(spec: ModelSpec) -> ModelSpec:
    decoder = decoder_of(replace(spec, part_bytes=(0,) * (spec.num_layers + 2)))
    sizes = (sum(map(prod, decoder.shapes(part).values())) * 2 for part in range(spec.num_layers + 2))
    return replace(spec, part_bytes=tuple(sizes))


def measure(arena: Arena, shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything for one shape."""
    bench = Bench(arena, shape, 1)
    said = {"load_s": round(bench.load_s, 3), "weights_gib": round(bench.spec.total_bytes / 2**30, 2)}
    print(f"… {shape} loaded in {bench.load_s:.2f} s", file=sys.stderr)
    for prompt in PROMPTS:
        bench.ttft_ms(prompt)
    decode: dict[int, list[float]] = {}
    for batch in BATCHES:
        bench.decode_ms(batch, 24)
        decode[batch] = bench.decode_ms(batch, arguments.steps)
        print(f"… {shape} decode {batch}: {statistics.median(decode[batch]):.3f} ms", file=sys.stderr)
    noisy = bench.decode_ms(64, arguments.steps, temperature=0.8)
    bench.output_tokens_per_s(128, 161, 128)
    rates = [bench.output_tokens_per_s(128, 161, 128) for _ in range(arguments.repeats)]
    ttfts = {prompt: [bench.ttft_ms(prompt) for _ in range(arguments.repeats + 2)] for prompt in PROMPTS}
    said |= {
        "decode_ms": {batch: round(statistics.median(times), 3) for batch, times in decode.items()},
        "decode_64_at_temperature_0.8_ms": round(statistics.median(noisy), 3),
        "output_tokens_per_s": round(statistics.median(rates), 1),
        "ttft_ms": {prompt: round(statistics.median(times), 2) for prompt, times in ttfts.items()},
        "peak_torch_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "raw": {
            "decode_ms": {batch: [round(one, 3) for one in times] for batch, times in decode.items()},
            "output_tokens_per_s": [round(rate, 1) for rate in rates],
            "ttft_ms": {prompt: [round(one, 2) for one in times] for prompt, times in ttfts.items()},
        },
    }
    if arguments.profile:
        said["profile"] = {
            "decode 1": bench.profile(1, 161, 10),
            "decode 64": bench.profile(64, 161, 10),
            "prefill 8192": bench.profile(1, 8192, 1),
            "prefill 161": bench.profile(1, 161, 1),
        }
    bench.engine.unload(INSTANCE)
    bench.engine.close()
    return said


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The native engine on one GPU.")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args(arguments)
    from pilotlight.engine.cuda.arena import CudaArena

    arena = CudaArena()
    found = {shape: measure(arena, shape, asked) for shape in asked.shapes}
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": found}))


if __name__ == "__main__":
    main()
