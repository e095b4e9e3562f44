"""Tiny random checkpoints, made by transformers and kept in memory, and a driver for the engine."""

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.core.scheduler import BatchLimits
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.parameters import Parameters, Source
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.results import FirstPrefill, StageRoom, StepResult
from pilotlight.policy.types import Dtype, FinishReason, InstanceId, ModelSpec, RequestId, RopeScaling, Sampling, Stage

torch.set_num_threads(1)  # tiny matrices gain nothing from a second thread, and on a busy machine every barrier waits for it

NUM_LAYERS = 4
SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "sdpa",
}
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_tokens=32)
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": LLAMA3.factor,
    "low_freq_factor": LLAMA3.low_freq_factor,
    "high_freq_factor": LLAMA3.high_freq_factor,
    "original_max_position_embeddings": LLAMA3.original_max_position_tokens,
}
KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE)),
    "llama-head-dim": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE, head_dim=20)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE, tie_word_embeddings=True)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE, attention_bias=True)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE_LLAMA3, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters=ROPE)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters=ROPE, tie_word_embeddings=True)),
}


def spec_of(model: PreTrainedModel, dtype: Dtype) -> ModelSpec:
    config = model.config
    unmeasured = (0,) * (config.num_hidden_layers + 2)
    return ModelSpec(
        architecture=type(model).__name__,
        dtype=dtype,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        rope_scaling=LLAMA3 if config.rope_parameters["rope_type"] == "llama3" else None,
        rms_norm_eps=config.rms_norm_eps,
        tied_embeddings=config.tie_word_embeddings,
        attention_bias=getattr(config, "attention_bias", True),
        part_bytes=unmeasured,
    )


def source_of(tensor: torch.Tensor) -> Source:
    stored = tensor.detach().contiguous()
    dtype = Dtype(str(stored.dtype).removeprefix("torch."))
    return dtype, tuple(stored.shape), memoryview(stored.view(-1).view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True)
class Checkpoint:
    """A model of transformers, and its tensors as a loader would offer them."""

    model: PreTrainedModel
    spec: ModelSpec
    parts: dict[int, dict[str, Source]]

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Output of transformers, without a cache: every token from a forward pass over all tokens before it."""
        token_ids = list(prompt_ids)
        for _ in range(num_tokens):
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt_ids) :]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

    def converted(self, dtype: Dtype) -> "Checkpoint":
        """The same values in a wider dtype."""
        return replace(self, model=cast(deepcopy(self.model), dtype))

    def with_tensor(self, part: int, name: str, change: Callable[[torch.Tensor], None]) -> "Checkpoint":
        """The same checkpoint with one tensor changed in place of a copy (the model stays as it was)."""
        tensor = self.model.state_dict()[name].clone()
        change(tensor)
        return replace(self, parts={**self.parts, part: {**self.parts[part], name: source_of(tensor)}})


def cast(model: PreTrainedModel, dtype: Dtype) -> PreTrainedModel:
    """Parameters only: ``model.to`` would also round the rotary frequencies, which transformers loads and keeps in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype.value))
    return model.eval()


def part_of(name: str, num_layers: int) -> int:
    if name.startswith("model.layers."):
        return 1 + int(name.split(".")[2])
    return 0 if name == "model.embed_tokens.weight" else num_layers + 1


@cache
def make_checkpoint(kind: str, seed: int = 0, dtype: Dtype = Dtype.FLOAT64) -> Checkpoint:
    torch.manual_seed(seed)
    model = cast(KINDS[kind](), dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far larger than an initialised model's: outputs wander about instead of repeating one token.
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    spec = spec_of(model, dtype)
    parts: dict[int, dict[str, Source]] = {part: {} for part in spec.parts_of(spec.whole)}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and spec.tied_embeddings:
            continue
        parts[part_of(name, spec.num_layers)][name] = source_of(tensor)
    return Checkpoint(model, spec, parts)


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Checkpoint]:
    """checkpoint(kind, seed=0, dtype=float64)."""
    return make_checkpoint


