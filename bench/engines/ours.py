"""Pilotlight's engine, as the worker's child calls it."""

import itertools
from pathlib import Path

import job
import torch
from safetensors import safe_open

from pilotlight.checkpoint.config import parse_config
from pilotlight.common.clock import SystemClock
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import Sampling

KV_TOKENS = 8192
INSTANCE = InstanceId("bench")

JOB = job.read()
DTYPE = Dtype(JOB.dtype)
ENGINE = Engine(JOB.threads, SystemClock().monotonic_s)
NUMBERS = itertools.count()


def load() -> None:
    """Every part of the checkpoint, from its file."""
    folder = Path(JOB.folder)
    spec = parse_config((folder / "config.json").read_bytes(), DTYPE)
    decoder = decoder_of(spec)
    device_bytes = parameter_bytes(
        decoder, spec.whole, DTYPE
    ) + KV_TOKENS * spec.kv_bytes_per_token(spec.whole, DTYPE)
    ENGINE.begin_load(INSTANCE, spec, spec.whole, DTYPE, device_bytes)
    with safe_open(folder / "model.safetensors", "pt") as file:
        for part in spec.parts_of(spec.whole):
            names = [decoder.prefix(part) + name for name in decoder.shapes(part)]
            tensors = {name: file.get_tensor(name) for name in names}
            sources = {
                name: (
                    DTYPE,
                    tuple(tensor.shape),
                    memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()),
                )
                for name, tensor in tensors.items()
            }
            ENGINE.place_part(INSTANCE, part, sources)


def generate(prompts: list[list[int]]) -> list[list[int]]:
    """Each run's requests are new ones."""
    outputs: dict[str, list[int]] = {}
    for prompt in prompts:
        request_id = RequestId(f"r{next(NUMBERS)}")
        sampling = Sampling(seed=0, max_tokens=JOB.output_tokens, temperature=0.0, ignore_eos=True)
        ENGINE.add(request_id, 1, INSTANCE, prompt, (), sampling)
        outputs[request_id] = []
    while ENGINE.has_work:
        for produced in ENGINE.step().produced:
            outputs[produced.request_id].extend(produced.token_ids)
    return list(outputs.values())


load()
job.measure(JOB, f"torch {torch.__version__}", generate)
