"""A stage's captured steps: what they read and write, and trials of them (``cuda.trials``), of any
range of its layers.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.engine.cuda.graphs import SIZES, Kind
from pilotlight.engine.cuda.prompts import StaticPrompt
from pilotlight.engine.cuda.static_words import StaticDecode
from pilotlight.engine.cuda.trials import trial_hidden
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.policy.graphs.restoring import PROMPTS
from pilotlight.policy.model import ModelSpec, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What runs captured steps of a stage, and where."""

    spec: ModelSpec
    memory: StageMemory
    kv: KvCache
    decode: StaticDecode
    prompt: StaticPrompt | None
    hidden: Tensor
    """Hidden states, [rows, hidden size]: what a range begins with that has no embedding, and what
    one gives that has no head."""
    partial: Tensor
    proves: bool
    """Trials can be run."""
    run: Callable[[Kind, int, int], Tensor]
    """Runs a step of a kind on what is filled in; what it gives of so many rows, of which so many
    have logits."""
    output: Callable[[Kind], Tensor]
    """Where captured steps of a kind leave what they give."""


class RangeSteps:
    """See ``StageSteps``: the steps of one range."""

    def __init__(self, stage: Captured, layers: Stage) -> None:
        """Those of a stage's ``layers``, which it need not have memory for yet."""
        self.layers = layers
        self._stage = stage

    @property
    def places(self) -> Mapping[str, int]:
        """See ``StageSteps``."""
        stage = self._stage
        static = {
            "metadata": stage.decode.static.words,
            "hidden": stage.hidden,
            "partial": stage.partial,
        }
        if stage.prompt is not None:
            static["prompt"] = stage.prompt.static.words
        return {name: tensor.data_ptr() for name, tensor in static.items()}

    @property
    def has_trials(self) -> bool:
        """See ``StageSteps``."""
        return self._stage.proves

    @property
    def present(self) -> bool:
        """See ``StageSteps``."""
        return self.layers.is_within(self._stage.memory.stage)

    def logits(self) -> Tensor:
        """See ``StageSteps``."""
        return self._stage.output(Kind(self._stage.spec.whole, SIZES[-1]))

    def kind_of(self, size: int) -> Kind:
        """See ``StageSteps``."""
        prompt = size > PROMPTS
        return Kind(self.layers, size - PROMPTS if prompt else size, prompt)

    def output(self, size: int) -> Tensor:
        """See ``StageSteps``."""
        kind = self.kind_of(size)
        output = self._stage.output(kind)
        return output if self._has_head else output[: self._rows(kind)]

    @contextmanager
    def trial_inputs(self, size: int) -> Generator[None]:
        """See ``StageSteps``."""
        with self._hidden_of_trial(size), self._words_of_trial(size):
            yield

    @torch.inference_mode()
    def trial(self, size: int) -> Tensor:
        """See ``StageSteps``."""
        kind = self.kind_of(size)
        with self.trial_inputs(size):
            return self._stage.run(kind, self._rows(kind), 1 if kind.prompt else kind.rows)

    @property
    def _has_head(self) -> bool:
        return self.layers.stop == self._stage.spec.num_layers

    def _rows(self, kind: Kind) -> int:
        """Of a trial, without padding: no context is longer than the model's."""
        return min(kind.rows, self._stage.spec.max_context_tokens) if kind.prompt else kind.rows

    def _words_of_trial(self, size: int) -> AbstractContextManager[None]:
        stage, kind = self._stage, self.kind_of(size)
        if kind.prompt:
            return self._prompt_trial(self._rows(kind))
        return stage.decode.trial(kind.rows, stage.spec.vocab_size)

    @contextmanager
    def _prompt_trial(self, rows: int) -> Generator[None]:
        stage = self._stage
        assert stage.prompt is not None
        with stage.kv.first_block_kept(), stage.prompt.trial(rows, stage.spec.vocab_size):
            yield

    def _hidden_of_trial(self, size: int) -> AbstractContextManager[None]:
        if self.layers == self._stage.spec.whole:
            return nullcontext()
        return self._hidden_trial(self.kind_of(size).rows)

    @contextmanager
    def _hidden_trial(self, rows: int) -> Generator[None]:
        """Within it, hidden states are those of a trial; afterwards they are what they were: a step
        that waits for the proof of its graph has its inputs there.
        """
        hidden = self._stage.hidden[:rows]
        before = hidden.clone()
        if self.layers.start > 0:
            hidden.copy_(trial_hidden(rows, hidden.shape[1], hidden.dtype))
        try:
            yield
        finally:
            hidden.copy_(before)
