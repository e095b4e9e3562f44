"""Stages joined by channels are the model that they are cut from."""

import random
import threading
from time import monotonic

import pytest
import torch
from families import FAMILIES
from pipelines import INSTANCE, connect, cuts, staged

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.memory import memory_channel
from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.errors import BadRequest, NoRoom, StageBusy, UnknownInstance
from pilotlight.engine.pipeline import lead
from pilotlight.engine.pipeline.frames import (
    HiddenStates,
    OpenedRequest,
    StageHello,
    StagesUp,
    header_of,
    pack,
    unpack,
)
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.request import FinishReason, RequestKey, Sampling

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
UNEVEN = [Stage(0, 1), Stage(1, 3), Stage(3, 4)]


@pytest.fixture(autouse=True)
def no_looking_out(monkeypatch):
    """All stages take turns in one thread: while one waits, no other can answer."""
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("kind", [*FAMILIES, "llama-tied"])
def test_staged_tokens_are_those_of_transformers(kind, num_stages, checkpoint, driver, prompts):
    model = checkpoint(kind, 1)
    pipeline = staged(
        driver, model, cuts(4, num_stages), limits=BatchLimits(step_tokens=24, running=24)
    )
    for index, prompt in enumerate(prompts):
        pipeline.lead.add(str(index), prompt, max_tokens=64)
    outputs = pipeline.finish()
    for index, prompt in enumerate(prompts):
        assert len(outputs[str(index)]) == 64
        assert outputs[str(index)] == model.would_say(prompt, outputs[str(index)])


@pytest.mark.parametrize("seed", range(3))
def test_sampled_preempted_and_cancelled_requests_in_a_pipeline(seed, checkpoint, driver, prompts):
    """Little room and many requests: a request that is preempted with a token under way samples the
    same one again.
    """
    model, chance = checkpoint("llama", 2), random.Random(seed)
    settings = {
        str(index): {"seed": index, **SAMPLED, "max_tokens": 34 + index} for index in range(12)
    }
    expected = {}
    for name, sampling in settings.items():
        alone = driver()
        alone.load(model)
        alone.add(name, prompts[int(name) % 4], **sampling)
        expected |= alone.finish()
    pipeline = staged(
        driver,
        model,
        UNEVEN,
        seed=seed,
        kv_tokens=[160, 128, 144],
        limits=BatchLimits(step_tokens=40, running=8),
    )
    for name, sampling in settings.items():
        pipeline.lead.add(name, prompts[int(name) % 4], **sampling)
    cancelled = chance.sample(sorted(settings), 3)
    for name in cancelled:
        for _ in range(chance.randrange(60)):
            pipeline.step()
        pipeline.lead.engine.abort(RequestId(name), 1)
    outputs = pipeline.finish()
    for name, tokens in expected.items():
        if name in cancelled and pipeline.lead.outputs[name].finish is FinishReason.CANCELLED:
            assert outputs[name] == tokens[: len(outputs[name])]
        else:
            assert outputs[name] == tokens
    assert pipeline.lead.preemptions > 0


def test_stages_have_as_many_micro_batches_under_way_as_there_are_stages(
    checkpoint, driver, prompts
):
    pipeline = staged(driver, checkpoint("llama"), cuts(4, 4))
    for index in range(8):
        pipeline.lead.add(str(index), [index + 2, *prompts[index % 4]])
    batches = [pipeline.lead.step().batch_tokens for _ in range(6)]
    assert [tokens > 0 for tokens in batches] == [True] * 4 + [False] * 2, (
        "then it waits for the first one's answer"
    )
    assert pipeline.finish().keys() == {str(index) for index in range(8)}


CONTROLLED = {**SAMPLED, "frequency_penalty": 0.6, "repetition_penalty": 1.4, "seed": 9}


def away_and_back(lead, name):
    released = lead.engine.release(RequestId(name), 1)
    lead.engine.add(
        RequestId(name), 1, INSTANCE, released.prompt_ids, released.output_ids, released.sampling
    )


def preempted(lead, name):
    scheduler = lead.engine._stages[INSTANCE].scheduler
    scheduler._preempt(scheduler.find(RequestKey(RequestId(name), 1)))


@pytest.mark.parametrize("disturb", [away_and_back, preempted])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_token_under_way_is_not_given_to_a_later_run(
    num_stages, disturb, checkpoint, driver, prompts
):
    """The run that it belongs to is over, and the next one has begun, when it comes back: that one
    samples the same token itself.
    """
    model = checkpoint("llama", 1)
    alone = driver()
    alone.load(model)
    alone.add("a", prompts[1], **CONTROLLED)
    expected = alone.finish()["a"]
    pipeline = staged(driver, model, cuts(4, num_stages))
    pipeline.lead.add("a", prompts[1], **CONTROLLED)
    for position in (1, 5, 12):
        pipeline.run_until(
            lambda position=position: len(pipeline.lead.outputs["a"].token_ids) >= position
        )
        while not pipeline.lead.step().batch_tokens:
            pipeline.run_until(
                lambda: pipeline.lead.engine._stages[INSTANCE].pipeline._answers.readable
            )
        disturb(pipeline.lead, "a")
        assert pipeline.lead.step().batch_tokens, "it runs again before its token is back"
    assert pipeline.finish()["a"] == expected


