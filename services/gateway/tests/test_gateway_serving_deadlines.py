"""How long a request may take: what the engine is told, and what the client is, whichever side
notices first.
"""

import asyncio

import openai
import pytest

from pilotlight.common.messages.tokens import SubmitReply, TokenEntry
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
PROMPT = {"model": "fox", "prompt": "x", "max_tokens": 99}


async def endless(world, name="w0"):
    """A worker whose engine never ends anything by itself, as one of a release that knows no
    deadlines.
    """
    worker = await world.worker(name)
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER), finish=None)
    return worker


def ended_late(submit, seq):
    """What a worker says of a request whose deadline has passed on its engine's clock."""
    return TokenEntry(
        request_id=submit.request_id,
        attempt=submit.attempt,
        seq=seq,
        token_ids=[],
        finish=FinishReason.ERROR,
        code="deadline_exceeded",
        message=f"the deadline passed after {seq} output tokens",
    )


async def test_the_worker_hears_how_much_time_is_left(make_world):
    world = await make_world(request_timeout_s=100.0)
    worker = await world.worker()
    await world.client.completions.create(**PROMPT)
    await world.client.completions.create(**PROMPT, extra_body={"timeout_s": 20.0})
    await world.client.completions.create(**PROMPT, extra_body={"timeout_s": 1e9})
    first, second, third = [submit.deadline_in_s for submit in worker.submits]
    assert 90 < first < 100
    assert 15 < second < 20, "the client's limit"
    assert 90 < third < 100, "the gateway's, which a client cannot stretch"


async def test_all_answers_to_a_request_have_its_deadline(world):
    worker = await world.worker()
    await world.client.completions.create(**PROMPT, n=3, extra_body={"timeout_s": 20.0})
    assert [15 < submit.deadline_in_s < 20 for submit in worker.submits] == [True] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateway_ends_what_its_worker_does_not(world, stream):
    worker = await endless(world)
    response = await world.http.post(
        "/v1/completions", json={**PROMPT, "timeout_s": 1.0, "stream": stream}
    )
    if stream:
        assert response.status_code == 200
        assert response.text.strip().split("\n\n")[-1].startswith("event: error\ndata: ")
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "deadline_exceeded"
    assert f"not complete within 1 s; it had {len(world.ids(ANSWER))} tokens" in response.text
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.cancelled)
    (row,) = world.usage.rows
    assert (row["status"], row["output_tokens"]) == ("deadline_exceeded", len(world.ids(ANSWER)))


async def test_the_engines_word_ends_the_request_and_is_no_loss(world):
    """Its clock may be ahead of ours: trying elsewhere would only do the work again."""
    workers = [await world.worker(f"w{number}") for number in range(2)]
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 2)
    for worker in workers:
        worker.script = lambda submit: [
            *entries_of(submit, world.ids(ANSWER))[:3],
            ended_late(submit, 3),
        ]
    with pytest.raises(
        openai.InternalServerError, match="not complete within 20 s; it had 3 tokens"
    ) as caught:
        await world.client.completions.create(**PROMPT, extra_body={"timeout_s": 20.0})
    assert (caught.value.status_code, caught.value.code) == (503, "deadline_exceeded")
    assert sum(len(worker.submits) for worker in workers) == 1


async def test_a_held_request_waits_no_longer_than_it_may_take(world):
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client.completions.create(**PROMPT, extra_body={"timeout_s": 0.2})
    assert caught.value.status_code == 503
    assert (world.serving.queue.held, world.serving.requests.live) == (0, 0)


async def test_the_scheduler_hears_of_the_shorter_deadline(world):
    asking = asyncio.create_task(
        world.client.completions.create(**PROMPT, extra_body={"timeout_s": 30.0})
    )
    await world.until(lambda: world.serving.queue.held == 1)
    (demand,) = world.serving.queue.demand()
    assert 20 < demand.deadline_in_s < 30
    await world.worker()
    await asking


async def test_a_resumed_request_has_no_more_time_than_before(world):
    worker = await world.worker()
    ids = world.ids(ANSWER)

    def script(submit):
        if submit.output_ids:
            return entries_of(submit, ids, finish=None)
        return [*entries_of(submit, ids)[:4], failed(submit)]

    def failed(submit):
        key = {"request_id": submit.request_id, "attempt": submit.attempt}
        return TokenEntry(
            seq=4,
            token_ids=[],
            finish=FinishReason.ERROR,
            code="engine_failed",
            message="gone",
            **key,
        )

    worker.script = script
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client.completions.create(**PROMPT, extra_body={"timeout_s": 2.0})
    assert caught.value.code == "deadline_exceeded"
    first, second = [submit.deadline_in_s for submit in worker.submits]
    assert 0 < second < first < 2.0


async def test_refusals_end_with_the_deadline(world):
    worker = await world.worker()
    worker.refuse = [
        SubmitReply(accepted=False, code="queue_full", message="full", retry_after_s=0.01)
    ] * 1000
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client.completions.create(**PROMPT, extra_body={"timeout_s": 0.3})
    assert caught.value.status_code == 503
    assert worker.submits == []


@pytest.mark.parametrize("timeout_s", [0, -1, "soon", True])
async def test_a_limit_that_is_none_is_refused(world, timeout_s):
    response = await world.http.post("/v1/completions", json={**PROMPT, "timeout_s": timeout_s})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout_s"


async def test_what_was_waited_for_an_instance_that_hung_is_not_the_requests_own(make_world):
    """Nothing came of it for longer than it may be held; then its engine was ended, and another has
    to be waited for.
    """
    world = await make_world(hold_timeout_s=1.0, hold_slo_factor=0)
    first = await world.worker("w0")
    first.script = lambda submit: []
    asking = asyncio.create_task(world.client.completions.create(**PROMPT))
    await first.until(lambda: len(first.submits) == 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await asyncio.shield(asking)
    (ran,) = first.ran.values()
    await first.ready(InstanceState.FAILED)
    await world.until(lambda: not world.serving.fleet.serving("fox"))
    key = {"request_id": ran.submit.request_id, "attempt": ran.submit.attempt}
    await first.send(
        ran,
        [
            TokenEntry(
                seq=0,
                token_ids=[],
                finish=FinishReason.ERROR,
                code="engine_failed",
                message="hung",
                **key,
            )
        ],
    )
    await world.until(lambda: world.serving.queue.held == 1)
    second = await world.worker("w1")
    assert (await asking).choices[0].text == ANSWER
    assert second.submits[0].attempt == 2
