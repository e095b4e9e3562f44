"""Attempts that are refused or lost: another one goes on with the same tokens, as often as the
rules allow.
"""

import asyncio

import openai
import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.common.messages.tokens import SubmitReply, TokenEntry
from pilotlight.gateway.serving import requests as requests_module
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
PROMPT = {"model": "fox", "prompt": "x", "max_tokens": 99}


async def text_of(stream):
    return "".join([chunk.choices[0].text async for chunk in stream])


@pytest.mark.parametrize("delivered", [0, 1, 7])
async def test_worker_dies_and_another_goes_on(world, delivered):
    first = await world.worker("w0")
    first.post = lambda ran: ran.entries[:delivered]
    asking = asyncio.create_task(world.client.completions.create(**PROMPT))
    await first.until(lambda: len(first.submits) == 1)
    second = await world.worker("w1")
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 2)
    await first.die()
    await first.declare_dead()
    answer = await asking
    assert answer.choices[0].text == ANSWER
    assert answer.usage.completion_tokens == len(world.ids(ANSWER))
    resumed = second.submits[0]
    assert resumed.output_ids == world.ids(ANSWER)[:delivered]
    assert resumed.attempt > first.submits[0].attempt
    assert resumed.sampling == first.submits[0].sampling


@pytest.mark.parametrize("code", ["engine_failed", "device_failed"])
async def test_engine_fails_in_mid_stream(world, code):
    worker = await world.worker()
    ids = world.ids(ANSWER)

    def script(submit):
        if submit.output_ids:
            return entries_of(submit, ids)
        key = {"request_id": submit.request_id, "attempt": submit.attempt}
        failed = TokenEntry(
            seq=4, token_ids=[], finish=FinishReason.ERROR, code=code, message="gone", **key
        )
        return [*entries_of(submit, ids)[:4], failed]

    worker.script = script
    stream = await world.client.completions.create(**PROMPT, stream=True)
    assert await text_of(stream) == ANSWER
    assert [len(submit.output_ids) for submit in worker.submits] == [0, 4]


def fails_at(world, cuts, code="engine_failed"):
    """A script that fails at each of these positions, once."""
    ids, left = world.ids(ANSWER), sorted(cuts)

    def script(submit):
        start = len(submit.output_ids)
        cut = next((cut for cut in left if cut > start), None)
        if cut is None:
            return entries_of(submit, ids)
        left.remove(cut)
        key = {"request_id": submit.request_id, "attempt": submit.attempt}
        failed = TokenEntry(
            seq=cut, token_ids=[], finish=FinishReason.ERROR, code=code, message="gone", **key
        )
        return [*entries_of(submit, ids)[: cut - start], failed]

    return script


async def test_cuts_within_a_character_and_within_stop_strings_show_nowhere(world):
    ids, decode = world.ids(ANSWER), world.entry.text.tokenizer.decode
    within_emoji, within_possible_stop = [
        cut for cut in range(1, len(ids)) if decode(ids[:cut]).endswith("\N{REPLACEMENT CHARACTER}")
    ]
    within_stop = next(cut for cut in range(1, len(ids)) if decode(ids[:cut]).endswith("好"))
    assert "over na" in decode(ids[:within_possible_stop])
    workers = [await world.worker(f"w{number}") for number in range(4)]
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 4)
    ask = {**PROMPT, "stop": ["over naïvely", "好 d"], "logprobs": 1, "seed": 7}
    undisturbed = await world.client.completions.create(**ask)
    script = fails_at(world, [within_emoji, within_possible_stop, within_stop])
    for worker in workers:
        worker.script = script
    disturbed = await world.client.completions.create(**ask)
    assert sum(len(worker.submits) for worker in workers) == 1 + 4
    assert disturbed.choices == undisturbed.choices
    assert disturbed.usage == undisturbed.usage
    assert disturbed.choices[0].text == ANSWER.partition("好 d")[0]
    assert disturbed.choices[0].finish_reason == "stop"
    assert len(disturbed.choices[0].logprobs.token_logprobs) == disturbed.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_resumes_end_the_request(world, stream):
    workers = [await world.worker(f"w{number}") for number in range(4)]
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 4)
    script = fails_at(world, range(1, 20))
    for worker in workers:
        worker.script = script
    response = await world.http.post("/v1/completions", json={**PROMPT, "stream": stream})
    assert sum(len(worker.submits) for worker in workers) == 4
    if stream:
        assert response.status_code == 200
        assert response.text.strip().split("\n\n")[-1].startswith("event: error\ndata: ")
    else:
        assert response.status_code == 503
    assert "engine_failed" in response.text
    assert "given up after 4 lost attempts" in response.text


async def test_whose_instance_makes_room_for_others_waits_anew_however_often(world):
    """It is no loss, and the time in which it was served gives it no claim over requests that
    waited meanwhile.
    """
    worker = await world.worker("w0")
    await world.until(lambda: world.serving.fleet.serving(world.entry.model.name))
    undisturbed = await world.client.completions.create(**PROMPT, seed=7)
    worker.script = fails_at(world, range(1, 8), "not_loaded")
    clock, queue, since_s = SystemClock(), world.serving.queue, set()
    told = queue.on_change

    def on_change():
        since_s.update(round(clock.monotonic_s() - one.oldest_age_s, 2) for one in queue.demand())
        told()

    queue.on_change = on_change
    disturbed = await world.client.completions.create(**PROMPT, seed=7)
    assert disturbed.choices == undisturbed.choices
    assert len(worker.submits) == 1 + 8
    assert len(since_s) >= 7


