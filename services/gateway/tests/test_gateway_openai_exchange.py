"""Several answers to one request: each is a request of its own to the fleet, all of them are one to
the client.
"""

import asyncio
from collections import defaultdict

import openai
import pytest

from pilotlight.common.messages.tokens import SubmitReply, TokenEntry
from pilotlight.gateway.openai.parameters import seed_of_choice
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hello"}]
WORDS = ("ash", "birch 😀", "cedar and more", "naïve 你好 elm", "fir")


def answer_of(submit):
    """What the scripted workers say: it follows from the seed."""
    return f"{submit.sampling.seed} {WORDS[submit.sampling.seed % len(WORDS)]}"


async def seeded(world, name="w0"):
    """A worker whose answers follow from their seeds."""
    worker = await world.worker(name)
    worker.script = lambda submit: entries_of(submit, world.ids(answer_of(submit)))
    return worker


async def streamed(stream):
    """Texts and ends by index, of either kind of stream."""
    texts, ends, rest = defaultdict(str), {}, []
    async for chunk in stream:
        if not chunk.choices:
            rest.append(chunk)
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing follows a choice's end"
            texts[choice.index] += (
                choice.delta.content if hasattr(choice, "delta") else choice.text
            ) or ""
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    return dict(texts), ends, rest


def failure(submit, seq, code):
    return TokenEntry(
        request_id=submit.request_id,
        attempt=submit.attempt,
        seq=seq,
        token_ids=[],
        finish=FinishReason.ERROR,
        code=code,
        message="as told",
    )


def test_seeds_of_choices_stay_what_they_are():
    """A seed that a client has noted gives the same answers with the next release."""
    assert [seed_of_choice(7, number) for number in range(3)] == [
        7,
        6064367806889537054,
        6335935501756667560,
    ]
    assert (
        len({seed_of_choice(seed, number) for seed in range(100) for number in range(16)}) == 1600
    )
    assert all(0 <= seed_of_choice(2**63 - 1, number) < 2**63 for number in range(16))


async def test_chat_in_order_with_its_usage(world):
    worker = await seeded(world)
    answer = await world.client.chat.completions.create(model="fox", messages=MESSAGES, n=4, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    by_id = {submit.request_id: submit for submit in worker.submits}
    main = min(by_id, key=len)
    assert set(by_id) == {main, *(f"{main}-{index}" for index in (1, 2, 3))}
    ordered = [by_id[main], *(by_id[f"{main}-{index}"] for index in (1, 2, 3))]
    assert [submit.sampling.seed for submit in ordered] == [
        seed_of_choice(7, index) for index in range(4)
    ]
    assert [choice.message.content for choice in answer.choices] == [
        answer_of(submit) for submit in ordered
    ]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    prompt_tokens = len(ordered[0].prompt_ids)
    output_tokens = sum(len(world.ids(answer_of(submit))) for submit in ordered)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        prompt_tokens,
        output_tokens,
    )
    (row,) = world.usage.rows
    assert (row["request_id"], row["prompt_tokens"], row["output_tokens"]) == (
        main,
        prompt_tokens,
        output_tokens,
    )
    assert world.serving.requests.live == 0


