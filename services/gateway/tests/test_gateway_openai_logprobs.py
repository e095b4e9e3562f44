"""Log probabilities of answers, read by the official client."""

import pytest

from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


async def test_logprobs(world):
    await world.worker()
    chat = await world.client.chat.completions.create(model="fox", messages=MESSAGES, logprobs=True)
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert {entry.logprob for entry in content} == {-0.5}
    assert content[0].bytes == list(content[0].token.encode())
    plain = await world.client.completions.create(model="fox", prompt="x", logprobs=1)
    logprobs = plain.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == plain.usage.completion_tokens
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    stream = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, logprobs=True, stream=True
    )
    streamed = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


async def test_stop_drops_logprobs_past_it(world):
    await world.worker()
    chat = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, logprobs=True, stop="fox"
    )
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens


async def test_the_likeliest_tokens_are_told(world):
    a, b = world.ids("a")[0], world.ids("b")[0]
    worker = await world.worker()
    worker.script = lambda submit: [
        TokenEntry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            seq=0,
            token_ids=[a],
            logprobs=[-0.5],
            top_logprobs=[[(a, -0.5), (b, -1.5)]],
            finish=FinishReason.LENGTH,
        )
    ]
    answer = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    (token,) = answer.choices[0].logprobs.content
    assert [(other.token, other.logprob, other.bytes) for other in token.top_logprobs] == [
        ("a", -0.5, [97]),
        ("b", -1.5, [98]),
    ]
    assert worker.submits[0].sampling.top_logprobs == 2
    text = await world.client.completions.create(model="fox", prompt="x", logprobs=2)
    assert text.choices[0].logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}]


async def test_a_completion_tells_its_own_tokens_beside_the_likeliest(world):
    """As OpenAI says, up to ``logprobs`` + 1; with 0, as vLLM's own test wants, exactly one."""
    a, b, c = (world.ids(letter)[0] for letter in "abc")
    worker = await world.worker()
    worker.script = lambda submit: [
        TokenEntry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            seq=0,
            token_ids=[c],
            logprobs=[-3.5],
            top_logprobs=[[(a, -0.5), (b, -1.5)][: submit.sampling.top_logprobs]],
            finish=FinishReason.LENGTH,
        )
    ]
    for wanted, told in ((0, {"c": -3.5}), (2, {"c": -3.5, "a": -0.5, "b": -1.5})):
        ask = {"model": "fox", "prompt": "x", "logprobs": wanted}
        answer = await world.client.completions.create(**ask)
        assert answer.choices[0].logprobs.token_logprobs == [-3.5]
        assert answer.choices[0].logprobs.top_logprobs == [told]
        chunks = [one async for one in await world.client.completions.create(**ask, stream=True)]
        tops = [one.choices[0].logprobs.top_logprobs for one in chunks if one.choices[0].text]
        assert tops == [[told]]
    chat = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, logprobs=True, top_logprobs=0
    )
    (token,) = chat.choices[0].logprobs.content
    assert (token.token, token.logprob, token.top_logprobs) == ("c", -3.5, [])
