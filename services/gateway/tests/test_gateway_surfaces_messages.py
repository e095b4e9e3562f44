"""The Messages API, asked by Anthropic's own client."""

import json

import anthropic
import pytest

from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.gateway.testing import API_KEY
from pilotlight.policy.request import FinishReason
from pilotlight.text.tools.testing import bundle_of

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "name": "get_weather",
    "description": "It tells.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def bundle():
    return bundle_of("hermes")


@pytest.fixture
async def client(world):
    url = str(world.http.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=API_KEY, max_retries=0) as client:
        yield client


def create(client, messages=HELLO, **fields):
    return client.messages.create(
        **{"model": "fox", "max_tokens": 100, "messages": messages, **fields}
    )


def prompt_of(world, worker):
    return world.entry.text.tokenizer.decode(
        worker.submits[-1].prompt_ids, skip_special_tokens=False
    )


async def test_a_message(world, client):
    worker = await world.worker()
    answer = await create(client, system="be brief", extra_body={"temperature": 0.5, "top_k": 7})
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == ANSWER
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "fox")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len(world.ids(ANSWER))
    assert answer.usage.input_tokens == len(worker.submits[0].prompt_ids)
    assert "be brief" in prompt_of(world, worker)
    sampling = worker.submits[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (100, 0.5, 7)
    (row,) = world.usage.rows
    assert (row["status"], row["output_tokens"]) == ("ok", answer.usage.output_tokens)


async def test_a_stream(world, client):
    await world.worker()
    async with client.messages.stream(model="fox", max_tokens=100, messages=HELLO) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(world.ids(ANSWER))
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


async def test_the_events_on_the_wire(world):
    await world.worker(answer="hi")
    body = {"model": "fox", "max_tokens": 9, "messages": HELLO, "stream": True}
    response = await world.http.post("/v1/messages", json=body)
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    assert [name for name, _ in events] == [
        "event: message_start",
        "event: ping",
        "event: content_block_start",
        *["event: content_block_delta"] * (len(events) - 6),
        "event: content_block_stop",
        "event: message_delta",
        "event: message_stop",
    ]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert all(
        f"event: {body['type']}" == name for body, (name, _) in zip(bodies, events, strict=True)
    )
    assert bodies[0]["message"]["content"] == []
    assert bodies[2] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": "", "citations": None},
    }
    assert bodies[3]["delta"]["type"] == "text_delta"
    assert bodies[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert response.headers["request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called(world, client, stream):
    await world.worker(answer="Let me see. " + CALL)
    if stream:
        async with client.messages.stream(
            model="fox", max_tokens=100, messages=HELLO, tools=[TOOL]
        ) as told:
            message = await told.get_final_message()
    else:
        message = await create(client, tools=[TOOL])
    text, call = message.content
    assert (text.type, text.text.strip()) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Köln"})
    assert call.id.startswith("call_")
    assert message.stop_reason == "tool_use"


async def test_what_a_tool_answered_goes_to_the_template(world, client):
    worker = await world.worker()
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "Köln"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "It rains."}],
                },
                {"type": "text", "text": "And tomorrow?"},
            ],
        },
    ]
    await create(client, turns, tools=[TOOL])
    prompt = prompt_of(world, worker)
    places = [prompt.index(part) for part in ("Let me see.", "Köln", "It rains.", "And tomorrow?")]
    assert places == sorted(places)
    assert "hm" not in prompt


async def test_choices_of_tools(world, client):
    worker = await world.worker(answer=CALL)
    await create(client, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    assert worker.submits[-1].sampling.grammar is not None
    await create(client, tools=[TOOL], tool_choice={"type": "any"})
    assert worker.submits[-1].sampling.grammar is not None
    answer = await create(client, tools=[TOOL], tool_choice={"type": "none"})
    assert worker.submits[-1].sampling.grammar is None
    assert answer.content[0].type == "text"


async def test_a_stop_sequence_is_named(world, client):
    worker = await world.worker()
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER), finish=None)
    answer = await create(client, stop_sequences=["fox"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "fox")
    assert answer.content[0].text == "The quick brown "
    short = await create(client, max_tokens=2)
    assert short.stop_reason == "max_tokens"


async def test_an_answer_that_was_begun_is_gone_on_with(world, client):
    worker = await world.worker()
    await create(client, [*HELLO, {"role": "assistant", "content": "The answer is"}])
    assert prompt_of(world, worker).endswith("The answer is")


async def test_tokens_are_counted(world, client):
    worker = await world.worker()
    counted = await client.messages.count_tokens(
        model="fox", messages=HELLO, system="be brief", tools=[TOOL]
    )
    answer = await create(client, system="be brief", tools=[TOOL])
    assert counted.input_tokens == answer.usage.input_tokens == len(worker.submits[0].prompt_ids)


async def test_errors_are_the_clients_own(world, client):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await create(client, model="none")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert unknown.value.body["request_id"] == unknown.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        await create(client.with_options(api_key="wrong"))
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await create(client, [])
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        await create(client, extra_body={"mcp_servers": [{"url": "x"}]})
    with pytest.raises(anthropic.BadRequestError, match="input_schema"):
        await create(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    picture = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        await create(client, [{"role": "user", "content": [picture]}])


@pytest.mark.parametrize("begun", [False, True])
async def test_an_engine_that_fails(world, client, begun):
    def script(submit):
        entries = entries_of(submit, world.ids("some text"), finish=None) if begun else []
        failure = TokenEntry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            seq=len(world.ids("some text")) if begun else 0,
            token_ids=[],
            finish=FinishReason.ERROR,
            code="invalid_request",
            message="cannot run this",
        )
        return [*entries, failure]

    worker = await world.worker()
    worker.script = script

    async def answer():
        if not begun:
            return await create(client)
        return [event async for event in await create(client, stream=True)]

    with pytest.raises(anthropic.APIStatusError, match="cannot run this"):
        await answer()


async def test_the_key_may_come_as_a_bearer(world):
    await world.worker()
    body = {"model": "fox", "max_tokens": 9, "messages": HELLO}
    assert (await world.http.post("/v1/messages", json=body)).status_code == 200
    refused = await world.http.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
