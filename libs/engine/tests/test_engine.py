"""The facade: requests from add to finish."""

import pytest
import torch

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.errors import (
    BadRequest,
    ContextTooLong,
    EngineError,
    NoRoom,
    StageBusy,
    UnknownInstance,
)
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason, Sampling

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234}


@pytest.fixture
def runs(driver, checkpoint):
    loaded = driver()
    loaded.load(checkpoint("llama"))
    return loaded


@pytest.fixture
def run_one(driver, checkpoint):
    """The output of one request alone on a fresh engine."""

    def run_one(prompt, output_ids=(), **sampling):
        fresh = driver()
        fresh.load(checkpoint("llama"))
        fresh.add("a", prompt, output_ids, **sampling)
        fresh.finish()
        return fresh.outputs["a"]

    return run_one


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_resumed_is_as_undisturbed(sampling, run_one, prompts):
    whole = run_one(prompts[1], **sampling)
    assert len(whole.token_ids) == 24
    for kept in (1, 9, 23):
        assert run_one(prompts[1], whole.token_ids[:kept], **sampling) == whole


def test_resumed_with_logprobs_reports_those_of_new_tokens(run_one, prompts):
    whole = run_one(prompts[1], logprobs=True, **SAMPLED)
    resumed = run_one(prompts[1], whole.token_ids[:10], logprobs=True, **SAMPLED)
    assert resumed.logprobs == pytest.approx(whole.logprobs[10:], abs=1e-10)


def test_seeds(run_one, prompts):
    first = run_one(prompts[0], temperature=1.0, seed=1)
    assert run_one(prompts[0], temperature=1.0, seed=1) == first
    assert run_one(prompts[0], temperature=1.0, seed=2).token_ids != first.token_ids


def test_logprobs_are_those_of_transformers(run_one, prompts, checkpoint):
    output = run_one(
        prompts[1], logprobs=True, top_logprobs=3, temperature=1.0, logit_bias=((7, 5.0),)
    )
    logits = checkpoint("llama").logits([*prompts[1], *output.token_ids])
    rows = logits.log_softmax(-1)[len(prompts[1]) - 1 : -1]
    expected = rows.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-10)
    for told, row in zip(output.top_logprobs, rows, strict=True):
        best = row.topk(3)
        assert [token_id for token_id, _ in told] == best.indices.tolist()
        assert [logprob for _, logprob in told] == pytest.approx(best.values.tolist(), abs=1e-10)


def test_a_stop_token_ends_the_output_and_is_not_part_of_it(run_one, prompts):
    whole = run_one(prompts[1]).token_ids
    stop = next(
        token_id
        for index, token_id in enumerate(whole)
        if index > 4 and token_id not in whole[:index]
    )
    stopped = run_one(prompts[1], stop_token_ids=(stop,), logprobs=True)
    assert stopped.finish is FinishReason.STOP
    assert stopped.token_ids == whole[: whole.index(stop)]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_stop_tokens_that_the_vocabulary_does_not_have_never_come(run_one, prompts):
    assert run_one(prompts[1], stop_token_ids=(199, 10**9), min_tokens=3) == run_one(prompts[1])


def test_a_prompt_may_hold_stop_tokens(run_one, prompts):
    assert (
        run_one(prompts[1], stop_token_ids=(prompts[1][3],), max_tokens=1).finish
        is not FinishReason.ERROR
    )


def test_max_tokens_counts_resumed_positions(run_one, prompts):
    whole = run_one(prompts[1])
    assert (len(whole.token_ids), whole.finish) == (24, FinishReason.LENGTH)
    ended = run_one(prompts[1], whole.token_ids, max_tokens=24)
    assert (ended.token_ids, ended.finish) == (whole.token_ids, FinishReason.LENGTH)


def test_the_context_ends_a_request(run_one, checkpoint, prompts):
    context = checkpoint("llama").spec.max_context_tokens
    output = run_one((prompts[2] * 4)[: context - 5], max_tokens=100)
    assert (len(output.token_ids), output.finish) == (5, FinishReason.LENGTH)


