"""Whatever shares a batch, the cache or too little room with a request: its tokens stay the
same.
"""

import pytest
from families import FAMILIES

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import FinishReason, Sampling

PREFIX = [(7 * index) % 199 for index in range(40)]
PROMPTS = [
    PREFIX[:5],
    PREFIX[:16],
    PREFIX[:17],
    PREFIX[:32],
    [*PREFIX, 3, 4, 5],
    [*PREFIX[:35], 9],
    [100, *PREFIX[:30]],
    [50] * 33,
]
"""Equal beginnings of no block, of one and two, up to the last token; and prompts that share
nothing."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_preempted_and_prefix_cached_tokens_are_those_of_transformers(kind, driver, checkpoint):
    model = checkpoint(kind)
    runs = driver(BatchLimits(step_tokens=20, running=4))
    runs.load(model, kv_tokens=16 * 9)
    for index, prompt in enumerate(PROMPTS):
        runs.add(str(index), prompt, max_tokens=40)
    preemptions = hits = looked_up = ran = 0
    while runs.engine.has_work:
        result = runs.step()
        preemptions += result.preemptions
        hits += result.prefix_hit_tokens
        looked_up += result.prefix_looked_up_tokens
        ran += result.batch_tokens
    assert preemptions > 0
    assert 0 < hits < looked_up == sum(map(len, PROMPTS))
    assert ran > looked_up - hits + 39 * len(PROMPTS), "what was preempted runs again"
    for index, prompt in enumerate(PROMPTS):
        assert runs.outputs[str(index)].token_ids == model.would_say(
            prompt, runs.outputs[str(index)].token_ids
        )


def test_a_step_says_what_it_took(driver, checkpoint):
    runs = driver(BatchLimits(step_tokens=30, running=4))
    runs.load(checkpoint("llama"), kv_tokens=160)
    runs.add("a", PROMPTS[4], max_tokens=2)
    runs.add("b", PROMPTS[0], max_tokens=2)
    first = runs.step()
    assert (first.batch_tokens, first.prefix_looked_up_tokens, first.prefix_hit_tokens) == (
        30,
        43,
        0,
    )
    assert (first.running, first.waiting, first.kv_free_tokens, first.kv_cached_tokens) == (
        1,
        1,
        112,
        0,
    )
    second = runs.step()
    assert (second.batch_tokens, second.prefix_looked_up_tokens) == (13 + 5, 5)
    assert (second.running, second.waiting, second.kv_free_tokens) == (2, 0, 96)
    third = runs.step()
    assert (third.batch_tokens, third.running, third.kv_free_tokens, third.kv_cached_tokens) == (
        2,
        0,
        160,
        32,
    )
    runs.add("c", PROMPTS[4], max_tokens=2)
    fourth = runs.step()
    assert (fourth.batch_tokens, fourth.prefix_looked_up_tokens, fourth.prefix_hit_tokens) == (
        11,
        43,
        32,
    )
    assert fourth.kv_cached_tokens == 0
    assert runs.finish()["c"] == runs.outputs["a"].token_ids


def test_a_poisoned_request_does_not_spoil_the_prefix_it_shares(driver, checkpoint):
    model = checkpoint("llama", 1)
    poison = next(token_id for token_id in range(199) if token_id not in PREFIX)
    expected = model.greedy(PROMPTS[4], 10)
    assert poison not in expected
    sick = model.with_tensor(
        0, "model.embed_tokens.weight", lambda tensor: tensor[poison].fill_(float("nan"))
    )
    runs = driver()
    runs.load(sick)
    runs.add("bad", [*PREFIX, poison, *PREFIX])
    runs.finish()
    assert runs.outputs["bad"].code == "engine_failed"
    for name in ("good", "second"):
        runs.add(name, PROMPTS[4], max_tokens=10)
        runs.step()
    outputs = runs.finish()
    assert outputs["good"] == outputs["second"] == expected


def test_an_overdue_request_ends_in_the_next_step_whoever_has_the_turn(driver, checkpoint):
    runs = driver()
    runs.load(checkpoint("llama"), "i")
    runs.load(checkpoint("qwen2"), "j")
    runs.add("a", PROMPTS[4], instance="i")
    runs.add("b", PROMPTS[5], instance="j", max_tokens=60)
    sampling = Sampling(seed=0, max_tokens=90, temperature=0.0)
    runs.engine.add(
        RequestId("late"), 1, InstanceId("i"), PROMPTS[4], [], sampling, deadline_s=0.05
    )
    runs.outputs["late"] = type(runs.outputs["a"])([])
    began_s = []
    while runs.outputs["late"].finish is None:
        began_s.append(runs.engine._monotonic_s())
        runs.step()
    # Each look at this clock moves it: the step before the last one began in time.
    assert began_s[-2] < 0.05 <= began_s[-1] + 0.005
    assert (runs.outputs["late"].finish, runs.outputs["late"].code) == (
        FinishReason.ERROR,
        "deadline_exceeded",
    )
    outputs = runs.finish()
    assert outputs["a"] == checkpoint("llama").greedy(PROMPTS[4], 24)
    assert outputs["a"][: len(outputs["late"])] == outputs["late"] != []
    assert outputs["b"] == checkpoint("qwen2").greedy(PROMPTS[5], 60)
