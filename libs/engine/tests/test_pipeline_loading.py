"""Stages that are joined while their parts still come: micro-batches run as far as parts are in
place, nothing leaves a stage that is not vouched for, and the tokens are those of a whole model.
"""

import random
from time import monotonic

import pytest
from coming_parts import PROMPTS, I
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import MemoryPipeline, cuts

from pilotlight.engine.channel.memory import memory_channel
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import lead
from pilotlight.policy.ids import RequestId

MAX_TOKENS, KV_TOKENS = 5, 1024


def loading(driver, model, stages: int, *, seed: int = 0, step_tokens: int = 16) -> MemoryPipeline:
    """A pipeline of which no part has come yet."""
    drivers = [driver(BatchLimits(step_tokens=step_tokens, running=4)) for _ in range(stages)]
    for runs, stage in zip(drivers, cuts(4, stages), strict=True):
        spec = model.spec
        device_bytes = parameter_bytes(
            decoder_of(spec), stage, spec.dtype
        ) + KV_TOKENS * spec.kv_bytes_per_token(stage, spec.dtype)
        room = runs.engine.begin_load(I, spec, stage, spec.dtype, device_bytes)
        runs.capacity_tokens += room.kv_capacity_tokens
    channels = [memory_channel(monotonic) for _ in drivers]
    for index, runs in enumerate(drivers):
        runs.engine.connect(I, channels[index - 1][1], channels[index][0], vouched=False)
    pipeline = MemoryPipeline(drivers, random.Random(seed))
    pipeline.run_until(lambda: pipeline.lead.engine.serves(I))
    return pipeline


def parts_of(model, stages: int) -> list[tuple[int, int]]:
    """Every part of every stage, as (stage, part)."""
    return [
        (index, part)
        for index, stage in enumerate(cuts(4, stages))
        for part in model.spec.parts_of(stage)
    ]


def settle(pipeline: MemoryPipeline, steps: int = 5_000) -> None:
    """Runs until no stage has anything to do: waiting for parts is no work."""
    for _ in range(steps):
        if not any(runs.engine.has_work for runs in pipeline.drivers):
            return
        pipeline.step()
    raise AssertionError("a stage that waits for parts goes on stepping")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_prompt_moves_on_as_the_parts_of_the_next_stage_come(kind, stages, driver, checkpoint):
    model = checkpoint(kind)
    pipeline = loading(driver, model, stages)
    for index, prompt in enumerate(PROMPTS):
        pipeline.lead.add(str(index), prompt, max_tokens=MAX_TOKENS)
    settle(pipeline)
    for index, part in parts_of(model, stages):
        pipeline.drivers[index].engine.place_part(I, part, model.parts[part])
        settle(pipeline)
    for runs in pipeline.drivers[1:]:
        assert not any(output.token_ids for output in pipeline.lead.outputs.values()), (
            "nothing leaves a stage whose parts may not have been whole"
        )
        runs.engine.vouch(I)
        settle(pipeline)
    outputs = pipeline.finish()
    for index, prompt in enumerate(PROMPTS):
        assert outputs[str(index)] == model.greedy(prompt, MAX_TOKENS)


