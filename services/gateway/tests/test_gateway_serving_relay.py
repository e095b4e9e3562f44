"""Running requests on workers that lose, repeat and reorder messages: no token is repeated or
skipped.
"""

import asyncio
import dataclasses
import random

import pytest
from msgspec.structs import replace

from pilotlight.common.errors import BadRequest
from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.gateway.serving.testing import Ran, entries_of
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
PROMPT = {"model": "fox", "prompt": "x", "max_tokens": 99}


def mangle(entries, rng):
    """Drop, repeat and reorder; the last entry survives somewhere, so that no silence has to be
    waited for.
    """
    kept = [entry for entry in entries[:-1] if rng.random() > 0.3]
    kept += [entry for entry in kept if rng.random() < 0.2]
    if rng.random() < 0.5:
        rng.shuffle(kept)
    return [*kept, entries[-1]]


async def text_of(stream):
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_any_loss_gives_the_right_text(world):
    worker = await world.worker()
    for seed in range(25):
        rng = random.Random(seed)
        worker.post = lambda ran, rng=rng: mangle(ran.entries, rng)
        stream = await world.client.completions.create(**PROMPT, stream=True)
        assert await text_of(stream) == ANSWER, seed
    assert worker.resends


async def test_a_lost_end_is_asked_for(world):
    worker = await world.worker()
    worker.post = lambda ran: ran.entries[:-3]
    answer = await world.client.completions.create(**PROMPT)
    assert answer.choices[0].text == ANSWER
    assert worker.resends


async def test_everything_is_acknowledged_and_done(world):
    worker = await world.worker()
    await world.client.completions.create(**PROMPT)
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.done)
    assert ran.acked_seq == len(world.ids(ANSWER))
    assert not ran.cancelled
    assert world.serving.relay.running == 0


async def test_acknowledged_while_it_runs(world):
    worker = await world.worker()
    worker.post = lambda ran: ran.entries[:5]
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER), finish=None)[:5]
    stream = await world.client.completions.create(**PROMPT, stream=True)
    first = await anext(aiter(stream))
    assert first.choices[0].text
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.acked_seq == 5)
    await stream.close()
    await worker.until(lambda: ran.cancelled and ran.done)


async def test_other_attempts_and_strangers_are_ignored(world):
    worker = await world.worker()

    def post(ran):
        key = {"request_id": ran.submit.request_id, "attempt": ran.submit.attempt + 1}
        yield TokenEntry(seq=0, token_ids=[9, 9, 9], finish=FinishReason.STOP, **key)
        yield TokenEntry(seq=0, token_ids=[9], request_id="req-stranger", attempt=1)
        yield from ran.entries

    worker.post = post
    assert (await world.client.completions.create(**PROMPT)).choices[0].text == ANSWER


async def test_client_leaves_in_mid_stream(world):
    worker = await world.worker()
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER), finish=None)
    stream = await world.client.completions.create(**PROMPT, stream=True)
    await anext(aiter(stream))
    await stream.close()
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.cancelled)
    assert world.serving.requests.live == 0
    assert [row["status"] for row in world.usage.rows] == ["cancelled"]


async def test_client_leaves_while_its_request_waits_to_be_resumed(world):
    """The worker that ran it is gone, and no other is there yet: nothing of it must run when one
    comes.
    """
    first = await world.worker("w0")
    first.script = lambda submit: entries_of(submit, world.ids(ANSWER), finish=None)[:5]
    stream = await world.client.completions.create(**PROMPT, stream=True)
    await anext(aiter(stream))
    (ran,) = first.ran.values()
    await first.until(lambda: ran.acked_seq == 5)
    await first.die()
    await first.declare_dead()
    await world.until(lambda: world.serving.queue.held == 1)
    await stream.close()
    await world.until(lambda: world.serving.queue.held == 0 and world.serving.requests.live == 0)
    assert world.serving.relay.running == 0
    assert [(row["status"], row["output_tokens"]) for row in world.usage.rows] == [("cancelled", 5)]
    second = await world.worker("w1")
    assert (await world.client.completions.create(**PROMPT)).choices[0].text == ANSWER
    assert [submit.output_ids for submit in second.submits] == [[]]


async def with_moved_lead(world):
    """A request whose first five tokens came from one worker of its instance before another one
    took the lead.
    """
    first, second = await world.worker("w0"), await world.worker("w1", ready=False)
    first.post = lambda ran: ran.entries[:5]
    stream = await world.client.completions.create(**PROMPT, stream=True)
    await anext(aiter(stream))
    (key,) = first.ran
    await first.until(lambda: first.ran[key].acked_seq == 5)
    second.ran[key] = Ran(first.ran[key].submit, first.ran[key].entries)
    first.instance = dataclasses.replace(first.instance, placements=second.instance.placements)
    await first.ready()
    lead_of = world.serving.fleet.lead_of
    await world.until(lambda: lead_of(first.instance.instance_id) == second.worker_id)
    return first, second, stream, key


