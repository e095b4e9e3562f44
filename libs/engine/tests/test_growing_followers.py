"""A stage that follows in a pipeline gets a longer range, and runs it when the pipeline ends."""

import random

import pytest
from pipelines import INSTANCE, MemoryPipeline, connect, cuts, staged

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.errors import BadCheckpoint, BadRequest, StageBusy
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import lead
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "max_tokens": 120}
KV_TOKENS = 4096


@pytest.fixture(autouse=True)
def no_looking_out(monkeypatch):
    """All stages take turns in one thread: while one waits, no other can answer."""
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)


def extend(runs, model, stage):
    """Begins; the parts that are still to be placed."""
    spec = model.spec
    device_bytes = parameter_bytes(
        decoder_of(spec), stage, spec.dtype
    ) + KV_TOKENS * spec.kv_bytes_per_token(stage, spec.dtype)
    held = runs.engine._stages[INSTANCE].parameters.parts
    return [
        part for part in runs.engine.extend(INSTANCE, stage, device_bytes).parts if part not in held
    ]


def place(runs, model, parts):
    for part in parts:
        runs.engine.place_part(INSTANCE, part, model.parts[part])


def some_tokens(pipeline, name, count):
    wanted = len(pipeline.lead.outputs[name].token_ids) + count
    pipeline.run_until(lambda: len(pipeline.lead.outputs[name].token_ids) >= wanted)


def test_stages_with_the_bytes_of_the_whole_model_become_that_in_mid_generation(
    checkpoint, driver, prompts
):
    """All of them, as where each is to be an instance: none has KV that the whole has no room
    for.
    """
    model, kv_tokens = checkpoint("llama", 1), 1024
    spec = model.spec
    device_bytes = parameter_bytes(decoder_of(spec), spec.whole, spec.dtype)
    device_bytes += kv_tokens * spec.kv_bytes_per_token(spec.whole, spec.dtype)
    drivers = [driver(), driver()]
    for runs, stage in zip(drivers, cuts(4, 2), strict=True):
        room = runs.engine.begin_load(
            INSTANCE, spec, stage, spec.dtype, device_bytes, may_grow=True
        )
        assert room.kv_capacity_tokens == kv_tokens
        runs.capacity_tokens = kv_tokens
        place(runs, model, room.parts)
    pipeline = connect(drivers, random.Random(0))
    pipeline.lead.add("a", prompts[2], max_tokens=60)
    some_tokens(pipeline, "a", 5)
    for runs in drivers:
        held = runs.engine._stages[INSTANCE].parameters.parts
        parts = runs.engine.extend(INSTANCE, spec.whole, device_bytes).parts
        place(runs, model, [part for part in parts if part not in held])
    pipeline.run_until(
        lambda: all(runs.engine._stages[INSTANCE].pipeline is None for runs in drivers)
    )
    assert all(runs.engine.serves(INSTANCE) for runs in drivers)
    assert pipeline.finish()["a"] == model.greedy(prompts[2], 60)


def end_pipeline(pipeline, runs):
    """The stage that leads goes, and this one notices."""
    pipeline.lead.engine.drop(INSTANCE)
    left = MemoryPipeline(pipeline.drivers[1:], pipeline.chance)
    left.run_until(lambda: runs.engine._stages[INSTANCE].pipeline is None)
    return left.lost


def expected_of(driver, model, prompts):
    alone = driver()
    alone.load(model)
    for index, prompt in enumerate(prompts):
        alone.add(str(index), prompt, seed=index, **SAMPLED)
    return alone.finish()


def move_all(pipeline, stages, *, with_kv):
    """Every request leaves the stage that leads; with what it is to be added elsewhere."""
    moves = []
    for name, output in pipeline.lead.outputs.items():
        key = RequestKey(RequestId(name), 1)
        pieces = [
            piece
            for runs, stage in zip(pipeline.drivers, stages, strict=True)
            for piece in runs.engine.export_kv(INSTANCE, [key], stage)
        ]
        released = pipeline.lead.engine.release(*key)
        assert list(released.output_ids) == output.token_ids
        moves.append((name, released, pieces if with_kv else []))
    return moves


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize(
    ("stages", "chosen"),
    [(cuts(4, 2), 1), (cuts(4, 4), 3), ([Stage(0, 1), Stage(1, 3), Stage(3, 4)], 1)],
)
@pytest.mark.parametrize("kind", ["llama-tied", "gemma3"])
def test_a_following_stage_becomes_the_whole_model_in_mid_stream(
    kind, stages, chosen, with_kv, checkpoint, driver, prompts
):
    model = checkpoint(kind, 1)
    pipeline = staged(driver, model, stages, limits=BatchLimits(step_tokens=24, running=12))
    for index, prompt in enumerate(prompts):
        pipeline.lead.add(str(index), prompt, seed=index, **SAMPLED)
    some_tokens(pipeline, "2", 5)
    runs = pipeline.drivers[chosen]
    for part in extend(runs, model, model.spec.whole):
        some_tokens(pipeline, "2", 2)
        place(runs, model, [part])
    assert [(one.instance_id, one.stage) for one in runs.step().grown] == [
        (INSTANCE, model.spec.whole)
    ]
    assert not runs.engine.serves(INSTANCE)
    some_tokens(pipeline, "2", 5)
    outputs = pipeline.lead.outputs
    moves = move_all(pipeline, stages, with_kv=with_kv)
    computed = sum(len(released.prompt_ids) + len(released.output_ids) for _, released, _ in moves)
    assert end_pipeline(pipeline, runs)
    assert runs.engine.serves(INSTANCE)
    for name, released, pieces in moves:
        runs.outputs[name] = outputs[name]
        runs.engine.add(
            RequestId(name),
            1,
            INSTANCE,
            released.prompt_ids,
            released.output_ids,
            released.sampling,
            pieces=pieces,
        )
    batch_tokens, steps = 0, 0
    while not all(
        len(output.token_ids) > len(move[1].output_ids)
        for output, move in zip(outputs.values(), moves, strict=True)
    ):
        batch_tokens, steps = batch_tokens + runs.step().batch_tokens, steps + 1
        assert steps < 1000
    if with_kv:
        assert batch_tokens < computed // 2, "what was computed is not computed again"
    runs.capacity_tokens = runs.engine.kv_capacity_tokens(INSTANCE)
    assert runs.finish() == expected_of(driver, model, prompts)