class Clock:
    """A millisecond passes at every look."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return next(self._ticks) / 1000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@dataclass
class Output:
    """What a driver saw of one request."""

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    code: str = ""


class Driver:
    """Calls the engine as its child would, and checks what holds for every step."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self.engine = Engine(1, Clock(), limits)
        self.outputs: dict[str, Output] = {}
        self.first_prefills: list[FirstPrefill] = []
        self.capacity_tokens = 0
        self.most_running = 0

    def load(
        self,
        checkpoint: Checkpoint,
        instance: str = "i",
        kv_tokens: int = 4096,
        dtype: Dtype | None = None,
        stage: Stage | None = None,
    ) -> StageRoom:
        spec, stage, dtype = checkpoint.spec, stage or checkpoint.spec.whole, dtype or checkpoint.spec.dtype
        device_bytes = Parameters(decoder_of(spec), stage, dtype).size_bytes + kv_tokens * spec.kv_bytes_per_token(stage, dtype)
        room = self.engine.begin_load(InstanceId(instance), spec, stage, dtype, device_bytes)
        placed = [self.engine.place_part(InstanceId(instance), part, checkpoint.parts[part]) for part in room.parts]
        assert [part.ready for part in placed] == [False] * (len(placed) - 1) + [True]
        self.capacity_tokens += room.kv_capacity_tokens
        return room

    def add(
        self, name: str, prompt_ids: Sequence[int], output_ids: Sequence[int] = (), instance: str = "i", **sampling: object
    ) -> None:
        parameters = Sampling(**{"seed": 0, "max_tokens": 24, "temperature": 0.0, **sampling})
        self.engine.add(RequestId(name), 1, InstanceId(instance), prompt_ids, output_ids, parameters)
        self.outputs[name] = Output(list(output_ids))

    def step(self) -> StepResult:
        result = self.engine.step()
        for produced in result.produced:
            output = self.outputs[produced.request_id]
            assert output.finish is None, "nothing follows a finish"
            assert produced.position == len(output.token_ids)
            output.token_ids.extend(produced.token_ids)
            output.logprobs.extend(produced.logprobs or ())
            output.finish, output.code = produced.finish, produced.code
        self.first_prefills.extend(result.first_prefills)
        self.most_running = max(self.most_running, result.running)
        assert 0 <= result.kv_free_tokens <= self.capacity_tokens
        return result

    def finish(self) -> dict[str, list[int]]:
        """Steps to the end of all requests; their tokens."""
        while self.engine.has_work:
            result = self.step()
        assert (result.waiting, result.running) == (0, 0)
        assert result.kv_free_tokens == self.capacity_tokens
        assert all(output.finish is not None for output in self.outputs.values())
        return {name: output.token_ids for name, output in self.outputs.items()}


@pytest.fixture
def driver() -> Callable[..., Driver]:
    """driver(limits=None)."""
    return Driver


class Chain:
    """The ranges of one model, run by hand: what a pipeline group does, without its transport."""

    def __init__(self, checkpoint: Checkpoint, num_ranges: int, num_blocks: int = 64) -> None:
        spec, size = checkpoint.spec, NUM_LAYERS // num_ranges
        self.spec = spec
        self.runners: list[RangeRunner] = []
        for start in range(0, NUM_LAYERS, size):
            stage = Stage(start, start + size)
            decoder = decoder_of(spec)
            parameters = Parameters(decoder, stage, spec.dtype)
            for part in parameters.parts:
                parameters.place(part, checkpoint.parts[part], Clock())
            self.runners.append(RangeRunner(decoder, stage, parameters, KvCache(spec, stage, spec.dtype, num_blocks)))

    def run(self, segments: Sequence[Segment], token_ids: Sequence[int]) -> torch.Tensor:
        batch, state = Batch(tuple(segments)), torch.tensor(token_ids)
        for runner in self.runners:
            state = runner.run(batch, state)
        return state

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """All prompts in one batch, then one token of each a step."""
        rows = [list(prompt) for prompt in prompts]
        per_row = blocks_for(max(map(len, rows)) + num_tokens)
        blocks = [tuple(range(row * per_row, (row + 1) * per_row)) for row in range(len(rows))]
        computed = [0] * len(rows)
        for _ in range(num_tokens):
            segments = [
                Segment(done, len(row) - done, mine, True) for row, done, mine in zip(rows, computed, blocks, strict=True)
            ]
            logits = self.run(segments, [token_id for row, done in zip(rows, computed, strict=True) for token_id in row[done:]])
            computed = [len(row) for row in rows]
            for row, token_id in zip(rows, logits.argmax(dim=-1).tolist(), strict=True):
                row.append(token_id)
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.fixture
def chain() -> Callable[..., Chain]:
    """chain(checkpoint, num_ranges, num_blocks=64)."""
    return Chain


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Four prompts of mixed lengths: less than a block, more than one, several, a single token."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator).tolist() for length in (5, 23, 70, 1)]
