"""Requests on a model whose parts are still coming: as much of them runs as is in place, and their
tokens are those of a loaded model.
"""

from dataclasses import replace

import pytest
import torch
from coming_parts import MAX_TOKENS, PARTS, PROMPTS, I, begin, device_bytes, place
from families import FAMILIES

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.copying import HostCopier
from pilotlight.engine.errors import BadCheckpoint, StageBusy, UnknownInstance
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import FinishReason, RequestKey, Sampling


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


def test_a_prompt_alone_that_has_one_graph_waits_for_all_parts(driver, checkpoint, layers_run):
    """Graphs are of all layers; once they are refused, or another request has come, it runs as its
    parts come.
    """
    model = checkpoint("llama")
    runs, ran = driver(), layers_run(model)
    begin(runs, model)
    stage, asked, comes = runs.engine._stages[I], [], True
    stage.compute = replace(stage.compute, expect=lambda tokens: (asked.append(tokens), comes)[1])
    runs.add("a", PROMPTS[0], max_tokens=MAX_TOKENS)
    assert asked == [len(PROMPTS[0])], "as soon as it is there"
    place(runs, model, 0, 1, 2)
    assert not runs.engine.has_work
    comes = False
    assert runs.engine.has_work
    comes = True
    runs.add("b", PROMPTS[1], max_tokens=MAX_TOKENS)
    assert runs.engine.has_work, "a batch of two has no graph"
    runs.engine.abort(RequestId("b"), 1)
    runs.step()
    assert ran == []
    assert not runs.engine.has_work
    place(runs, model, *range(3, PARTS))
    outputs = runs.finish()
    assert ran[:4] == [0, 1, 2, 3]
    assert outputs["a"] == model.greedy(PROMPTS[0], MAX_TOKENS)


@pytest.mark.parametrize("first", ["a batch of two", "a prompt without a graph"])
def test_who_is_left_alone_waits_for_all_parts(first, driver, checkpoint, layers_run):
    """What had begun beside others, or before, is given up, and runs anew as one graph."""
    model = checkpoint("llama")
    runs, ran = driver(), layers_run(model)
    begin(runs, model)
    stage, alone = runs.engine._stages[I], first == "a prompt without a graph"
    known = len(PROMPTS[0])
    expect = (lambda tokens: tokens == known) if alone else (lambda _: True)
    stage.compute = replace(stage.compute, expect=expect)
    place(runs, model, 0, 1, 2)
    if not alone:
        runs.add("a", PROMPTS[0], max_tokens=MAX_TOKENS)
    runs.add("b", [*PROMPTS[1], *PROMPTS[1], *PROMPTS[1]], max_tokens=MAX_TOKENS)
    assert runs.engine.has_work
    runs.step()
    assert ran == [0, 1]
    runs.engine.abort(RequestId("b"), 1)
    if alone:
        runs.add("a", PROMPTS[0], max_tokens=MAX_TOKENS)
    for part in range(3, PARTS):
        place(runs, model, part)
        if runs.engine.has_work:
            runs.step()
    assert runs.finish()["a"] == model.greedy(PROMPTS[0], MAX_TOKENS)


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