def test_no_stage_is_unloaded_while_requests_of_its_pipeline_are_in_flight(
    checkpoint, driver, prompts
):
    pipeline = staged(driver, checkpoint("llama"), UNEVEN)
    pipeline.lead.add("a", prompts[0], max_tokens=30)
    pipeline.run_until(lambda: len(pipeline.lead.outputs["a"].token_ids) > 3)
    for runs in pipeline.drivers:
        with pytest.raises(StageBusy):
            runs.engine.unload(INSTANCE)
    pipeline.lead.engine.abort(RequestId("a"), 1)
    pipeline.finish()
    pipeline.run_until(lambda: not any(runs.engine.has_work for runs in pipeline.drivers))
    for runs in pipeline.drivers:
        runs.engine.unload(INSTANCE)
        assert runs.engine.backed_bytes == 0
    assert not any(runs.engine.has_work for runs in pipeline.drivers)


def test_the_smallest_stage_says_how_much_fits(checkpoint, driver, prompts):
    pipeline = staged(driver, checkpoint("llama"), cuts(4, 2), kv_tokens=[512, 96])
    with pytest.raises(NoRoom, match="holds 96"):
        pipeline.lead.add("long", prompts[2], max_tokens=30)
    pipeline.lead.add("a", prompts[2], max_tokens=26)
    assert pipeline.finish()["a"] == checkpoint("llama").greedy(prompts[2], 26)


@pytest.mark.parametrize("dying", [1, 2])
def test_a_stage_that_dies_ends_its_pipeline_and_nothing_else(dying, checkpoint, driver, prompts):
    model, other = checkpoint("llama", 1), checkpoint("qwen2")
    pipeline = staged(driver, model, UNEVEN)
    for runs in pipeline.drivers:
        runs.load(other, "other")
        runs.add("beside", prompts[0], instance="other", max_tokens=40)
    pipeline.lead.add("a", prompts[1], max_tokens=30)
    pipeline.lead.add("b", prompts[2], max_tokens=30)
    pipeline.run_until(lambda: len(pipeline.lead.outputs["a"].token_ids) > 5)
    dead = pipeline.drivers.pop(dying)
    dead.engine.drop(INSTANCE)
    outputs = pipeline.finish()
    for name, prompt in (("a", prompts[1]), ("b", prompts[2])):
        ended = pipeline.lead.outputs[name]
        assert (ended.finish, ended.code) == (FinishReason.ERROR, "worker_lost")
        assert outputs[name] == model.greedy(prompt, 30)[: len(outputs[name])]
    pipeline.run_until(lambda: len(pipeline.lost) == 2)
    assert {lost.code for lost in pipeline.lost} == {"worker_lost"}
    for runs in (*pipeline.drivers, dead):
        while runs.engine.has_work:
            runs.step()
        assert runs.outputs["beside"].token_ids == other.greedy(prompts[0], 40)
    with pytest.raises(UnknownInstance):
        pipeline.lead.add("c", prompts[0])

    # The stages that are left join another one, and what was resumed goes on where it was.
    fresh = driver()
    fresh.load(model, INSTANCE, stage=UNEVEN[dying])
    pipeline.drivers.insert(dying, fresh)
    again = connect(pipeline.drivers, random.Random(1))
    again.lead.add("resumed", prompts[1], outputs["a"], max_tokens=30)
    again.lead.add("b again", prompts[2], outputs["b"], max_tokens=30)
    resumed = again.finish()
    assert (resumed["resumed"], resumed["b again"]) == (
        model.greedy(prompts[1], 30),
        model.greedy(prompts[2], 30),
    )


@pytest.mark.parametrize(
    "stages",
    [[Stage(0, 2), Stage(3, 4)], [Stage(0, 2), Stage(1, 4)], [Stage(0, 2), Stage(2, 3)]],
    ids=["gap", "overlap", "short"],
)
def test_stages_that_are_no_model_do_not_become_one(stages, checkpoint, driver):
    pipeline = staged(driver, checkpoint("llama"), stages)
    assert not pipeline.lead.engine.serves(INSTANCE)
    pipeline.run_until(lambda: len(pipeline.lost) == 2)
    assert "layer" in pipeline.lost[0].message or "hung up" in pipeline.lost[0].message


def test_only_a_stage_of_several_is_connected_and_once(checkpoint, driver):
    runs, model = driver(), checkpoint("llama")
    one, other = memory_channel(monotonic)
    with pytest.raises(UnknownInstance):
        runs.engine.connect(INSTANCE, one, other)
    runs.load(model)
    with pytest.raises(BadRequest, match="whole model"):
        runs.engine.connect(INSTANCE, one, other)
    runs.engine.begin_load(InstanceId("half"), model.spec, Stage(0, 2), Dtype.FLOAT64, 1 << 22)
    runs.engine.connect(InstanceId("half"), one, other)
    with pytest.raises(BadRequest, match="in a pipeline already"):
        runs.engine.connect(InstanceId("half"), *memory_channel(monotonic))


