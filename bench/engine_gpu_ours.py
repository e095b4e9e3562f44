"""The native engine on a GPU, for ``bench/engine_gpu.py``."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import engine_gpu_job as job
import numpy as np
import torch
from engine_gpu_emulated import emulated
from engine_gpu_logits import FORCED_BIAS, FORCED_TOKEN
from engine_gpu_weights import spec_of
from safetensors import safe_open
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda import sampler
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.memory import layout_of
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import Sampling

LIMITS = BatchLimits(step_tokens=8_192, running=256, prefix_cache=False)
EXACT_TOP = 20
INSTANCE, EXACT = InstanceId("bench"), InstanceId("float32")
EXACT_KV_TOKENS = 8_192


class Bench:
    """One engine with one model."""

    def __init__(self, asked: job.Job, limits: BatchLimits = LIMITS) -> None:
        self.spec = spec_of(asked.shape)
        self.arena = CudaArena()
        self.device_name = torch.cuda.get_device_name()
        self.engine = Engine(1, time.monotonic, limits, self.arena)
        self._folder = Path(asked.folder)
        self._number = 0
        self.load_s = self._load(INSTANCE, Dtype.BFLOAT16, job.KV_TOKENS)

    def _load(self, instance: InstanceId, dtype: Dtype, kv_tokens: int) -> float:
        """The model, computed in some dtype; the seconds."""
        decoder, whole = decoder_of(self.spec), self.spec.whole
        layout = layout_of(self.arena, decoder, whole, dtype)
        parts = range(self.spec.num_layers + 2)
        room = sum(layout.part(part).num_bytes for part in parts)
        room += layout.kv_bytes(
            kv_tokens // BLOCK_TOKENS, self.spec.num_layers, self.arena.granule_bytes
        )
        self.engine.begin_load(instance, self.spec, whole, dtype, room)
        began_s = time.monotonic()
        for part in parts:
            with safe_open(self._folder / f"part-{part}.safetensors", "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            sources = {
                name: (
                    Dtype(str(tensor.dtype).removeprefix("torch.")),
                    tuple(tensor.shape),
                    memoryview(tensor.view(-1).view(torch.uint8).numpy()),
                )
                for name, tensor in tensors.items()
            }
            self.engine.place_part(instance, part, sources)
        torch.cuda.synchronize()
        return time.monotonic() - began_s

    def add(
        self,
        prompt: list[int],
        output_tokens: int,
        instance: InstanceId = INSTANCE,
        **sampling: Any,
    ) -> str:
        """One greedy request; its id."""
        self._number += 1
        name = f"r{self._number}"
        parameters = Sampling(
            seed=self._number, max_tokens=output_tokens, temperature=0.0, **sampling
        )
        self.engine.add(RequestId(name), 1, instance, prompt, (), parameters)
        return name

    def finish(self) -> list[Any]:
        """Runs everything to its end; what was produced."""
        produced: list[Any] = []
        while self.engine.has_work:
            produced += self.engine.step().produced
        return produced

    def generate(
        self, prompts: list[list[int]], wanted: list[int], at_once: int | None = None
    ) -> list[list[int]]:
        """See ``engine_gpu_job.Generate``."""
        outputs: dict[str, list[int]] = {}
        left = zip(prompts, wanted, strict=True)
        for prompt, count in islice(left, at_once):
            outputs[self.add(prompt, count)] = []
        while self.engine.has_work:
            for one in self.engine.step().produced:
                outputs[one.request_id] += one.token_ids
                if one.finish is not None and (following := next(left, None)) is not None:
                    outputs[self.add(*following)] = []
        return list(outputs.values())

    def rest(self) -> None:
        """What a served engine does while it has nothing to do."""
        while self.engine.prepare():
            pass

    def likeliest(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens, and for each the most probable ones with the logarithms of their
        probabilities.
        """
        names = [
            self.add(prompt, ask["output_tokens"], logprobs=True, top_logprobs=job.TOP)
            for prompt in job.prompts_of(ask["seed"], ask["prompt_tokens"])
        ]
        found: dict[str, list[Any]] = {name: [] for name in names}
        for one in self.finish():
            found[one.request_id] += zip(one.token_ids, one.top_logprobs or (), strict=True)
        return {"outputs": [[token for token, _ in each] for each in found.values()],
                "tops": [[list(map(list, top)) for _, top in each] for each in found.values()]}  # fmt: skip

    def exact(self, ask: dict[str, Any]) -> dict[str, Any]:
        """The most probable tokens at places of outputs that are given, computed in float32."""
        self._load(EXACT, Dtype.FLOAT32, EXACT_KV_TOKENS)
        found: dict[str, Any] = {}
        names: list[list[str]] = []
        prompts = job.prompts_of(ask["seed"], ask["prompt_tokens"])
        for prompt, output, places in zip(prompts, ask["outputs"], ask["places"], strict=True):
            behind = [prompt + output[:place] for place in places]
            names.append(
                [
                    self.add(tokens, 1, EXACT, logprobs=True, top_logprobs=EXACT_TOP)
                    for tokens in behind
                ]
            )
        for one in self.finish():
            found[one.request_id] = next(list(map(list, top)) for top in one.top_logprobs or ())
        self.engine.unload(EXACT)
        return {"tops": [[found[name] for name in each] for each in names]}

    def logits(self, ask: dict[str, Any]) -> dict[str, Any]:
        """All logits behind prompts, and behind tokens that are forced, in a file."""
        prompts = job.prompts_of(ask["seed"], ask["prompt_tokens"])
        first, places = self._number + 1, ask["places"]
        with logits_told() as told:
            for prompt in prompts:
                self.add(prompt, places, logit_bias=((FORCED_TOKEN, FORCED_BIAS),))
            self.finish()
        # A request's seed is its number.
        rows = [
            [told[first + row, place] for place in range(places)] for row in range(len(prompts))
        ]
        return self._saved("ours", torch.stack([torch.stack(each) for each in rows]))

    def emulated(self, ask: dict[str, Any]) -> dict[str, Any]:
        """What the checkpoint means at the same places, in a file."""
        forced = [FORCED_TOKEN] * (ask["places"] - 1)
        sequences = [
            prompt + forced for prompt in job.prompts_of(ask["seed"], ask["prompt_tokens"])
        ]
        return self._saved("float32", emulated(self._folder, self.spec, sequences, ask["places"]))

    def _saved(self, name: str, logits: Tensor) -> dict[str, Any]:
        file = self._folder / f"logits-{name}.npy"
        np.save(file, logits.numpy())
        return {"file": str(file)}

    def profile(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Device time by kernel, milliseconds a step, the largest first; of all kernels, and of the
        same steps by the clock: a device that gets warm slows down from one call to the next.
        """
        steps = ask["steps"]
        for prompt in job.prompts_of(ask["seed"], ask["prompt_tokens"]):
            self.add(prompt, steps + 12 if steps > 1 else 1)
        if steps > 1:
            for _ in range(6):
                self.engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            began_s = time.perf_counter()
            for _ in range(steps):
                self.engine.step()
            torch.cuda.synchronize()
            step_ms = (time.perf_counter() - began_s) * 1e3 / steps
        self.finish()
        kernels = [
            (
                event.key[:90],
                round(event.self_device_time_total / 1e3 / steps, 4),
                event.count // steps,
            )
            for event in recorded.key_averages()
        ]
        return {
            "step_ms": round(step_ms, 3),
            "kernels_ms": round(sum(took_ms for _, took_ms, _ in kernels), 3),
            "kernels": sorted(kernels, key=lambda kernel: -kernel[1])[:14],
        }

    def memory(self, _: dict[str, Any]) -> dict[str, Any]:
        """What it holds of the device's memory, by its own books."""
        return {
            "arena_bytes": self.arena.physical_bytes,
            "torch_bytes": torch.cuda.max_memory_reserved(),
        }


@contextlib.contextmanager
def logits_told() -> Iterator[dict[tuple[int, int], Tensor]]:
    """The logits of every row that is sampled meanwhile, by the seed of its request and its place
    in the output: float32 on the host.
    """
    told: dict[tuple[int, int], Tensor] = {}
    known = sampler.logprobs_of

    def told_too(logits: Tensor, chosen: Tensor, specs: Sequence[SampleSpec]) -> Any:
        for spec, row in zip(specs, logits.float().cpu(), strict=True):
            told[spec.sampling.seed, spec.position] = row
        return known(logits, chosen, specs)

    sampler.logprobs_of = told_too
    try:
        yield told
    finally:
        sampler.logprobs_of = known


def main() -> None:
    """Answers until its input ends."""
    answers, asked = job.take_stdout(), job.read()
    bench = Bench(asked)
    about = {
        "version": f"torch {torch.__version__}",
        "device": bench.device_name,
        "load_s": round(bench.load_s, 3),
    }
    others = {
        "likeliest": bench.likeliest,
        "exact": bench.exact,
        "logits": bench.logits,
        "emulated": bench.emulated,
        "profile": bench.profile,
        "memory": bench.memory,
    }
    job.serve(answers, about, bench.generate, others, bench.rest)


if __name__ == "__main__":
    main()
