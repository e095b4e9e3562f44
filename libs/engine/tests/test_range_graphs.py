"""Graphs of ranges of a stage's layers, without a device: their trials, what is recorded of them,
and how they come back before those of the whole model.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_models import spec_of
from restored_rig import VOCAB, WHOLE, RestoredRig, StandInSteps, settled
from torch import Tensor

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.cuda.attention_metadata import zeros_on
from pilotlight.engine.cuda.graphs import SIZES, Kind
from pilotlight.engine.cuda.prompts import LENGTHS, StaticPrompt
from pilotlight.engine.cuda.static_words import StaticDecode
from pilotlight.engine.cuda.steps import Captured, RangeSteps
from pilotlight.engine.cuda.trials import trial_hidden
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.model import Dtype, Stage

FIRST, MIDDLE, LAST = Stage(0, 1), Stage(1, 2), Stage(1, 3)
HALF = Stage(0, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hidden_states_of_a_trial_are_the_same_everywhere(dtype: torch.dtype) -> None:
    hidden = trial_hidden(512, 128, dtype)
    assert (hidden.shape, hidden.dtype) == ((512, 128), dtype)
    assert ((hidden >= -1) & (hidden <= 1)).all()
    assert len({tuple(row) for row in hidden.tolist()}) == 512, "no two rows are alike"
    assert torch.equal(trial_hidden(4, 128, dtype), hidden[:4])
    first = torch.tensor([40_503, 2 * 40_503 % 65_521], dtype=torch.float64) / 32_768 - 1
    assert torch.equal(hidden[0, :2], first.to(torch.float32).to(dtype)), "rounded once"


class StandInStage:
    """Steps that note their inputs, and add one to the hidden states that they begin with."""

    def __init__(self, held: Stage | None = None) -> None:
        spec = self.spec = spec_of("llama", Dtype.FLOAT32)
        place = zeros_on(torch.device("cpu"))
        self.memory = StageMemory(CpuArena(), decoder_of(spec), held or spec.whole, spec.dtype, 0)
        self.hidden = torch.full((LENGTHS[-1], spec.hidden_size), 5.0)
        self.logits = torch.zeros(SIZES[-1], VOCAB)
        self.seen: list[Tensor] = []
        self.ran: list[tuple[Kind, int, int]] = []
        self.captured = Captured(
            spec=spec,
            memory=self.memory,
            kv=KvCache(self.memory, 4),
            decode=StaticDecode(place, SIZES[-1], 8, 64, None, pinned=False),
            prompt=StaticPrompt(place, pinned=False),
            hidden=self.hidden,
            partial=torch.zeros(1),
            proves=True,
            run=self.run,
            output=self.output,
        )

    def of(self, layers: Stage) -> RangeSteps:
        return RangeSteps(self.captured, layers)

    def run(self, kind: Kind, num_tokens: int, num_logits: int) -> Tensor:
        self.ran.append((kind, num_tokens, num_logits))
        self.seen.append(self.hidden[: kind.rows].clone())
        out = self.output(kind)
        out += 1
        return out[:num_tokens].clone()

    def output(self, kind: Kind) -> Tensor:
        if kind.layers.stop < self.spec.num_layers:
            return self.hidden[: kind.rows]
        return self.logits[: 1 if kind.prompt else kind.rows]


@pytest.mark.parametrize("size", [1, 8, 256, prompt_size(16), prompt_size(512)])
def test_a_range_without_the_embedding_begins_with_hidden_states_which_are_put_back(
    size: int,
) -> None:
    stage = StandInStage()
    steps = stage.of(MIDDLE)
    found = steps.trial(size)
    rows = stage.ran[0][1]
    expected = trial_hidden(rows, stage.spec.hidden_size, torch.float32)
    assert torch.equal(stage.seen[0], expected)
    assert torch.equal(found, expected + 1), "what it gives are hidden states"
    assert (stage.hidden == 5.0).all(), "the step that waits for the proof has its inputs back"
    assert stage.ran[0] == (steps.kind_of(size), rows, 1 if size > 1000 else size)
    assert stage.ran[0][0].layers == MIDDLE


def test_a_range_with_the_embedding_alone_gives_hidden_states_which_are_put_back() -> None:
    stage = StandInStage()
    steps = stage.of(FIRST)
    assert torch.equal(steps.trial(8), torch.full((8, stage.spec.hidden_size), 6.0))
    assert (stage.hidden == 5.0).all()
    assert steps.output(8).data_ptr() == stage.hidden.data_ptr()
    assert steps.output(prompt_size(64)).shape == (64, stage.spec.hidden_size)


def test_a_range_with_the_head_gives_logits() -> None:
    stage = StandInStage()
    steps = stage.of(LAST)
    steps.trial(8)
    assert torch.equal(stage.seen[0], trial_hidden(8, stage.spec.hidden_size, torch.float32))
    assert steps.output(8).data_ptr() == stage.logits.data_ptr()
    assert steps.output(prompt_size(64)).shape == (1, VOCAB)


def test_rows_beyond_a_models_context_are_not_compared() -> None:
    """Nobody says what padding comes to."""
    stage = StandInStage()
    spec = replace(stage.spec, max_context_tokens=3 * BLOCK_TOKENS)
    short = RangeSteps(replace(stage.captured, spec=spec), FIRST)
    assert short.output(prompt_size(64)).shape[0] == 3 * BLOCK_TOKENS
    assert short.output(64).shape[0] == 64, "each row is a request of its own"


def test_places_are_those_of_the_whole_model_whatever_the_range() -> None:
    stage = StandInStage()
    first, whole = stage.of(MIDDLE), stage.of(stage.spec.whole)
    assert first.places == whole.places
    assert first.logits().data_ptr() == whole.logits().data_ptr() == stage.logits.data_ptr()
    assert first.places.keys() == {"metadata", "hidden", "partial", "prompt"}


@pytest.mark.parametrize(
    ("held", "present"), [(Stage(0, 3), True), (Stage(1, 3), True), (FIRST, False)]
)
def test_steps_are_present_where_the_stage_has_memory_for_their_layers(
    held: Stage, present: bool
) -> None:
    assert StandInStage(held).of(LAST).present is present


class Grows:
    """A stage that has half of a model, and graphs of both."""

    def __init__(self) -> None:
        self.whole = RestoredRig((1, 2), prompts=(16,), later=True)
        self.whole.steps.present = False
        half = StandInSteps(HALF)
        self.half = RestoredRig((1, 4), prompts=(16,), steps=half, layers=HALF)
        self.half.steps.others = {HALF: half, WHOLE: self.whole.steps}
        self.half.behind = self.whole.plan_alone()
        self.half.begin()

    def grown(self) -> None:
        self.whole.steps.present = True
        assert self.half.plan is not None
        self.half.plan.extended()

    def supply(self, rows: int, layers: Stage, *, prompt: bool = False) -> Any:
        return self.half.supply(rows, layers, prompt=prompt)

    @property
    def news(self) -> tuple[int, int, str]:
        assert self.half.plan is not None
        told = self.half.plan.news
        return told.ready, told.proved, told.refused


@pytest.fixture
def grows() -> Iterator[Grows]:
    made = Grows()
    yield made
    made.whole.device.go()
    made.half.end()


def test_a_half_has_its_own_graphs_and_then_those_of_the_whole_model(grows: Grows) -> None:
    grows.half.device.go()
    grows.whole.device.go()
    settled(grows.half)
    assert grows.half.device.built == [1, 4, prompt_size(16)]
    assert grows.whole.device.built == [], "it is no whole model yet"
    assert grows.supply(4, HALF) is not None
    assert grows.news == (3, 1, "")
    assert grows.supply(2, WHOLE) is None
    assert grows.supply(1, Stage(0, 1)) is None
    assert grows.whole.capture.asked == [Kind(WHOLE, 2), Kind(Stage(0, 1), 1)]
    grows.grown()
    settled(grows.whole)
    assert grows.supply(2, WHOLE) is not None
    assert grows.supply(1, HALF) is not None, "it runs its half until it takes over"
    assert grows.news == (6, 3, "")
    assert grows.half.capture.asked == [], "what is behind captures"


def test_what_a_half_and_then_the_whole_model_ran_is_counted_together(grows: Grows) -> None:
    grows.half.graph_set.uses = {Kind(HALF, 4): 2, Kind(HALF, 1): 5, Kind(WHOLE, 1): 7}
    assert grows.half.plan is not None
    assert grows.half.plan.uses == {1: 12, 4: 2}


def test_a_prompt_waits_for_the_parts_of_the_half_that_has_its_graph(grows: Grows) -> None:
    assert grows.half.plan is not None
    assert grows.half.plan.expect(16) is True
    assert grows.half.plan.expect(40) is False
    grows.half.device.go()
    settled(grows.half)
    built = grows.half.device.built
    assert built.index(prompt_size(16)) < built.index(4), "one may be under way already"


def test_a_half_whose_graphs_are_refused_has_the_whole_models_when_it_is_that() -> None:
    made = Grows.__new__(Grows)
    made.whole = RestoredRig((1, 2), later=True)
    made.whole.steps.present = False
    half = StandInSteps(HALF)
    made.half = RestoredRig((1, 4), steps=half, layers=HALF)
    made.half.layout = replace(made.half.layout, slot=4)
    half.others = {HALF: half, WHOLE: made.whole.steps}
    made.half.behind = made.whole.plan_alone()
    made.half.begin()
    made.whole.device.go()
    assert made.news == (0, 0, "slot")
    assert made.supply(4, HALF) is None
    made.grown()
    settled(made.whole)
    assert made.supply(2, WHOLE) is not None
    assert made.news == (2, 1, "slot")
    made.half.end()
    assert made.whole.device.closed
    assert made.half.device.closed