async def test_stream_has_the_same_answers(world):
    await seeded(world)
    whole = await world.client.chat.completions.create(model="fox", messages=MESSAGES, n=3, seed=7)
    stream = await world.client.chat.completions.create(
        model="fox",
        messages=MESSAGES,
        n=3,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, ends, (usage,) = await streamed(stream)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {0: "stop", 1: "stop", 2: "stop"}
    assert usage.usage == whole.usage


async def test_each_choice_of_a_chat_stream_begins_with_its_role(world):
    await seeded(world)
    stream = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, n=3, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert sorted(chunk.choices[0].index for chunk in chunks if chunk.choices[0].delta.role) == [
        0,
        1,
        2,
    ]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_choice_0_is_what_one_answer_would_be(world):
    await seeded(world)
    alone = await world.client.completions.create(model="fox", prompt="x", max_tokens=99, seed=3)
    among = await world.client.completions.create(
        model="fox", prompt="x", max_tokens=99, seed=3, n=3
    )
    assert among.choices[0] == alone.choices[0]
    assert len({choice.text for choice in among.choices}) == 3


async def test_without_a_seed_the_answers_differ(world):
    worker = await seeded(world)
    await world.client.completions.create(model="fox", prompt="x", max_tokens=99, n=16)
    assert len({submit.sampling.seed for submit in worker.submits}) == 16


async def test_several_prompts_each_with_several_answers(world):
    worker = await seeded(world)
    answer = await world.client.completions.create(
        model="fox", prompt=["one", "two, longer"], max_tokens=99, n=2, seed=5
    )
    alone = await world.client.completions.create(
        model="fox", prompt="two, longer", max_tokens=99, n=2, seed=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[2:]] == [
        choice.text for choice in alone.choices
    ]
    encode = world.tokenizer.encode
    prompts = [encode(text, add_special_tokens=True) for text in ("one", "two, longer")]
    assert sorted(submit.prompt_ids for submit in worker.submits[:4]) == sorted(
        [*prompts, *prompts]
    )
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


async def test_prompts_of_token_ids_and_texts(world):
    worker = await seeded(world)
    await world.client.completions.create(model="fox", prompt=[[5, 6], [7]])
    assert sorted(submit.prompt_ids for submit in worker.submits) == [[5, 6], [7]]


async def test_equal_prompts_are_counted_each(world):
    await seeded(world)
    answer = await world.client.completions.create(model="fox", prompt=[[5, 6], [5, 6]])
    assert answer.usage.prompt_tokens == 4


async def test_all_go_to_one_instance_and_others_elsewhere(world):
    """The prompt's KV is shared there. With the least expected wait alone they would be spread."""
    workers = [await seeded(world, f"w{number}") for number in range(3)]
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 3)
    await world.client.completions.create(model="fox", prompt="x", max_tokens=99, n=6)
    assert sorted(len(worker.submits) for worker in workers) == [0, 0, 6]
    await asyncio.gather(
        *(world.client.completions.create(model="fox", prompt="x", max_tokens=99) for _ in range(6))
    )
    assert sorted(len(worker.submits) for worker in workers) != [0, 0, 12]


async def test_a_refused_choice_goes_elsewhere(world):
    first, second = await seeded(world, "w0"), await seeded(world, "w1")
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 2)
    for worker in (first, second):
        worker.refuse = [
            SubmitReply(accepted=False, code="queue_full", message="full", retry_after_s=30.0)
        ]
    asking = asyncio.create_task(
        world.client.completions.create(model="fox", prompt="x", max_tokens=99, n=3, seed=1)
    )
    await first.until(lambda: not first.refuse or not second.refuse)
    third = await seeded(world, "w2")
    answer = await asking
    assert len({choice.text for choice in answer.choices}) == 3
    assert len(first.submits) + len(second.submits) + len(third.submits) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_is_resumed_in_mid_stream(world, stream):
    worker = await seeded(world)
    undisturbed = await world.client.completions.create(
        model="fox", prompt="x", max_tokens=99, n=3, seed=11
    )
    cut = seed_of_choice(11, 1)

    def script(submit):
        entries = entries_of(submit, world.ids(answer_of(submit)))
        if submit.sampling.seed != cut or submit.output_ids:
            return entries
        return [*entries[:3], failure(submit, 3, "engine_failed")]

    worker.script = script
    worker.submits.clear()
    asked = {"model": "fox", "prompt": "x", "max_tokens": 99, "n": 3, "seed": 11}
    if stream:
        texts, ends, _ = await streamed(await world.client.completions.create(**asked, stream=True))
        assert texts == {choice.index: choice.text for choice in undisturbed.choices}
        assert set(ends.values()) == {"stop"}
    else:
        assert (await world.client.completions.create(**asked)).choices == undisturbed.choices
    (resumed,) = [submit for submit in worker.submits if submit.output_ids]
    assert resumed.output_ids == world.ids(answer_of(resumed))[:3]
    assert len(worker.submits) == 4


async def test_an_error_of_one_is_the_error_of_all(world):
    worker = await seeded(world)
    wrong = seed_of_choice(5, 2)

    def script(submit):
        if submit.sampling.seed == wrong:
            return [failure(submit, 0, "invalid_request")]
        return entries_of(submit, world.ids(answer_of(submit)), finish=None)

    worker.script = script
    with pytest.raises(openai.BadRequestError, match="as told"):
        await world.client.chat.completions.create(model="fox", messages=MESSAGES, n=3, seed=5)
    others = [ran for ran in worker.ran.values() if ran.submit.sampling.seed != wrong]
    assert len(others) == 2
    await worker.until(lambda: all(ran.cancelled for ran in others))
    assert [row["status"] for row in world.usage.rows] == ["invalid_request"]
    assert (world.serving.requests.live, world.serving.relay.running) == (0, 0)