def test_the_first_micro_batch_waits_where_parts_are_missing(driver, checkpoint, monkeypatch):
    """The leading stage has run its layers before the next one has any."""
    model = checkpoint("llama")
    pipeline = loading(driver, model, 2, step_tokens=512)
    monkeypatch.setattr(lead, "ANSWER_TIMEOUT_S", 0.0)
    pipeline.lead.add("a", PROMPTS[0], max_tokens=MAX_TOKENS)
    ran = pipeline.lead.engine._stages[I].scheduler
    for part in (0, 1):
        pipeline.lead.engine.place_part(I, part, model.parts[part])
        settle(pipeline)
        assert ran.find(next(iter(ran.requests)).key).computed == 0
    pipeline.lead.engine.place_part(I, 2, model.parts[2])
    settle(pipeline)
    assert ran.find(next(iter(ran.requests)).key).computed == len(PROMPTS[0])
    assert pipeline.drivers[1].engine._stages[I].in_flight == 1, "it is there, and waits"
    assert not pipeline.lost, "a stage that loads is no stage that hangs"


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("placed", range(7))
def test_a_stage_that_is_given_up_while_it_loads_ends_the_requests(
    dies, placed, driver, checkpoint
):
    model = checkpoint("llama")
    pipeline = loading(driver, model, 2)
    pipeline.lead.add("a", PROMPTS[0], max_tokens=MAX_TOKENS)
    for index, part in parts_of(model, 2)[:placed]:
        pipeline.drivers[index].engine.place_part(I, part, model.parts[part])
        settle(pipeline)
    pipeline.drivers[dies].engine.drop(I)
    settle(pipeline)
    pipeline.lead.step()
    output = pipeline.lead.outputs["a"]
    assert (output.token_ids, output.code) in (([], "worker_lost"), ([], "not_loaded"), ([], ""))
    assert pipeline.drivers[dies].engine.backed_bytes == 0
    if dies == 1:
        assert not pipeline.lead.engine.serves(I), "it can join another pipeline"


def test_a_deadline_passes_while_other_stages_load(driver, checkpoint):
    model = checkpoint("llama")
    pipeline = loading(driver, model, 2)
    for index, part in parts_of(model, 2)[:3]:
        pipeline.drivers[index].engine.place_part(I, part, model.parts[part])
    pipeline.lead.add("a", PROMPTS[0], max_tokens=MAX_TOKENS)
    settle(pipeline)
    resident = pipeline.lead.engine._stages[I]
    (request,) = resident.scheduler.requests
    assert resident.complete
    assert pipeline.lead.engine.due_s is None
    request.deadline_s = 10.0
    assert pipeline.lead.engine.due_s == 10.0, "its child wakes for it"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_lives_of_stages_that_load(driver, checkpoint, data):
    """Parts in any order, vouched for at any time; requests come and go at any time."""
    model = checkpoint("llama")
    stages = data.draw(st.sampled_from([2, 4]))
    pipeline = loading(
        driver,
        model,
        stages,
        seed=data.draw(st.integers(0, 99)),
        step_tokens=data.draw(st.sampled_from([16, 512])),
    )
    moves: list[tuple[str, int, int]] = [("part", *one) for one in parts_of(model, stages)]
    moves += [("add", index, 0) for index in range(len(PROMPTS))]
    moves += [("abort", index, 0) for index in data.draw(st.sets(st.integers(0, 3), max_size=2))]
    missing = dict.fromkeys(range(stages), 0)
    for index, _ in parts_of(model, stages):
        missing[index] += 1
    vouched, aborted = set[int](), set[str]()

    def vouch(index: int) -> None:
        pipeline.drivers[index].engine.vouch(I)
        vouched.add(index)

    for what, number, part in data.draw(st.permutations(moves)):
        match what:
            case "part":
                pipeline.drivers[number].engine.place_part(I, part, model.parts[part])
                missing[number] -= 1
                if not missing[number] and data.draw(st.booleans()):
                    vouch(number)
            case "add":
                pipeline.lead.add(str(number), PROMPTS[number], max_tokens=MAX_TOKENS)
            case _ if str(number) in pipeline.lead.outputs:
                pipeline.lead.engine.abort(RequestId(str(number)), 1)
                aborted.add(str(number))
            case _:
                """It has not come yet."""
        for _ in range(data.draw(st.integers(0, 6))):
            pipeline.step()
        if not vouched.issuperset(range(1, stages)):
            assert not any(output.token_ids for output in pipeline.lead.outputs.values())
    for index in set(range(stages)) - vouched:
        vouch(index)
    outputs = pipeline.finish()
    assert not pipeline.lost
    for name, token_ids in outputs.items():
        whole = model.greedy(PROMPTS[int(name)], MAX_TOKENS)
        assert token_ids == (whole[: len(token_ids)] if name in aborted else whole)
