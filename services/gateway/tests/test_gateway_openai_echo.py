"""What is told of prompts: cached tokens on every surface, ``echo`` and ``prompt_logprobs`` on
plain completions.
"""

from itertools import pairwise

import openai
import pytest

from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.policy.request import MAX_PROMPT_VALUES, FinishReason

pytestmark = pytest.mark.anyio

PROMPT = "The quick brown fox"
USER = {"role": "user", "content": "hello"}


def told(prompt_ids: list[int], wanted: int) -> PromptLogprobs:
    """Each token is the second likeliest in its place, after the one before it."""
    places = list(pairwise(prompt_ids))
    return PromptLogprobs(
        logprobs=tuple(-1.5 for _ in places),
        ranks=tuple(2 for _ in places),
        top=tuple(((one, -0.5), (other, -1.5))[:wanted] for one, other in places),
    )


async def reading_worker(world, *, cached: int = 0, tells: bool = True):
    """Says what it read of a prompt, and one token."""
    worker = await world.worker()
    (token_id, *_) = world.ids("dogs")

    def script(submit) -> list[TokenEntry]:
        key = {"request_id": submit.request_id, "attempt": submit.attempt}
        wanted = submit.sampling.prompt_logprobs
        prompt = told(submit.prompt_ids, wanted) if tells and wanted is not None else None
        return [
            TokenEntry(
                seq=0,
                token_ids=[token_id],
                logprobs=[-0.25] if submit.sampling.logprobs else None,
                top_logprobs=[[(token_id, -0.25)]] if submit.sampling.top_logprobs else None,
                cached_tokens=cached,
                prompt=prompt,
                **key,
            ),
            TokenEntry(seq=1, token_ids=[], finish=FinishReason.LENGTH, **key),
        ]

    worker.script = script
    return worker


def complete(world, prompt=PROMPT, **fields):
    return world.client.completions.create(model="fox", prompt=prompt, max_tokens=1, **fields)


async def test_cached_tokens_are_told_on_every_surface(world):
    await reading_worker(world, cached=3)
    plain = await complete(world)
    assert plain.usage.prompt_tokens_details.cached_tokens == 3
    chat = await world.client.chat.completions.create(model="fox", messages=[USER])
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    stream = await world.client.chat.completions.create(
        model="fox", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert last.usage.prompt_tokens_details.cached_tokens == 3
    response = await world.client.responses.create(model="fox", input="hello")
    assert response.usage.input_tokens_details.cached_tokens == 3
    message = await world.http.post(
        "/v1/messages", json={"model": "fox", "max_tokens": 5, "messages": [USER]}
    )
    usage = message.json()["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] == chat.usage.prompt_tokens - 3


async def test_of_several_answers_the_least_is_told(world):
    found = iter([0, 2, 3])
    worker = await reading_worker(world)
    script = worker.script

    def each(submit) -> list[TokenEntry]:
        first, last = script(submit)
        return [
            TokenEntry(
                seq=0,
                token_ids=first.token_ids,
                cached_tokens=next(found),
                request_id=first.request_id,
                attempt=first.attempt,
            ),
            last,
        ]

    worker.script = each
    answer = await complete(world, n=3)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_the_shape_that_lm_eval_reads(world):
    """Its loglikelihood sends token ids, and sums what stands between context and last token."""
    worker = await reading_worker(world)
    prompt_ids = world.ids(PROMPT)
    answer = await complete(
        world, [prompt_ids, prompt_ids[:2]], temperature=0, logprobs=1, echo=True, seed=1234
    )
    assert worker.submits[0].sampling.prompt_logprobs == 1
    first, second = sorted(answer.choices, key=lambda choice: choice.index)
    assert first.text.startswith(PROMPT)
    logprobs = first.logprobs
    assert logprobs.token_logprobs == [None, *[-1.5] * (len(prompt_ids) - 1), -0.25]
    assert logprobs.top_logprobs[0] is None
    assert [max(top.values()) for top in logprobs.top_logprobs[1:-1]] == [-0.5] * (
        len(prompt_ids) - 1
    )
    assert "".join(logprobs.tokens) == first.text
    lengths = [len("".join(logprobs.tokens[:place])) for place in range(len(logprobs.tokens))]
    assert logprobs.text_offset == lengths
    assert len(second.logprobs.tokens) == 3
    assert answer.usage.prompt_tokens == len(prompt_ids) + 2


async def test_only_the_prompt_is_told_without_output(world):
    worker = await reading_worker(world)
    answer = await world.client.completions.create(
        model="fox", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens
    alone = zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    assert choice.logprobs.top_logprobs == [
        None if logprob is None else {token: logprob} for token, logprob in alone
    ]
    assert answer.usage.completion_tokens == 0
    assert worker.submits[0].sampling.max_tokens == 1


async def test_a_stream_begins_with_the_prompt(world):
    await reading_worker(world)
    stream = await complete(world, echo=True, logprobs=1, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices).startswith(PROMPT)
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    written = "".join(choice.text for choice in choices)
    assert "".join(tokens) == "<s>" + written, "tokens are the model's, the text is the client's"


async def test_echo_alone_asks_the_engine_for_nothing(world):
    worker = await reading_worker(world)
    answer = await complete(world, echo=True)
    assert answer.choices[0].text.startswith(PROMPT)
    assert answer.choices[0].logprobs is None
    assert worker.submits[0].sampling.prompt_logprobs is None


async def test_prompt_logprobs_have_vllms_shape(world):
    worker = await reading_worker(world)
    answer = await complete(world, extra_body={"prompt_logprobs": 1})
    choice = answer.choices[0].model_dump()
    assert not choice["text"].startswith(PROMPT)
    prompt_ids = worker.submits[0].prompt_ids
    first, *places = choice["prompt_logprobs"]
    assert first is None
    for before, token_id, place in zip(prompt_ids, prompt_ids[1:], places, strict=False):
        assert place[str(token_id)]["logprob"] == -1.5
        assert place[str(token_id)]["rank"] == 2
        assert place[str(before)]["rank"] == 1
        assert set(place) == {str(token_id), str(before)}


async def test_an_engine_that_tells_nothing_is_named(world):
    await reading_worker(world, tells=False)
    with pytest.raises(openai.BadRequestError, match="engine that serves this model"):
        await complete(world, echo=True, logprobs=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_what_contradicts_itself_is_refused(world, fields, param):
    await reading_worker(world)
    answer = await world.http.post(
        "/v1/completions", json={"model": "fox", "prompt": PROMPT, **fields}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_scored_text_has_its_one_token_whatever_it_is(world):
    worker = await reading_worker(world)
    await complete(world, logprobs=1)
    await complete(world, echo=True)
    await complete(world, echo=True, logprobs=1)
    plain, echoed, scored = [submit.sampling for submit in worker.submits]
    assert plain.stop_token_ids
    assert echoed.stop_token_ids == plain.stop_token_ids
    assert scored.stop_token_ids == ()
    assert scored.ignore_eos


async def test_chats_have_no_echo(world):
    for field in ("echo", "prompt_logprobs"):
        with pytest.raises(openai.BadRequestError, match=r"use /v1/completions"):
            await world.client.chat.completions.create(
                model="fox", messages=[USER], extra_body={field: 1}
            )


def test_a_message_holds_what_is_told_of_a_prompt():
    assert 40 * MAX_PROMPT_VALUES < 8 * 1024 * 1024