async def test_acknowledgements_and_resends_follow_the_lead(world):
    first, second, stream, key = await with_moved_lead(world)
    await first.die()
    await first.declare_dead()
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert ANSWER.endswith(text)
    assert [resend.from_seq for resend in second.resends][:1] == [5]
    assert not second.submits, "it is the same attempt"
    await second.until(lambda: second.ran[key].done)
    assert second.ran[key].acked_seq == len(world.ids(ANSWER))
    assert [row["output_tokens"] for row in world.usage.rows] == [len(world.ids(ANSWER))]


async def test_a_cancel_follows_the_lead(world):
    first, second, stream, key = await with_moved_lead(world)
    second.answers_resend = False
    await stream.close()
    for worker in (first, second):
        await worker.until(lambda worker=worker: worker.ran[key].cancelled and worker.ran[key].done)


async def test_log_probabilities_that_are_not_finite_survive_a_resend(world):
    """JSON cannot say them, msgpack can: a client sees the same whichever way they came."""
    worker = await world.worker()
    values = [float("-inf"), float("nan"), -0.5, None]

    def script(submit):
        entries = entries_of(submit, world.ids(ANSWER))
        return [
            replace(entry, logprobs=[values[entry.seq % 4]] if entry.token_ids else None)
            for entry in entries
        ]

    worker.script = script
    whole = await world.client.completions.create(**PROMPT, logprobs=1)
    assert not worker.resends
    worker.post = lambda ran: [*ran.entries[:2], ran.entries[-1]]
    again = await world.client.completions.create(**PROMPT, logprobs=1)
    assert worker.resends
    assert len(worker.submits) == 2
    assert whole.choices[0].logprobs.token_logprobs[:4] == [-9999.0, -9999.0, -0.5, -9999.0]
    assert again.choices == whole.choices


async def test_client_leaves_before_its_whole_answer(world):
    worker = await world.worker()
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER), finish=None)
    asking = asyncio.create_task(world.http.post("/v1/completions", json=PROMPT))
    await worker.until(lambda: len(worker.submits) == 1)
    asking.cancel()
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.cancelled)


async def test_a_resend_that_is_out_of_date_when_it_arrives(world):
    """What it asks for has come meanwhile, and was acknowledged: that is no loss."""
    worker = await world.worker()
    worker.post = lambda ran: [ran.entries[0], *ran.entries[2:]]

    async def too_late(resend):
        worker.resends.append(resend)
        (ran,) = worker.ran.values()
        await worker.send(ran, ran.entries)
        await world.until(
            lambda: all(
                attempt.log.next_seq > resend.from_seq
                for attempt in world.serving.relay._attempts.values()
            )
        )
        raise BadRequest("asked from 1, but only [17, 17) is kept")

    await worker.die()
    worker._on_resend = too_late
    await worker.start()
    assert (await world.client.completions.create(**PROMPT)).choices[0].text == ANSWER
    assert len(worker.submits) == 1


async def test_worker_that_forgot_the_request(world):
    worker = await world.worker()
    ids = world.ids(ANSWER)
    worker.post = lambda ran: (
        ran.entries if ran.submit.output_ids else [ran.entries[0], *ran.entries[2:]]
    )
    worker.answers_resend = False
    assert (await world.client.completions.create(**PROMPT)).choices[0].text == ANSWER
    assert worker.submits[1].output_ids == ids[:1]


async def test_all_tokens_but_not_the_end(world):
    """The worker dies between the last token and the finish: nothing is left to ask for."""
    worker = await world.worker()
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER))[:4]
    asking = asyncio.create_task(world.client.completions.create(**{**PROMPT, "max_tokens": 4}))
    await worker.until(lambda: len(worker.submits) == 1)
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.acked_seq == 4)
    await worker.die()
    await worker.declare_dead()
    answer = await asking
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4


async def test_reconnect_asks_for_what_was_missed(world):
    worker = await world.worker()
    worker.post = lambda ran: ran.entries[:2]
    stream = await world.client.completions.create(**PROMPT, stream=True)
    text = asyncio.create_task(text_of(stream))
    await worker.until(lambda: bool(worker.submits))
    await world.until(lambda: world.serving.relay.running == 1)
    await world.serving.relay._after_reconnect()
    assert await text == ANSWER


async def test_a_submit_whose_answer_is_lost(world):
    """Its tokens come all the same: it was accepted."""
    worker = await world.worker()
    taken = worker._on_submit

    async def silent(submit):
        await taken(submit)
        await asyncio.Event().wait()

    await worker.die()
    worker._on_submit = silent
    await worker.start()
    answer = await world.client.completions.create(**PROMPT)
    assert answer.choices[0].text == ANSWER
    assert len(worker.submits) == 1
