"""Tiny random checkpoints, made by transformers and kept in memory, and a driver for the engine."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from time import monotonic

import pytest
import torch
from transformers import Gemma3ForCausalLM, PreTrainedModel
from transformers_models import KINDS, NUM_LAYERS, SIZES

from pilotlight.checkpoint.config import parse_config
from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory, parameter_bytes
from pilotlight.engine.device.parameters import Parameters, Source
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.results import FirstPrefill, StageRoom, StepResult
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.request import FinishReason, Sampling, Vocabulary

# Tiny matrices gain nothing from a second thread, and on a busy machine every barrier waits for it.
torch.set_num_threads(1)

FINISH_S = 100


def spec_of(model: PreTrainedModel, dtype: Dtype) -> ModelSpec:
    """What registration would make of the configuration that transformers would save."""
    config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    return parse_config(json.dumps(config).encode(), dtype)


def source_of(tensor: torch.Tensor) -> Source:
    stored = tensor.detach().contiguous()
    dtype = Dtype(str(stored.dtype).removeprefix("torch."))
    return (
        dtype,
        tuple(stored.shape),
        memoryview(stored.view(-1).view(torch.uint8).numpy().tobytes()),
    )


@dataclass(frozen=True)
class Checkpoint:
    """A model of transformers, and its tensors as a loader would offer them."""

    model: PreTrainedModel
    spec: ModelSpec
    parts: dict[int, dict[str, Source]]
    said: dict[tuple[int, ...], list[int]] = field(default_factory=dict, init=False)
    """Greedy outputs so far, by prompt: most tests ask for those of the same few prompts."""

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Output of transformers, without a cache: every token from a forward pass over all tokens
        before it.
        """
        said = self.said.setdefault(tuple(prompt_ids), [])
        while len(said) < num_tokens:
            said.append(int(self.logits([*prompt_ids, *said])[-1].argmax()))
        return said[:num_tokens]

    def would_say(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[int]:
        """What transformers says at each place of an output, given all before it.

        If that is the output itself, it is what ``greedy`` gives: each token follows from those
        before it.
        """
        return (
            self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
            .argmax(dim=-1)
            .tolist()
        )

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

    def converted(self, dtype: Dtype) -> "Checkpoint":
        """The same values in a wider dtype."""
        return replace(self, model=cast(deepcopy(self.model), dtype))

    def with_tensor(
        self, part: int, name: str, change: Callable[[torch.Tensor], None]
    ) -> "Checkpoint":
        """The same checkpoint with one tensor changed in place of a copy (the model stays as it
        was).
        """
        tensor = self.model.state_dict()[name].clone()
        change(tensor)
        return replace(
            self, parts={**self.parts, part: {**self.parts[part], name: source_of(tensor)}}
        )


def cast(model: PreTrainedModel, dtype: Dtype) -> PreTrainedModel:
    """Parameters only: ``model.to`` would also round the rotary frequencies, which transformers
    loads and keeps in float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype.value))
    return model.eval()


def part_of(name: str, num_layers: int) -> int:
    if name.startswith("model.layers."):
        return 1 + int(name.split(".")[2])
    return 0 if name == "model.embed_tokens.weight" else num_layers + 1


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the names that checkpoints have for them: transformers stacks experts in memory,
    files have them one by one.
    """
    for name, tensor in model.state_dict().items():
        layer, stacked, kind = name.partition("experts.")
        if not stacked:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            if kind == "down_proj":
                yield f"{layer}experts.{expert}.down_proj.weight", matrix
            else:
                for half, rows in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    yield f"{layer}experts.{expert}.{half}.weight", rows


@cache
def make_checkpoint(kind: str, seed: int = 0, dtype: Dtype = Dtype.FLOAT64) -> Checkpoint:
    torch.manual_seed(seed)
    model = cast(KINDS[kind](), dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far larger than an initialised model's: outputs wander about instead of repeating one
            # token.
            centred = isinstance(
                model, Gemma3ForCausalLM
            )  # its norms add 1 themselves, and its embeddings are scaled up
            std = 0.2 / SIZES["hidden_size"] ** 0.5 if centred and "embed" in name else 0.2
            parameter.normal_(mean=1.0 if "norm" in name and not centred else 0.0, std=std)
    spec = spec_of(model, dtype)
    parts: dict[int, dict[str, Source]] = {part: {} for part in spec.parts_of(spec.whole)}
    for name, tensor in stored_tensors(model):
        if name == "lm_head.weight" and spec.tied_embeddings:
            continue
        parts[part_of(name, spec.num_layers)][name] = source_of(tensor)
    return Checkpoint(model, spec, parts)


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Checkpoint]:
    """checkpoint(kind, seed=0, dtype=float64)."""
    return make_checkpoint


def small_arena() -> CpuArena:
    """A process has addresses for some thirty arenas of the usual size, and tests make engines
    faster than they are collected.
    """
    return CpuArena(num_slots=8, slot_bytes=1 << 30)


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
    message: str = ""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    cached_tokens: int = 0
    prompt: PromptLogprobs | None = None
    vector: bytes | None = None


class Driver:
    """Calls the engine as its child would, and checks what holds for every step."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self.engine = Engine(1, Clock(), limits, small_arena())
        self.outputs: dict[str, Output] = {}
        self.first_prefills: list[FirstPrefill] = []
        self.capacity_tokens = 0
        self.most_running = 0
        self.preemptions = 0

    def load(
        self,
        checkpoint: Checkpoint,
        instance: str = "i",
        kv_tokens: int = 4096,
        dtype: Dtype | None = None,
        stage: Stage | None = None,
    ) -> StageRoom:
        spec, stage, dtype = (
            checkpoint.spec,
            stage or checkpoint.spec.whole,
            dtype or checkpoint.spec.dtype,
        )
        device_bytes = parameter_bytes(
            decoder_of(spec), stage, dtype
        ) + kv_tokens * spec.kv_bytes_per_token(stage, dtype)
        room = self.engine.begin_load(InstanceId(instance), spec, stage, dtype, device_bytes)
        placed = [
            self.engine.place_part(InstanceId(instance), part, checkpoint.parts[part])
            for part in room.parts
        ]
        assert [part.ready for part in placed] == [False] * (len(placed) - 1) + [True]
        self.capacity_tokens += room.kv_capacity_tokens
        return room

    def add(
        self,
        name: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        instance: str = "i",
        vocabulary: Vocabulary | None = None,
        **sampling: object,
    ) -> None:
        parameters = Sampling(**{"seed": 0, "max_tokens": 24, "temperature": 0.0, **sampling})
        key = RequestId(name), 1, InstanceId(instance)
        self.engine.add(*key, prompt_ids, output_ids, parameters, vocabulary=vocabulary)
        self.outputs[name] = Output(list(output_ids))

    def step(self) -> StepResult:
        result = self.engine.step()
        for produced in result.produced:
            output = self.outputs[produced.request_id]
            assert output.finish is None, "nothing follows a finish"
            assert produced.position == len(output.token_ids)
            output.token_ids.extend(produced.token_ids)
            output.logprobs.extend(produced.logprobs or ())
            output.top_logprobs.extend(produced.top_logprobs or ())
            output.cached_tokens += produced.cached_tokens
            assert output.prompt is None or produced.prompt is None, "it is told once"
            output.prompt = output.prompt or produced.prompt
            output.vector = output.vector or produced.vector
            output.finish, output.code, output.message = (
                produced.finish,
                produced.code,
                produced.message,
            )
        self.first_prefills.extend(result.first_prefills)
        self.most_running = max(self.most_running, result.running)
        self.preemptions += result.preemptions
        assert 0 <= result.kv_free_tokens <= self.capacity_tokens
        return result

    def finish(self) -> dict[str, list[int]]:
        """Steps to the end of all requests; their tokens."""
        deadline = monotonic() + FINISH_S
        while self.engine.has_work:
            assert monotonic() < deadline, f"no end after {FINISH_S} s: {self.outputs}"
            result = self.step()
            if not self.engine.has_work:
                assert (result.waiting, result.running) == (0, 0)
                assert result.kv_free_tokens == self.capacity_tokens
        assert all(output.finish is not None for output in self.outputs.values())
        return {name: output.token_ids for name, output in self.outputs.items()}


@pytest.fixture(scope="session")
def driver() -> Callable[..., Driver]:
    """driver(limits=None)."""
    return Driver


class Chain:
    """The ranges of one model, run by hand: what a pipeline group does, without its transport."""

    def __init__(self, checkpoint: Checkpoint, num_ranges: int, num_blocks: int = 64) -> None:
        spec, size = checkpoint.spec, NUM_LAYERS // num_ranges
        self.spec = spec
        self.arena = small_arena()
        self.runners: list[RangeRunner] = []
        for start in range(0, NUM_LAYERS, size):
            stage = Stage(start, start + size)
            decoder = decoder_of(spec)
            memory = StageMemory(self.arena, decoder, stage, spec.dtype)
            parameters = Parameters(memory)
            for part in parameters.parts:
                parameters.place(part, checkpoint.parts[part], Clock())
            self.runners.append(RangeRunner(memory, parameters, KvCache(memory, num_blocks)))

    def run(self, segments: Sequence[Segment], token_ids: Sequence[int]) -> torch.Tensor:
        batch, state = Batch(tuple(segments)), torch.tensor(token_ids)
        for runner in self.runners:
            state = runner.run(batch, state)
        return state

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """All prompts in one batch, then one token of each a step."""
        return [output for output, _ in self.greedy_with_logits(prompts, num_tokens)]

    def greedy_with_logits(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[list[int], torch.Tensor]]:
        """The same, each with its logits [num_tokens, vocab_size]."""
        rows = [list(prompt) for prompt in prompts]
        per_row = blocks_for(max(map(len, rows)) + num_tokens)
        blocks = [tuple(range(row * per_row, (row + 1) * per_row)) for row in range(len(rows))]
        computed = [0] * len(rows)
        steps: list[torch.Tensor] = []
        for _ in range(num_tokens):
            segments = [
                Segment(done, len(row) - done, mine, True)
                for row, done, mine in zip(rows, computed, blocks, strict=True)
            ]
            steps.append(
                self.run(
                    segments,
                    [
                        token_id
                        for row, done in zip(rows, computed, strict=True)
                        for token_id in row[done:]
                    ],
                )
            )
            computed = [len(row) for row in rows]
            for row, token_id in zip(rows, steps[-1].argmax(dim=-1).tolist(), strict=True):
                row.append(token_id)
        outputs = (row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True))
        return list(zip(outputs, torch.stack(steps, dim=1), strict=True))


@pytest.fixture
def chain() -> Callable[..., Chain]:
    """chain(checkpoint, num_ranges, num_blocks=64)."""
    return Chain


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Four prompts of mixed lengths: less than a block, more than one, several, a single token."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(SIZES["vocab_size"], (length,), generator=generator).tolist()
        for length in (5, 23, 70, 1)
    ]


FIRST_DIFFERENCES = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture
def first_differences(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Where outputs in narrow dtypes leave transformers', by dtype; an empty string for one that
    does not.

    Reported at the end.
    """
    return request.config.stash.setdefault(FIRST_DIFFERENCES, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for dtype, found in config.stash.get(FIRST_DIFFERENCES, {}).items():
        differences = [where for where in found if where]
        terminalreporter.write_line(
            f"{dtype}: {len(differences)} of {len(found)} outputs differ from transformers', all at near ties: "
            f"{'; '.join(differences) or 'none'}"
        )