def test_an_abort_leaves_the_others_as_they_are(runs, run_one, prompts):
    alone = [run_one(prompt, **SAMPLED).token_ids for prompt in prompts]
    for index, prompt in enumerate(prompts):
        runs.add(str(index), prompt, **SAMPLED)
    for _ in range(5):
        runs.step()
    runs.engine.abort(RequestId("1"), 1)
    runs.engine.abort(RequestId("1"), 1)
    runs.engine.abort(RequestId("0"), 2)
    runs.step()
    assert runs.outputs["1"].finish is FinishReason.CANCELLED
    outputs = runs.finish()
    assert outputs["1"] == alone[1][:5]
    assert [outputs[name] for name in ("0", "2", "3")] == [alone[0], alone[2], alone[3]]


def test_an_abort_frees_a_place_in_the_queue_too(driver, checkpoint, prompts):
    runs = driver()
    runs.load(checkpoint("llama"), kv_tokens=64)
    for name in ("first", "second", "third"):
        runs.add(name, prompts[1], max_tokens=30)
    first = runs.step()
    assert (first.running, first.waiting) == (1, 2)
    runs.engine.abort(RequestId("second"), 1)
    second = runs.step()
    assert (second.running, second.waiting) == (2, 0)
    outputs = runs.finish()
    assert outputs["second"] == []
    assert outputs["third"] == outputs["first"]


def test_many_requests_share_little_room(driver, checkpoint, prompts):
    model = checkpoint("qwen2")
    expected = [model.greedy(prompt, 12) for prompt in prompts]
    runs = driver(BatchLimits(step_tokens=20, running=20))
    runs.load(model, kv_tokens=160)
    for index in range(12):
        runs.add(str(index), prompts[index % 4], max_tokens=12)
    outputs = runs.finish()
    assert [outputs[str(index)] for index in range(12)] == expected * 3
    assert 1 < runs.most_running < 12


def test_what_has_requests_in_flight_is_dropped_but_not_unloaded(driver, checkpoint, prompts):
    runs = driver()
    runs.load(checkpoint("llama"), "i")
    runs.load(checkpoint("qwen2"), "j")
    runs.add("a", prompts[1], instance="i")
    runs.add("b", prompts[1], instance="j")
    for _ in range(6):
        runs.step()
    with pytest.raises(StageBusy, match="1 requests in flight"):
        runs.engine.unload(InstanceId("i"))
    runs.engine.drop(InstanceId("i"))
    runs.capacity_tokens //= 2
    outputs = runs.finish()
    assert runs.outputs["a"].finish is FinishReason.CANCELLED
    assert outputs["a"] == checkpoint("llama").greedy(prompts[1], 3), "the two took turns"
    assert outputs["b"] == checkpoint("qwen2").greedy(prompts[1], 24)
    with pytest.raises(UnknownInstance):
        runs.add("c", prompts[1], instance="i")
    runs.engine.unload(InstanceId("j"))
    assert runs.engine.step().kv_free_tokens == 0


def test_models_take_turns_however_much_each_has_to_do(driver, checkpoint, prompts):
    runs, kinds = driver(BatchLimits(step_tokens=16, running=16)), ("llama", "qwen2", "gemma3")
    for kind in kinds:
        runs.load(checkpoint(kind), kind)
    for index in range(9):
        runs.add(f"long {index}", prompts[2], instance="llama")
    for kind in kinds[1:]:
        runs.add(kind, prompts[0], instance=kind, max_tokens=10)
    for _ in range(30):
        runs.step()
    outputs = runs.outputs
    assert [outputs[kind].token_ids for kind in kinds[1:]] == [
        checkpoint(kind).greedy(prompts[0], 10) for kind in kinds[1:]
    ]
    runs.finish()
    assert {tuple(output.token_ids) for name, output in outputs.items() if "long" in name} == {
        tuple(checkpoint("llama").greedy(prompts[2], 24))
    }