def test_a_stage_that_hangs_is_lost(checkpoint, driver, prompts, monkeypatch):
    pipeline = staged(driver, checkpoint("llama"), cuts(4, 2))
    pipeline.lead.add("a", prompts[0])
    monkeypatch.setattr(
        lead, "ANSWER_TIMEOUT_S", 0.02
    )  # the driver's clock ticks a millisecond at every look
    while pipeline.lead.outputs["a"].finish is None:
        pipeline.lead.step()
    assert pipeline.lead.outputs["a"].code == "worker_lost"


def test_what_a_stage_is_comes_back_as_it_was(checkpoint):
    hello = StageHello(
        stage=Stage(0, 2), spec=checkpoint("gemma3").spec, dtype=Dtype.BFLOAT16, num_blocks=8
    )
    assert unpack(pack(StagesUp(stages=(hello,)))).stages == (hello,)


def a_batch(**changes):
    key, hidden = (
        RequestKey(RequestId("x"), 1),
        changes.pop("hidden", torch.zeros(3, 48, dtype=torch.float64)),
    )
    fields = {
        "number": 1,
        "keys": (key,),
        "segments": (Segment(0, 3, (0,), wants_logits=True),),
        "opened": (OpenedRequest(key, (1, 2, 3), (), Sampling(seed=0, max_tokens=4)),),
        "closed": (),
        "tensor": header_of(hidden),
        "allowed": (None,),
        **changes,
    }
    return pack(HiddenStates(**fields), hidden)


BAD_FRAMES = {
    "nonsense": lambda: Frame(b"\xc1nonsense", memoryview(b"")),
    "no tensor": lambda: Frame(a_batch().header, memoryview(b"")),
    "narrow": lambda: a_batch(hidden=torch.zeros(3, 47, dtype=torch.float64)),
    "dtype": lambda: a_batch(hidden=torch.zeros(3, 48, dtype=torch.float32)),
    "block": lambda: a_batch(segments=(Segment(0, 3, (100_000,), wants_logits=True),)),
    "blocks": lambda: a_batch(segments=(Segment(30, 3, (1,), wants_logits=True),)),
    "unopened": lambda: a_batch(opened=()),
    "keys": lambda: a_batch(keys=()),
    "masks": lambda: a_batch(allowed=()),
}


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_a_frame_that_makes_no_sense_ends_the_pipeline_and_the_engine_lives(
    kind, checkpoint, driver, prompts
):
    model = checkpoint("llama")
    runs = driver()
    runs.load(model, INSTANCE, stage=Stage(2, 4))
    runs.load(checkpoint("qwen2"), "whole")
    mine, before = memory_channel(monotonic)
    behind, back = memory_channel(monotonic)
    runs.engine.connect(INSTANCE, before, behind)
    mine.send(BAD_FRAMES[kind](), 1)
    (lost,) = runs.step().lost
    assert lost.code == "worker_lost"
    assert back.readable
    runs.add("a", prompts[0], instance="whole", max_tokens=4)
    assert runs.finish()["a"] == checkpoint("qwen2").greedy(prompts[0], 4)


def test_a_good_frame_is_answered(checkpoint, driver):
    runs = driver()
    runs.load(checkpoint("llama"), INSTANCE, stage=Stage(2, 4))
    mine, before = memory_channel(monotonic)
    behind, back = memory_channel(monotonic)
    runs.engine.connect(INSTANCE, before, behind)
    mine.send(a_batch(), 1)
    assert not runs.step().lost
    assert len(unpack(back.receive(1)).sampled) == 1


def test_stages_in_threads_of_their_own(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    drivers = [driver() for _ in UNEVEN]
    for runs, stage in zip(drivers, UNEVEN, strict=True):
        runs.load(model, INSTANCE, stage=stage)
    channels = [memory_channel(monotonic) for _ in drivers]
    for index, runs in enumerate(drivers):
        runs.engine.connect(INSTANCE, channels[index - 1][1], channels[index][0])
    done = threading.Event()

    def follow(runs):
        while not done.is_set():
            runs.engine.wait(0.05)
            if runs.engine.has_work:
                runs.step()

    threads = [threading.Thread(target=follow, args=(runs,)) for runs in drivers[1:]]
    for thread in threads:
        thread.start()
    try:
        leader = drivers[0]
        while not leader.engine.serves(INSTANCE):
            leader.step()
        for index, prompt in enumerate(prompts):
            leader.add(str(index), prompt)
        outputs = leader.finish()
    finally:
        done.set()
        for thread in threads:
            thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert [outputs[str(index)] for index in range(4)] == [
        model.greedy(prompt, 24) for prompt in prompts
    ]
