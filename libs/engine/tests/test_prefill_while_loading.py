"""Requests on a model whose parts are still coming: as much of them runs as is in place, and their
tokens are those of a loaded model.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.scheduler import BatchLimits
from pilotlight.engine.device.copying import HostCopier
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import BadCheckpoint, StageBusy, UnknownInstance
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import FinishReason, RequestKey, Sampling

I = InstanceId("i")  # noqa: E741
KV_TOKENS = 1024
MAX_TOKENS = 5
PARTS = 6
"""Embedding, four layers, head."""
PROMPTS = [
    [(7 * index + shift) % 199 for index in range(length)]
    for shift, length in ((0, 40), (0, 37), (3, 5), (11, 1))
]
"""The first two begin alike."""


def device_bytes(checkpoint, blocks: int) -> int:
    spec = checkpoint.spec
    return parameter_bytes(
        decoder_of(spec), spec.whole, spec.dtype
    ) + 16 * blocks * spec.kv_bytes_per_token(spec.whole, spec.dtype)


def begin(runs, checkpoint, blocks: int = KV_TOKENS // 16) -> None:
    """Starts a load of which no part has come yet."""
    spec = checkpoint.spec
    room = runs.engine.begin_load(I, spec, spec.whole, spec.dtype, device_bytes(checkpoint, blocks))
    assert len(room.parts) == PARTS
    runs.capacity_tokens += room.kv_capacity_tokens


def place(runs, checkpoint, *parts: int) -> None:
    for part in parts:
        runs.engine.place_part(I, part, checkpoint.parts[part])


@cache
def alone(driver, checkpoint, kind: str, prompt: int) -> list[int]:
    """What a loaded model says, alone on its engine."""
    runs = driver()
    runs.load(checkpoint(kind), kv_tokens=KV_TOKENS)
    runs.add("alone", PROMPTS[prompt], max_tokens=MAX_TOKENS)
    return runs.finish()["alone"]


@pytest.fixture
def layers_run(monkeypatch):
    """Layers in the order in which a decoder ran them."""
    layers: list[int] = []

    def noted(checkpoint) -> list[int]:
        kind = type(decoder_of(checkpoint.spec))
        whole = kind.layer

        def layer(self, number, *rest):
            layers.append(number)
            return whole(self, number, *rest)

        monkeypatch.setattr(kind, "layer", layer)
        return layers

    return noted


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("step_tokens", [512, 16])
def test_layers_run_as_their_parts_come_and_tokens_are_those_of_transformers(
    kind, step_tokens, driver, checkpoint, layers_run
):
    model = checkpoint(kind)
    runs, ran = driver(BatchLimits(step_tokens=step_tokens, running=4)), layers_run(model)
    begin(runs, model)
    for index, prompt in enumerate(PROMPTS):
        runs.add(str(index), prompt, max_tokens=MAX_TOKENS)
    for part in range(PARTS - 1):
        place(runs, model, part)
        assert runs.engine.has_work == (0 < part < PARTS - 2), "the last layer runs with the head"
        while runs.engine.has_work:
            assert runs.step().turn_of == I
        assert ran == list(range(min(part, PARTS - 3))), "each layer as soon as it can, and once"
        assert not any(output.token_ids for output in runs.outputs.values())
    place(runs, model, PARTS - 1)
    outputs = runs.finish()
    assert ran[:4] == [0, 1, 2, 3]
    for index, prompt in enumerate(PROMPTS):
        assert outputs[str(index)] == model.greedy(prompt, MAX_TOKENS)
    assert [first.instance_id for first in runs.first_prefills] == [I]


def test_waiting_for_parts_is_no_work(driver, checkpoint):
    model, runs = checkpoint("llama"), driver()
    begin(runs, model)
    assert not runs.engine.has_work
    runs.add("a", PROMPTS[0])
    assert runs.engine.serves(I)
    assert not runs.engine.has_work
    place(runs, model, 0, 5, 2)
    assert not runs.engine.has_work, "the first layer is missing"
    place(runs, model, 1)
    assert runs.engine.has_work
    runs.step()
    assert not runs.engine.has_work
    place(runs, model, 4)
    assert not runs.engine.has_work
    idle = runs.step()
    assert (idle.produced, idle.turn_of, idle.running) == ((), None, 1)
    assert runs.engine.due_s is None


def test_another_model_steps_meanwhile(driver, checkpoint, prompts):
    model, other = checkpoint("llama"), checkpoint("qwen2")
    runs = driver()
    begin(runs, model)
    runs.load(other, "other")
    runs.add("waits", PROMPTS[0], max_tokens=MAX_TOKENS)
    runs.add("streams", prompts[1], instance="other", max_tokens=12)
    for part in range(PARTS):
        place(runs, model, part)
        for _ in range(2):
            runs.step()
    assert len(runs.outputs["streams"].token_ids) >= 8, (
        "a model that loads takes no turn for nothing"
    )
    outputs = runs.finish()
    assert outputs == {
        "waits": model.greedy(PROMPTS[0], MAX_TOKENS),
        "streams": other.greedy(prompts[1], 12),
    }


@pytest.mark.parametrize("how", ["abort", "deadline", "release"])
@pytest.mark.parametrize("placed", range(PARTS))
def test_who_leaves_in_the_middle_of_a_load_is_gone_at_once(how, placed, driver, checkpoint):
    model, runs = checkpoint("llama"), driver()
    begin(runs, model)
    runs.add("stays", PROMPTS[0], max_tokens=MAX_TOKENS)
    sampling = Sampling(seed=0, max_tokens=MAX_TOKENS, temperature=0.0)
    runs.engine.add(
        RequestId("leaves"),
        1,
        I,
        PROMPTS[1],
        (),
        sampling,
        deadline_s=10.0 if how == "deadline" else None,
    )
    runs.outputs["leaves"] = type(runs.outputs["stays"])([])
    for part in range(placed):
        place(runs, model, part)
        if runs.engine.has_work:
            runs.step()
    if how == "abort":
        runs.engine.abort(RequestId("leaves"), 1)
    elif how == "release":
        assert runs.engine.release(RequestId("leaves"), 1).output_ids == ()
        runs.outputs["leaves"].finish = FinishReason.CANCELLED
    else:
        assert runs.engine.due_s == 10.0
        while not runs.engine.has_work:  # each look at this clock takes a millisecond
            pass
        assert runs.engine.due_s == 10.0
    runs.step()
    left = runs.outputs["leaves"]
    assert (left.finish, left.code) == (
        (FinishReason.ERROR, "deadline_exceeded")
        if how == "deadline"
        else (FinishReason.CANCELLED, "")
    )
    assert runs.engine.due_s is None
    place(runs, model, *range(placed, PARTS))
    outputs = runs.finish()
    assert (outputs["stays"], outputs["leaves"]) == (model.greedy(PROMPTS[0], MAX_TOKENS), [])


def test_a_batch_that_everybody_has_left_is_dropped(driver, checkpoint, layers_run):
    model, runs = checkpoint("llama"), driver()
    ran = layers_run(model)
    begin(runs, model)
    runs.add("leaves", PROMPTS[0])
    place(runs, model, 0, 1, 2)
    runs.step()
    runs.engine.abort(RequestId("leaves"), 1)
    assert runs.finish() == {"leaves": []}
    runs.add("comes", PROMPTS[2], max_tokens=1)
    assert runs.engine.has_work, "a new batch begins with the first layer"
    place(runs, model, 3, 4, 5)
    assert runs.finish()["comes"] == model.greedy(PROMPTS[2], 1)
    assert ran == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("how", ["bad part", "dropped"])
@pytest.mark.parametrize("placed", range(PARTS - 1))
def test_a_load_that_fails_ends_its_requests_with_an_error_that_can_be_retried(
    how, placed, driver, checkpoint
):
    model, runs = checkpoint("llama"), driver()
    begin(runs, model)
    runs.add("a", PROMPTS[0])
    runs.add("b", PROMPTS[3])
    for part in range(placed):
        place(runs, model, part)
        if runs.engine.has_work:
            runs.step()
    with pytest.raises(StageBusy):
        runs.engine.unload(I)
    if how == "dropped":
        runs.engine.drop(I)
    else:
        with pytest.raises(BadCheckpoint):
            runs.engine.place_part(I, placed, model.parts[(placed + 1) % PARTS])
    runs.step()
    for output in runs.outputs.values():
        assert (output.token_ids, output.finish, output.code) == (
            [],
            FinishReason.ERROR,
            "not_loaded",
        )
    assert not runs.engine.has_work
    assert runs.engine.backed_bytes == 0


def test_a_moved_request_needs_a_loaded_model(driver, checkpoint):
    model, source, target = checkpoint("llama"), driver(), driver()
    source.load(model)
    source.add("moves", PROMPTS[0])
    source.step()
    pieces = source.engine.export_kv(I, [RequestKey(RequestId("moves"), 1)], model.spec.whole)
    begin(target, model)
    sampling = Sampling(seed=0, max_tokens=MAX_TOKENS, temperature=0.0)
    with pytest.raises(UnknownInstance, match="still loading"):
        target.engine.add(RequestId("moves"), 1, I, PROMPTS[0], (), sampling, pieces=pieces)
    assert not target.engine.export_kv(I, [RequestKey(RequestId("moves"), 1)], model.spec.whole)


@pytest.fixture
def under_way(driver, checkpoint):
    """An engine with few blocks, whose last parts are in place; ``leaves`` has just left the batch
    that was waiting for them.
    """
    model, runs = checkpoint("llama"), driver(BatchLimits(prefix_cache=False))
    begin(runs, model, blocks=6)
    runs.add("leaves", PROMPTS[0])
    runs.add("stays", PROMPTS[2], max_tokens=MAX_TOKENS)
    place(runs, model, 0, 1)
    runs.step()
    place(runs, model, *range(2, PARTS))
    runs.engine.abort(RequestId("leaves"), 1)
    return runs


def test_blocks_of_one_who_left_the_batch_are_not_written_when_another_has_them(
    under_way, driver, checkpoint
):
    model, source, prompt = (
        checkpoint("llama"),
        driver(),
        [(11 * index + 5) % 199 for index in range(60)],
    )
    source.load(model)
    source.add("moves", prompt, max_tokens=MAX_TOKENS)
    source.step()
    key = RequestKey(RequestId("moves"), 1)
    pieces = source.engine.export_kv(I, [key], model.spec.whole)
    sampling = Sampling(seed=0, max_tokens=MAX_TOKENS, temperature=0.0)
    output_ids = source.outputs["moves"].token_ids
    under_way.engine.add(RequestId("moves"), 1, I, prompt, output_ids, sampling, pieces=pieces)
    under_way.outputs["moves"] = type(under_way.outputs["stays"])(list(output_ids))
    under_way.step()
    (after,) = under_way.engine.export_kv(I, [key], model.spec.whole)
    assert torch.equal(after.keys_and_values[:, :, : len(prompt)], pieces[0].keys_and_values)
    outputs = under_way.finish()
    assert outputs["moves"] == model.greedy(prompt, MAX_TOKENS)
    assert outputs["stays"] == model.greedy(PROMPTS[2], MAX_TOKENS)


def test_blocks_that_move_are_not_written_where_they_were(under_way, checkpoint):
    model = checkpoint("llama")
    under_way.capacity_tokens = under_way.engine.resize(
        I, device_bytes(model, 2)
    ).kv_capacity_tokens
    under_way.add("comes", PROMPTS[3], max_tokens=MAX_TOKENS)
    outputs = under_way.finish()
    assert outputs["stays"] == model.greedy(PROMPTS[2], MAX_TOKENS)
    assert outputs["comes"] == model.greedy(PROMPTS[3], MAX_TOKENS)


MOVES = st.one_of(
    st.tuples(st.just("part"), st.integers(0, PARTS - 1)),
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("other"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("resize"), st.integers(8, 64)),
    st.tuples(st.just("moved in"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


KINDS = {"i": "qwen3-moe", "other": "llama"}


class Life:
    """One engine with a model that is loaded, and one whose parts come in any order, while requests
    come and go.
    """

    def __init__(self, driver, checkpoint, step_tokens: int, *, prefix_cache: bool) -> None:
        limits = BatchLimits(
            step_tokens=step_tokens, running=min(4, step_tokens), prefix_cache=prefix_cache
        )
        self.driver, self.runs = driver, driver(limits)
        self.models = {instance: checkpoint(kind) for instance, kind in KINDS.items()}
        begin(self.runs, self.models["i"])
        self.runs.load(self.models["other"], "other", kv_tokens=KV_TOKENS)
        self.runs.capacity_tokens = 1 << 30
        self.asked: dict[str, tuple[str, int]] = {}

    @property
    def engine(self) -> Engine:
        return self.runs.engine

    def take(self, what: str, number: int) -> None:
        match what:
            case "part":
                place(self.runs, self.models["i"], number)
            case "add" | "other":
                self.add("i" if what == "add" else "other", number)
            case "abort" if number < len(self.asked):
                name = list(self.asked)[number]
                self.engine.abort(RequestId(name), 1)
                self.step()
                assert self.runs.outputs[name].finish is not None, "obeyed within a step"
            case "resize":
                self.engine.resize(I, device_bytes(self.models["i"], number))
            case "moved in" if self.engine._stages[I].complete:
                self.move_in(number)
            case "step":
                for _ in range(number):
                    self.step()
            case _:
                """There is no request yet, or it is too early."""
        self.check()

    def add(self, instance: str, prompt: int) -> None:
        name = str(len(self.asked))
        self.asked[name] = instance, prompt
        self.runs.add(name, PROMPTS[prompt], instance=instance, max_tokens=MAX_TOKENS)

    def move_in(self, prompt: int) -> None:
        """A request that ran elsewhere takes blocks at once, maybe those of one that has just left
        the batch under way.
        """
        source = self.driver()
        source.load(self.models["i"])
        source.add("moves", PROMPTS[prompt], max_tokens=MAX_TOKENS)
        source.step()
        pieces = source.engine.export_kv(
            I, [RequestKey(RequestId("moves"), 1)], self.models["i"].spec.whole
        )
        name = str(len(self.asked))
        pieces = [replace(piece, key=RequestKey(RequestId(name), 1)) for piece in pieces]
        output_ids = source.outputs["moves"].token_ids
        if (
            self.engine._stages[I].scheduler.running < 4
            and self.engine._stages[I].scheduler.kv_free_tokens >= 16 * 8
        ):
            self.asked[name] = "i", prompt
            sampling = Sampling(seed=0, max_tokens=MAX_TOKENS, temperature=0.0)
            self.engine.add(
                RequestId(name), 1, I, PROMPTS[prompt], output_ids, sampling, pieces=pieces
            )
            self.runs.outputs[name] = type(source.outputs["moves"])(list(output_ids))

    def step(self) -> None:
        if self.engine.has_work:
            self.runs.step()

    def check(self) -> None:
        for stage in self.engine._stages.values():
            stage.scheduler._tables.check()


@settings(deadline=None, max_examples=60)
@given(
    moves=st.lists(MOVES, min_size=6, max_size=40),
    step_tokens=st.sampled_from((7, 16, 64)),
    prefix_cache=st.booleans(),
)
def test_tokens_do_not_depend_on_when_parts_come(
    driver, checkpoint, moves, step_tokens, prefix_cache
):
    life = Life(driver, checkpoint, step_tokens, prefix_cache=prefix_cache)
    for what, number in moves:
        life.take(what, number)
    place(life.runs, life.models["i"], *range(PARTS))
    while life.engine.has_work:
        life.step()
    for name, (instance, prompt) in life.asked.items():
        output = life.runs.outputs[name]
        expected = alone(driver, checkpoint, KINDS[instance], prompt)
        whole = output.finish is FinishReason.LENGTH
        assert output.token_ids == (expected if whole else expected[: len(output.token_ids)])
        assert whole or output.finish is FinishReason.CANCELLED


def test_parts_that_nobody_waits_for_give_way_to_batches(driver, checkpoint, monkeypatch):
    gave_way: list[bool] = []
    fill = HostCopier.fill

    def watched(self, stored, monotonic_s, *, last, background=False):
        gave_way.append(background)
        return fill(self, stored, monotonic_s, last=last, background=background)

    runs, model = driver(), checkpoint("llama")
    runs.load(model, instance="other")
    monkeypatch.setattr(HostCopier, "fill", watched)
    begin(runs, model)
    place(runs, model, 0)
    runs.add("theirs", PROMPTS[0], instance="other")
    place(runs, model, 1)
    runs.add("ours", PROMPTS[0])
    place(runs, model, 2)
    assert gave_way == [False, True, False], "nothing else runs; something does; a request waits"
