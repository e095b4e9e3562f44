"""Stages that grow in mid-generation: the leading stage of a pipeline takes the others' layers
over.
"""

import random
from dataclasses import replace

import pytest
from pipelines import INSTANCE, connect, cuts, staged

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.errors import BadCheckpoint, BadRequest, NoRoom, StageBusy
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import growth, lead
from pilotlight.engine.pipeline.growth import GrowthState
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason, RequestKey

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4}
KV_TOKENS = 4096


@pytest.fixture(autouse=True)
def no_looking_out(monkeypatch):
    """All stages take turns in one thread: while one waits, no other can answer."""
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)


@pytest.fixture
def one_question_at_a_time(monkeypatch):
    """Else a few layers are asked for, and handed over, in one step."""
    monkeypatch.setattr(growth, "SETTLING_AT_ONCE", 1)


@pytest.fixture(autouse=True)
def small_answers(monkeypatch):
    """Two or three blocks of a layer an answer, so that a copy takes many."""
    monkeypatch.setattr(growth, "COPY_BYTES", 3 * 2 * 16 * 2 * 12 * 8)


def bytes_of(model, stage, kv_tokens=KV_TOKENS):
    spec = model.spec
    return parameter_bytes(
        decoder_of(spec), stage, spec.dtype
    ) + kv_tokens * spec.kv_bytes_per_token(stage, spec.dtype)


def extend(pipeline, model, stop, kv_tokens=KV_TOKENS):
    """Begins; the parts that are still to be placed."""
    stage, resident = Stage(0, stop), pipeline.lead.engine._stages[INSTANCE]
    held = resident.parameters.parts
    room = pipeline.lead.engine.extend(INSTANCE, stage, bytes_of(model, stage, kv_tokens))
    return [part for part in room.parts if part not in held]


def grow(pipeline, model, stop, between=lambda: None, kv_tokens=KV_TOKENS):
    """From the first part to the longer range, with other work between any two steps."""
    for part in extend(pipeline, model, stop, kv_tokens):
        between()
        pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    results = steps_until(pipeline, lambda: range_of(pipeline) == Stage(0, stop), between)
    assert [(grown.instance_id, grown.stage) for result in results for grown in result.grown] == [
        (INSTANCE, Stage(0, stop))
    ]


def range_of(pipeline):
    return pipeline.lead.engine._stages[INSTANCE].stage


def steps_until(pipeline, done, between=lambda: None):
    """Steps in random turns until it holds; what the steps gave."""
    results = []
    for _ in range(20_000):
        if done():
            return results
        between()
        busy = [driver for driver in pipeline.drivers if driver.engine.has_work]
        if busy:
            results.append(pipeline.chance.choice(busy).step())
            pipeline.lost.extend(results[-1].lost)
    raise AssertionError("it does not come to an end")


def some_tokens(pipeline, name, count):
    pipeline.run_until(lambda: len(pipeline.lead.outputs[name].token_ids) >= count)


@pytest.mark.parametrize(
    "stages", [cuts(4, 2), cuts(4, 4), [Stage(0, 1), Stage(1, 3), Stage(3, 4)]], ids=len
)
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma3", "qwen3-moe"])
def test_a_stage_grows_layer_by_layer_while_it_generates(kind, stages, checkpoint, driver, prompts):
    model = checkpoint(kind, 1)
    pipeline = staged(driver, model, stages, limits=BatchLimits(step_tokens=24, running=24))
    for index, prompt in enumerate(prompts):
        pipeline.lead.add(str(index), prompt, max_tokens=170)
    for stop in range(stages[0].stop + 1, 5):
        count = len(pipeline.lead.outputs["2"].token_ids)
        some_tokens(pipeline, "2", count + 5)
        grow(pipeline, model, stop)
    assert all(output.finish is None for output in pipeline.lead.outputs.values()), (
        "they grew in mid-generation"
    )
    left = steps_until(
        pipeline,
        lambda: all(runs.engine._stages[INSTANCE].pipeline is None for runs in pipeline.drivers),
    )
    assert sum(len(result.left) for result in left) == len(stages) - 1
    assert not pipeline.lost
    for runs in pipeline.drivers[1:]:
        runs.engine.unload(INSTANCE)
        assert runs.engine.backed_bytes == 0
    pipeline.lead.add("late", prompts[0], max_tokens=20)
    outputs = pipeline.finish()
    for index, prompt in enumerate(prompts):
        assert len(outputs[str(index)]) == 170
        assert outputs[str(index)] == model.would_say(prompt, outputs[str(index)])
    assert outputs["late"] == model.greedy(prompts[0], 20)