def test_the_first_prefill_is_reported_once_for_each_stage(driver, checkpoint, prompts):
    runs = driver(BatchLimits(step_tokens=16, running=16))
    runs.load(checkpoint("llama"), "i")
    runs.load(checkpoint("qwen2"), "j")
    runs.add("gone", prompts[0], instance="i")
    runs.engine.abort(RequestId("gone"), 1)
    runs.add("a", prompts[2], instance="i", max_tokens=2)
    runs.add("b", prompts[0], instance="j", max_tokens=2)
    runs.finish()
    runs.add("c", prompts[0], instance="i", max_tokens=2)
    runs.finish()
    spans = {(first.instance_id, first.request_id): first for first in runs.first_prefills}
    assert spans.keys() == {("i", "a"), ("j", "b")}
    a, b = spans["i", "a"], spans["j", "b"]
    assert a.start_s < b.start_s < b.end_s < a.end_s, (
        "a's prompt takes five steps, b's one in between"
    )


def test_step_time_is_the_steps(runs, prompts):
    runs.add("a", prompts[0])
    assert runs.step().step_time_s == pytest.approx(
        0.003
    )  # four looks at the clock, a millisecond apart
    runs.finish()
    idle = runs.step()
    assert (idle.produced, idle.first_prefills) == ((), ())


NAN = float("nan")


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ([], {}, BadRequest, "the prompt is empty"),
        ([3, 199], {}, BadRequest, "token id 199 is outside the vocabulary of 199"),
        ([3, -1], {}, BadRequest, "token id -1 "),
        ([3], {"output_ids": (5, 199)}, BadRequest, "token id 199 "),
        ([3], {"max_tokens": 0}, BadRequest, "max_tokens 0 "),
        ([3], {"min_tokens": -1}, BadRequest, "min_tokens -1 "),
        ([3], {"temperature": -1.0}, BadRequest, "temperature -1.0 "),
        ([3], {"temperature": NAN}, BadRequest, "temperature nan "),
        ([3], {"top_p": 0.0}, BadRequest, "top_p 0.0 "),
        ([3], {"top_p": 1.5}, BadRequest, "top_p 1.5 "),
        ([3], {"top_k": -1}, BadRequest, "top_k -1 "),
        ([3], {"min_p": 1.5}, BadRequest, "min_p 1.5 "),
        ([3], {"presence_penalty": 2.5}, BadRequest, "presence_penalty 2.5 "),
        ([3], {"frequency_penalty": NAN}, BadRequest, "frequency_penalty nan "),
        ([3], {"repetition_penalty": 0.0}, BadRequest, "repetition_penalty 0.0 "),
        ([3], {"top_logprobs": 21}, BadRequest, "top_logprobs 21 "),
        ([3], {"logit_bias": ((199, 1.0),)}, BadRequest, "logit_bias: token id 199 "),
        ([3], {"logit_bias": ((3, NAN),)}, BadRequest, "logit_bias: nan "),
        ([3], {"logit_bias": ((3, 1.0), (3, 2.0))}, BadRequest, "one of them twice"),
        (
            [3] * 256,
            {},
            ContextTooLong,
            "the prompt has 256 tokens; with output, the model's context holds 256",
        ),
        (
            [3] * 60,
            {"max_tokens": 37},
            NoRoom,
            "come to 97 tokens; the KV cache of this instance holds 96",
        ),
        ([3], {"instance": "gone"}, UnknownInstance, "gone is not held here"),
    ],
)
def test_refused_requests(prompt, sampling, error, message, driver, checkpoint):
    runs = driver()
    runs.load(checkpoint("llama"), kv_tokens=96)
    runs.add("running", [3] * 5, max_tokens=8)
    runs.step()
    with pytest.raises(EngineError) as refused:
        runs.add("a", prompt, **sampling)
    assert type(refused.value) is error
    assert message in refused.value.message
    runs.finish()
    assert runs.outputs["running"].token_ids == checkpoint("llama").greedy([3] * 5, 8)
    runs.add("a", [3] * 60, max_tokens=36)
    runs.finish()