async def test_refusals_after_a_loss_do_not_wait_for_ever(make_world):
    world = await make_world(hold_timeout_s=0.4, hold_slo_factor=0.0)
    worker = await world.worker()
    worker.script = fails_at(world, [2])
    worker.refuse = []
    worker.post = lambda ran: (
        worker.refuse.extend([SubmitReply(accepted=False, code="queue_full", message="full")] * 999)
        or ran.entries
    )
    response = await world.http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert response.text.strip().split("\n\n")[-1].startswith("event: error\ndata: ")


async def test_a_longer_limit_elsewhere_makes_no_answer_longer(world):
    first, second = await world.worker("w0"), await world.worker("w1")
    first.kv_capacity_tokens, second.kv_capacity_tokens = 18, 400
    for worker in (first, second):
        await worker.report()
    fleet = world.serving.fleet
    await world.until(
        lambda: (
            fleet.kv_capacity_tokens(first.instance) == 18
            and fleet.kv_capacity_tokens(second.instance) == 400
        )
    )
    script = fails_at(world, [2])
    for worker in (first, second):
        worker.script = script
    answer = await world.client.completions.create(model="fox", prompt=[5] * 10)
    limits = [
        submit.sampling.max_tokens
        for submit in (*first.submits, *second.submits)
        if not submit.output_ids
    ]
    resumed = [
        submit.sampling.max_tokens
        for submit in (*first.submits, *second.submits)
        if submit.output_ids
    ]
    assert resumed[0] <= limits[0]
    assert answer.usage.completion_tokens == min(resumed[0], len(world.ids(ANSWER)))


async def test_too_many_losses_end_the_request(world):
    worker = await world.worker()
    worker.script = lambda submit: [
        TokenEntry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            seq=0,
            token_ids=[],
            finish=FinishReason.ERROR,
            code="engine_failed",
            message="it always fails",
        )
    ]
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client.completions.create(**PROMPT)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_failed")
    assert len(worker.submits) == 3


async def test_error_after_the_first_byte_is_an_event(world):
    worker = await world.worker()
    ids = world.ids(ANSWER)

    def script(submit):
        key = {"request_id": submit.request_id, "attempt": submit.attempt}
        failed = TokenEntry(
            seq=2,
            token_ids=[],
            finish=FinishReason.ERROR,
            code="invalid_request",
            message="cannot",
            **key,
        )
        return [*entries_of(submit, ids)[:2], failed]

    worker.script = script
    response = await world.http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert "[DONE]" not in response.text
    with pytest.raises(openai.APIError, match="cannot"):
        await text_of(await world.client.completions.create(**PROMPT, stream=True))


async def test_refused_submit_goes_elsewhere(world):
    first = await world.worker("w0")
    first.refuse = [
        SubmitReply(accepted=False, code="not_loaded", message="no", retry_after_s=30.0)
    ] * 3
    second = await world.worker("w1")
    for _ in range(3):
        assert (await world.client.completions.create(**PROMPT)).choices[0].text == ANSWER
    assert len(first.submits) + len(second.submits) == 3
    assert second.submits


async def test_refused_by_all_is_held_and_tried_again(world):
    worker = await world.worker()
    worker.refuse = [
        SubmitReply(accepted=False, code="queue_full", message="full", retry_after_s=0.1)
    ] * 2
    response = await world.http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert ": pilotlight" not in response.text, "its turn came before there was much to tell"
    assert worker.submits[0].attempt == 3


async def test_who_waits_for_long_while_an_instance_serves_is_told(world, monkeypatch):
    monkeypatch.setattr(requests_module, "SOON_S", 0.01)
    worker = await world.worker()
    worker.refuse = [
        SubmitReply(accepted=False, code="queue_full", message="full", retry_after_s=0.3)
    ]
    response = await world.http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert ": pilotlight queue=0" in response.text
    assert worker.submits[0].attempt == 2


async def test_caller_error_of_a_worker_is_final(world):
    worker = await world.worker()
    worker.refuse = [
        SubmitReply(
            accepted=False, code="context_length_exceeded", message="too long for the granted room"
        )
    ]
    with pytest.raises(openai.BadRequestError, match="granted room"):
        await world.client.completions.create(**PROMPT)


async def test_draining_instance_gets_nothing(world):
    first = await world.worker("w0")
    second = await world.worker("w1")
    await world.client.completions.create(**PROMPT)
    await first.ready(InstanceState.DRAINING)
    before = len(first.submits)
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 1)
    for _ in range(3):
        await world.client.completions.create(**PROMPT)
    assert len(first.submits) == before
    assert len(second.submits) >= 3


async def test_an_open_limit_is_cut_to_the_room_of_the_instance(world):
    worker = await world.worker()
    worker.kv_capacity_tokens = 50
    await worker.report()
    await world.until(lambda: world.serving.fleet.kv_capacity_tokens(worker.instance) == 50)
    await world.client.chat.completions.create(
        model="fox", messages=[{"role": "user", "content": "x"}]
    )
    assert worker.submits[0].sampling.max_tokens == 50 - len(worker.submits[0].prompt_ids)
    await world.client.completions.create(model="fox", prompt=[5] * 10, max_tokens=100)
    assert worker.submits[1].sampling.max_tokens == 100
    worker.refuse = [
        SubmitReply(accepted=False, code="no_room", message="110 tokens do not fit into 50")
    ]
    with pytest.raises(openai.RateLimitError, match="do not fit"):
        await world.client.completions.create(model="fox", prompt=[5] * 10, max_tokens=100)