def test_what_was_computed_is_not_computed_again(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("a", prompts[2], max_tokens=40)
    some_tokens(pipeline, "a", 5)
    grow(pipeline, model, 4)
    assert pipeline.lead.step().batch_tokens == 1
    assert pipeline.finish()["a"] == model.greedy(prompts[2], 40)


def test_batches_run_while_parts_and_blocks_come(checkpoint, driver, prompts):
    """The pipeline stops for what was written last alone: tokens come in every state but the last
    two.
    """
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("a", prompts[2], max_tokens=150)
    some_tokens(pipeline, "a", 3)
    tokens_in: dict[GrowthState, int] = {}
    resident = pipeline.lead.engine._stages[INSTANCE]
    for part in extend(pipeline, model, 4):
        pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    while (growing := resident.pipeline) is not None:
        state = growing._growth.state
        before = len(pipeline.lead.outputs["a"].token_ids)
        pipeline.step()
        tokens_in[state] = (
            tokens_in.get(state, 0) + len(pipeline.lead.outputs["a"].token_ids) - before
        )
    assert tokens_in[GrowthState.COPYING] >= 3
    assert (
        tokens_in.get(GrowthState.SETTLING, 0) + tokens_in.get(GrowthState.HANDING_OVER, 0) <= 2
    ), "those under way"
    assert pipeline.finish()["a"] == model.greedy(prompts[2], 150)


@pytest.mark.parametrize("seed", range(6))
def test_requests_come_go_share_and_are_preempted_while_a_stage_grows(
    seed, checkpoint, driver, prompts
):
    model, chance = checkpoint("llama", 2), random.Random(seed)
    limits = BatchLimits(step_tokens=40, running=8)
    settings = {
        str(index): {"seed": index % 5, **SAMPLED, "max_tokens": 30 + index} for index in range(18)
    }
    # Some share a prefix of several blocks.
    prompt_of = {
        name: [*prompts[2], *prompts[int(name) % 4]] if int(name) % 2 else prompts[int(name) % 4]
        for name in settings
    }
    expected = {}
    for name, sampling in settings.items():
        alone = driver()
        alone.load(model)
        alone.add(name, prompt_of[name], **sampling)
        expected |= alone.finish()
    stages = chance.choice([cuts(4, 2), cuts(4, 4), [Stage(0, 1), Stage(1, 3), Stage(3, 4)]])
    pipeline = staged(driver, model, stages, seed=seed, limits=limits, kv_tokens=400)
    waiting = sorted(settings, key=lambda name: chance.random())
    cancelled = set(chance.sample(sorted(settings), 3))

    def disturb():
        if waiting and chance.random() < 0.1:
            name = waiting.pop()
            pipeline.lead.add(name, prompt_of[name], **settings[name])
        running = [name for name, output in pipeline.lead.outputs.items() if output.finish is None]
        if (leaving := cancelled.intersection(running)) and chance.random() < 0.05:
            pipeline.lead.engine.abort(RequestId(sorted(leaving)[0]), 1)

    stop = stages[0].stop
    while stop < 4:
        stop = chance.randrange(stop + 1, 5)
        for _ in range(chance.randrange(60)):
            disturb()
            pipeline.step()
        grow(pipeline, model, stop, disturb, kv_tokens=400)
    while waiting:
        disturb()
    outputs = pipeline.finish()
    assert outputs.keys() == expected.keys()
    for name, tokens in expected.items():
        if pipeline.lead.outputs[name].finish is FinishReason.CANCELLED:
            assert outputs[name] == tokens[: len(outputs[name])]
        else:
            assert outputs[name] == tokens


@pytest.mark.usefixtures("one_question_at_a_time")
@pytest.mark.parametrize("state", GrowthState)
def test_a_request_moves_in_with_its_kv_while_the_stage_grows(state, checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    elsewhere = driver()
    elsewhere.load(model)
    elsewhere.add("b", prompts[1], max_tokens=60)
    while len(elsewhere.outputs["b"].token_ids) < 12:
        elsewhere.step()
    key = RequestKey(RequestId("b"), 1)
    pieces = elsewhere.engine.export_kv(INSTANCE, [key], model.spec.whole)
    released = elsewhere.engine.release(*key)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("a", prompts[2], max_tokens=120)
    some_tokens(pipeline, "a", 3)
    parts = extend(pipeline, model, 4)
    resident = pipeline.lead.engine._stages[INSTANCE]
    if state is not GrowthState.PLACING:
        for part in parts:
            pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    steps_until(pipeline, lambda: resident.pipeline._growth.state is state)
    pipeline.lead.outputs["b"] = elsewhere.outputs["b"]
    moved = released.prompt_ids, released.output_ids, released.sampling, None, pieces
    pipeline.lead.engine.add(key.request_id, 1, INSTANCE, *moved)
    if state is GrowthState.PLACING:
        for part in parts:
            pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    outputs = pipeline.finish()
    assert resident.pipeline is None
    assert outputs == {"a": model.greedy(prompts[2], 120), "b": model.greedy(prompts[1], 60)}


@pytest.mark.usefixtures("one_question_at_a_time")
@pytest.mark.parametrize("state", GrowthState)
def test_the_leader_goes_on_alone_when_another_stage_dies_before_it_has_everything(
    state, checkpoint, driver, prompts
):
    """Its requests run again from their tokens; none ends."""
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, [Stage(0, 1), Stage(1, 3), Stage(3, 4)])
    pipeline.lead.add("a", prompts[2], max_tokens=60)
    pipeline.lead.add("b", prompts[1], **SAMPLED, max_tokens=60, seed=4)
    some_tokens(pipeline, "a", 3)
    parts = extend(pipeline, model, 4)
    resident = pipeline.lead.engine._stages[INSTANCE]
    early = parts[:2] if state is GrowthState.PLACING else parts
    for part in early:
        pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    steps_until(pipeline, lambda: resident.pipeline._growth.state is state)
    dead = pipeline.drivers.pop(pipeline.chance.choice([1, 2]))
    dead.engine.drop(INSTANCE)
    steps_until(pipeline, lambda: resident.pipeline is None)
    assert {lost.code for lost in pipeline.lost} == {
        "worker_lost"
    } or state is GrowthState.HANDING_OVER
    assert range_of(pipeline) == model.spec.whole
    assert pipeline.lead.engine.serves(INSTANCE)
    for part in parts[len(early) :]:
        steps_until(pipeline, lambda: not pipeline.lead.engine.has_work)
        pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    outputs = pipeline.finish()
    alone = driver()
    alone.load(model)
    alone.add("b", prompts[1], **SAMPLED, max_tokens=60, seed=4)
    assert outputs == {"a": model.greedy(prompts[2], 60), **alone.finish()}


def test_a_leader_that_is_to_have_a_part_of_the_model_loses_its_requests(
    checkpoint, driver, prompts
):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("a", prompts[2], max_tokens=60)
    some_tokens(pipeline, "a", 3)
    extend(pipeline, model, 3)
    pipeline.drivers.pop().engine.drop(INSTANCE)
    tokens = pipeline.finish()["a"]
    ended = pipeline.lead.outputs["a"]
    assert (ended.finish, ended.code) == (FinishReason.ERROR, "worker_lost")
    for part in (3,):
        pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    assert [grown.stage for grown in pipeline.lead.step().grown] == [Stage(0, 3)]

    # What it has now joins another one, and the request goes on.
    fresh = driver()
    fresh.load(model, INSTANCE, stage=Stage(3, 4))
    again = connect([pipeline.lead, fresh], random.Random(1))
    again.lead.add("resumed", prompts[2], tokens, max_tokens=60)
    assert again.finish()["resumed"] == model.greedy(prompts[2], 60)


def test_parts_that_cannot_be_used_end_the_growth_alone(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("a", prompts[2], max_tokens=40)
    some_tokens(pipeline, "a", 3)
    backed_bytes = pipeline.lead.engine.backed_bytes
    parts = extend(pipeline, model, 4)
    pipeline.lead.engine.place_part(INSTANCE, parts[0], model.parts[parts[0]])
    with pytest.raises(BadCheckpoint):
        pipeline.lead.engine.place_part(INSTANCE, parts[1], {})
    assert pipeline.lead.engine.backed_bytes == backed_bytes
    some_tokens(pipeline, "a", 6)
    grow(pipeline, model, 4)
    assert pipeline.finish()["a"] == model.greedy(prompts[2], 40)


def test_a_grown_stage_has_the_room_that_it_was_given(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2), kv_tokens=[512, 96])
    pipeline.lead.capacity_tokens = 1024
    for part in extend(pipeline, model, 4, kv_tokens=1024):
        pipeline.lead.engine.place_part(INSTANCE, part, model.parts[part])
    results = steps_until(pipeline, lambda: range_of(pipeline) == model.spec.whole)
    assert [grown.kv_capacity_tokens for result in results for grown in result.grown] == [1024]
    pipeline.lead.add("long", prompts[2], max_tokens=150)
    assert pipeline.finish()["long"] == model.greedy(prompts[2], 150)


def test_a_stage_of_no_pipeline_grows_like_one_that_is_being_loaded(checkpoint, driver, prompts):
    model, runs = checkpoint("llama", 1), driver()
    runs.load(model, INSTANCE, stage=Stage(0, 2))
    room = runs.engine.extend(INSTANCE, model.spec.whole, bytes_of(model, model.spec.whole))
    runs.add("a", prompts[2], max_tokens=20)
    for part in room.parts:
        runs.engine.place_part(INSTANCE, part, model.parts[part])
    assert [grown.stage for grown in runs.step().grown] == [model.spec.whole]
    assert runs.finish()["a"] == model.greedy(prompts[2], 20)


def test_what_cannot_grow(checkpoint, driver):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    first, second = (runs.engine for runs in pipeline.drivers)
    whole_bytes = bytes_of(model, model.spec.whole)
    for wrong in (Stage(0, 2), Stage(1, 4), Stage(0, 5), Stage(0, 1)):
        with pytest.raises(BadRequest, match="cannot grow"):
            first.extend(INSTANCE, wrong, whole_bytes)
    for wrong in (Stage(2, 4), Stage(1, 3), Stage(0, 3), Stage(1, 5), Stage(3, 4)):
        with pytest.raises(BadRequest, match="cannot grow"):
            second.extend(INSTANCE, wrong, whole_bytes)
    for engine in (first, second):
        backed_bytes = engine.backed_bytes
        with pytest.raises(NoRoom, match="its pipeline uses"):
            engine.extend(
                INSTANCE, model.spec.whole, bytes_of(model, model.spec.whole, KV_TOKENS // 2)
            )
        assert engine.backed_bytes == backed_bytes
    first.extend(INSTANCE, Stage(0, 3), whole_bytes)
    with pytest.raises(StageBusy):
        first.extend(INSTANCE, model.spec.whole, whole_bytes)
    loading = driver().engine
    loading.begin_load(INSTANCE, model.spec, Stage(0, 2), model.spec.dtype, whole_bytes)
    with pytest.raises(StageBusy, match="loading"):
        loading.extend(INSTANCE, Stage(0, 3), whole_bytes)


def test_graphs_hear_of_a_longer_range_when_it_has_memory_and_before_its_parts(
    checkpoint, driver, prompts
):
    model = checkpoint("llama", 1)
    pipeline, heard = staged(driver, model, cuts(4, 2)), []
    resident = pipeline.lead.engine._stages[INSTANCE]

    def extended():
        placed = sum(part in resident.parameters for part in model.parts)
        heard.append((resident.memory.stage, resident.stage, placed))

    resident.compute = replace(resident.compute, extended=extended)
    pipeline.lead.add("0", prompts[0], max_tokens=40)
    some_tokens(pipeline, "0", 3)
    grow(pipeline, model, 4)
    ((memory, runs, placed),) = heard
    assert (memory, runs) == (Stage(0, 4), Stage(0, 2))
    assert placed < len(model.parts)