def test_a_request_runs_once_at_a_time(runs, prompts):
    runs.add("a", prompts[0])
    with pytest.raises(BadRequest, match="here already"):
        runs.add("a", prompts[0])
    runs.finish()
    runs.add("a", prompts[0])
    runs.finish()


@pytest.mark.parametrize("loaded", [True, False])
def test_only_a_whole_model_serves(loaded, driver, checkpoint, prompts):
    runs, spec = driver(), checkpoint("llama").spec
    if loaded:
        runs.load(checkpoint("llama"), "half", stage=Stage(0, 2))
    else:
        runs.engine.begin_load(InstanceId("half"), spec, Stage(0, 2), spec.dtype, 1 << 22)
    assert not runs.engine.serves(InstanceId("half"))
    with pytest.raises(UnknownInstance, match="only layers"):
        runs.add("a", prompts[0], instance="half")


def test_a_token_with_nan_ends_its_request_alone(driver, checkpoint, prompts):
    model = checkpoint("llama", 1)
    poison = next(
        token_id for token_id in range(199) if not any(token_id in prompt for prompt in prompts)
    )
    sick = model.with_tensor(
        0, "model.embed_tokens.weight", lambda tensor: tensor[poison].fill_(float("nan"))
    )
    expected = model.greedy(prompts[1], 24)
    assert poison not in expected
    runs = driver()
    runs.load(sick)
    runs.add("bad", [*prompts[0], poison])
    runs.add("good", prompts[1])
    outputs = runs.finish()
    assert (runs.outputs["bad"].finish, runs.outputs["bad"].code) == (
        FinishReason.ERROR,
        "engine_failed",
    )
    assert outputs["good"] == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_with_bad_weights_leaves_the_other_models_alone(bad, driver, checkpoint, prompts):
    runs = driver()
    runs.load(
        checkpoint("llama").with_tensor(
            2, "model.layers.1.mlp.up_proj.weight", lambda tensor: tensor[0].fill_(bad)
        ),
        "sick",
    )
    runs.load(checkpoint("qwen2"), "well")
    for index, prompt in enumerate(prompts):
        runs.add(f"sick{index}", prompt, instance="sick", temperature=1.0)
        runs.add(f"well{index}", prompt, instance="well", max_tokens=4)
    outputs = runs.finish()
    assert [outputs[f"well{index}"] for index in range(4)] == [
        checkpoint("qwen2").greedy(prompt, 4) for prompt in prompts
    ]
    for index in range(4):
        failed = runs.outputs[f"sick{index}"]
        assert (failed.token_ids, failed.finish, failed.code) == (
            [],
            FinishReason.ERROR,
            "engine_failed",
        )
        assert failed.message == "the logits of output token 0 are not finite"
    assert not any(first.instance_id == "sick" for first in runs.first_prefills)


def test_sampling_is_not_disturbed_by_other_settings_in_the_batch(runs, run_one, prompts):
    settings = [
        {"temperature": 0.0},
        SAMPLED,
        {"temperature": 1.3, "top_p": 0.5, "seed": 9},
        {"top_k": 3, "temperature": 2.0},
    ]
    for index, sampling in enumerate(settings):
        runs.add(str(index), prompts[index], **sampling)
    outputs = runs.finish()
    for index, sampling in enumerate(settings):
        assert run_one(prompts[index], **sampling).token_ids == outputs[str(index)]


def test_attempt_and_position_are_reported(runs, prompts):
    runs.engine.add(
        RequestId("x"), 3, InstanceId("i"), prompts[0], [], Sampling(seed=-5, max_tokens=2)
    )
    produced = [entry for _ in range(2) for entry in runs.engine.step().produced]
    assert [(entry.attempt, entry.position, len(entry.token_ids)) for entry in produced] == [
        (3, 0, 1),
        (3, 1, 1),
    ]