def test_the_leader_dies_while_a_following_stage_grows(checkpoint, driver, prompts):
    """Its requests run again from their tokens, as far as parts are in place."""
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("0", prompts[2], max_tokens=60)
    some_tokens(pipeline, "0", 5)
    runs = pipeline.drivers[1]
    parts = extend(runs, model, model.spec.whole)
    place(runs, model, parts[:1])
    tokens = list(pipeline.lead.outputs["0"].token_ids)
    assert {one.code for one in end_pipeline(pipeline, runs)} == {"worker_lost"}
    assert runs.engine.serves(INSTANCE)
    runs.add("0", prompts[2], tokens, max_tokens=60)
    for part in parts[1:]:
        while runs.engine.has_work:
            runs.step()
        place(runs, model, [part])
    assert [one.stage for one in runs.step().grown] == [model.spec.whole]
    runs.capacity_tokens = runs.engine.kv_capacity_tokens(INSTANCE)
    assert runs.finish()["0"] == model.greedy(prompts[2], 60)


def test_the_leader_takes_over_all_layers_of_a_stage_that_was_to_grow(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("0", prompts[2], max_tokens=60)
    for runs in pipeline.drivers:
        place(runs, model, extend(runs, model, model.spec.whole))
    pipeline.run_until(
        lambda: all(runs.engine._stages[INSTANCE].pipeline is None for runs in pipeline.drivers)
    )
    assert all(runs.engine.serves(INSTANCE) for runs in pipeline.drivers)
    assert pipeline.finish()["0"] == model.greedy(prompts[2], 60)


def test_stages_that_have_become_whole_take_other_names(checkpoint, driver, prompts):
    """Of a pipeline of four whose requests go on at the lead; each answers as the model does."""
    model, other = checkpoint("llama", 1), InstanceId("other")
    pipeline = staged(driver, model, cuts(4, 4))
    pipeline.lead.add("0", prompts[2], max_tokens=60)
    some_tokens(pipeline, "0", 3)
    for runs in reversed(pipeline.drivers):
        place(runs, model, extend(runs, model, model.spec.whole))
    with pytest.raises(StageBusy):
        pipeline.drivers[1].engine.rename(INSTANCE, other)
    pipeline.run_until(
        lambda: all(runs.engine._stages[INSTANCE].pipeline is None for runs in pipeline.drivers)
    )
    with pytest.raises(StageBusy):
        pipeline.lead.engine.rename(INSTANCE, other)
    for number, runs in enumerate(pipeline.drivers[1:], start=1):
        engine = runs.engine
        with pytest.raises(BadRequest):
            engine.rename(INSTANCE, INSTANCE)
        engine.rename(INSTANCE, other)
        assert engine.serves(other)
        assert not engine.serves(INSTANCE)
        engine.rename(other, INSTANCE)
        runs.capacity_tokens = engine.kv_capacity_tokens(INSTANCE)
        runs.add("0", prompts[number], max_tokens=20)
        assert runs.finish()["0"] == model.greedy(prompts[number], 20)
    assert pipeline.finish()["0"] == model.greedy(prompts[2], 60)


def test_a_following_stage_whose_parts_cannot_be_had_follows_on(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 2))
    pipeline.lead.add("0", prompts[2], max_tokens=60)
    some_tokens(pipeline, "0", 3)
    engine = pipeline.drivers[1].engine
    backed_bytes = engine.backed_bytes
    parts = extend(pipeline.drivers[1], model, Stage(1, 4))
    with pytest.raises(StageBusy):
        extend(pipeline.drivers[1], model, model.spec.whole)
    with pytest.raises(BadCheckpoint):
        engine.place_part(INSTANCE, parts[0], {})
    assert engine.backed_bytes == backed_bytes
    some_tokens(pipeline, "0", 3)
    extend(pipeline.drivers[1], model, Stage(1, 4))
    assert engine.call_off(INSTANCE)
    assert engine.backed_bytes == backed_bytes
    assert pipeline.finish()["0"] == model.greedy(prompts[2], 60)


def test_a_stage_of_no_pipeline_grows_at_both_ends(checkpoint, driver, prompts):
    model, runs = checkpoint("llama", 1), driver()
    runs.load(model, INSTANCE, stage=Stage(2, 3))
    place(runs, model, extend(runs, model, Stage(1, 3)))
    assert [one.stage for one in runs.step().grown] == [Stage(1, 3)]
    parts = extend(runs, model, model.spec.whole)
    runs.capacity_tokens = runs.engine.kv_capacity_tokens(INSTANCE)
    runs.add("0", prompts[2], max_tokens=20)
    place(runs, model, random.Random(3).sample(parts, len(parts)))
    assert [one.stage for one in runs.step().grown] == [model.spec.whole]
    assert runs.finish()["0"] == model.greedy(prompts[2], 20)