async def test_an_error_in_mid_stream_ends_the_stream(world):
    worker = await seeded(world)
    worker.script = lambda submit: entries_of(submit, world.ids(answer_of(submit)), finish=None)
    stream = await world.client.completions.create(
        model="fox", prompt="x", max_tokens=99, n=2, seed=5, stream=True
    )
    await anext(aiter(stream))
    await worker.until(lambda: len(worker.ran) == 2)
    wrong, other = sorted(worker.ran.values(), key=lambda ran: ran.submit.sampling.seed == 5)
    await worker.send(wrong, [failure(wrong.submit, len(wrong.entries), "invalid_request")])
    with pytest.raises(openai.APIError, match="as told"):
        async for _ in stream:
            pass
    await worker.until(lambda: other.cancelled)


async def test_a_stop_string_ends_its_choice_alone(world):
    worker = await seeded(world)
    answer = await world.client.completions.create(
        model="fox", prompt="x", max_tokens=99, n=5, seed=0, stop=["birch", "elm"]
    )
    texts = {submit.sampling.seed: answer_of(submit) for submit in worker.submits}
    expected = [
        texts[seed_of_choice(0, index)].partition("birch")[0].partition("elm")[0]
        for index in range(5)
    ]
    assert [choice.text for choice in answer.choices] == expected


async def test_a_client_that_leaves_ends_all(world):
    worker = await seeded(world)
    worker.script = lambda submit: entries_of(submit, world.ids(answer_of(submit)), finish=None)
    stream = await world.client.completions.create(
        model="fox", prompt="x", max_tokens=99, n=4, stream=True
    )
    await anext(aiter(stream))
    await worker.until(lambda: len(worker.ran) == 4)
    await stream.close()
    await worker.until(lambda: all(ran.cancelled and ran.done for ran in worker.ran.values()))
    assert (world.serving.requests.live, world.serving.relay.running) == (0, 0)
    assert [row["status"] for row in world.usage.rows] == ["cancelled"]


async def test_a_slow_reader_gets_all(world):
    """More comes than the line between the choices and the client takes at a time."""
    worker = await seeded(world)
    long = world.ids("tree " * 300)
    worker.script = lambda submit: entries_of(submit, long)
    texts, _, _ = await streamed(
        await world.client.completions.create(
            model="fox", prompt="x", max_tokens=2000, n=3, stream=True
        )
    )
    assert texts == dict.fromkeys(range(3), "tree " * 300)


async def test_each_choice_counts_as_demand_and_takes_a_place(world):
    asking = asyncio.create_task(
        world.client.completions.create(model="fox", prompt="x", max_tokens=99, n=3)
    )
    await world.until(lambda: world.serving.queue.held == 3)
    (demand,) = world.serving.queue.demand()
    assert demand.waiting == 3
    assert world.metrics.get_sample_value("pilotlight_arrivals_total") == 3
    await seeded(world)
    assert len((await asking).choices) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_for_the_hold_is_one_refusal(make_world, stream):
    world = await make_world(max_held_per_model=2)
    with pytest.raises(openai.RateLimitError) as caught:
        await world.client.completions.create(
            model="fox", prompt="x", max_tokens=99, n=3, stream=stream
        )
    assert caught.value.code == "too_many_held"
    assert (world.serving.queue.held, world.serving.requests.live) == (0, 0)


async def test_too_many_for_the_gateway_is_one_refusal(make_world):
    world = await make_world(max_requests=3)
    await seeded(world)
    assert (
        len(
            (
                await world.client.completions.create(model="fox", prompt="x", max_tokens=99, n=3)
            ).choices
        )
        == 3
    )
    with pytest.raises(openai.RateLimitError) as caught:
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99, n=4)
    assert caught.value.code == "queue_full"


async def test_the_bound_is_a_setting(make_world):
    world = await make_world(max_choices=4)
    await seeded(world)
    assert (
        len((await world.client.completions.create(model="fox", prompt=["x", "y"], n=2)).choices)
        == 4
    )
    with pytest.raises(openai.BadRequestError, match="5 answers are more than the 4"):
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99, n=5)


async def test_one_comment_at_a_time_while_all_are_held(world):
    """A person who watches the stream sees one progress, not one of each choice."""

    async def comments():
        lines = []
        body = {"model": "fox", "prompt": "x", "max_tokens": 99, "n": 4, "stream": True}
        async with world.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith(":"):
                    lines.append(line)
                if len(lines) == 2:
                    await seeded(world)
        return lines

    lines = await asyncio.wait_for(comments(), 30)
    assert [("elapsed=0.0s" in line) for line in lines[:2]] == [True, False]
