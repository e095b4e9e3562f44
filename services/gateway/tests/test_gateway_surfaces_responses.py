"""The Responses API, asked by OpenAI's own client."""

import json

import openai
import pytest

from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.gateway.surfaces.responses.store import WaitingRoom
from pilotlight.gateway.testing import ADMIN_KEY
from pilotlight.policy.request import FinishReason
from pilotlight.text.tools.testing import bundle_of

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "It tells.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def bundle():
    return bundle_of("hermes")


def create(world, given="hello", **fields):
    return world.client.responses.create(**{"model": "fox", "input": given, **fields})


def prompt_of(world, worker):
    return world.entry.text.tokenizer.decode(
        worker.submits[-1].prompt_ids, skip_special_tokens=False
    )


async def test_a_response(world):
    worker = await world.worker()
    answer = await create(
        world, instructions="be brief", max_output_tokens=99, metadata={"a": "b"}, temperature=0
    )
    assert answer.output_text == ANSWER
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "fox")
    assert answer.usage.output_tokens == len(world.ids(ANSWER))
    assert answer.usage.input_tokens == len(worker.submits[0].prompt_ids)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("be brief", {"a": "b"}, 0)
    assert (answer.store, answer.tool_choice, answer.tools) == (True, "auto", [])
    prompt = prompt_of(world, worker)
    assert prompt.index("be brief") < prompt.index("hello")
    assert worker.submits[0].sampling.max_tokens == 99


async def test_what_is_cut_short_is_incomplete(world):
    await world.worker()
    answer = await create(world, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_the_events_of_a_stream(world):
    await world.worker()
    events = [event async for event in await create(world, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == ANSWER
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    last = events[-1].response
    assert last.output_text == ANSWER
    assert last.usage.output_tokens == len(world.ids(ANSWER))
    assert events[0].response.id == last.id
    assert (await world.client.responses.retrieve(last.id)).output_text == ANSWER


async def test_the_clients_own_reading_of_a_stream(world):
    await world.worker(answer="Let me see. " + CALL)
    async with world.client.responses.stream(model="fox", input="hello", tools=[TOOL]) as stream:
        response = await stream.get_final_response()
    text, call = response.output
    assert text.content[0].text.strip() == "Let me see."
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Köln"},
    )


async def test_a_tool_is_called_and_answers(world):
    worker = await world.worker(answer=CALL)
    asked = await create(world, tools=[TOOL])
    (call,) = asked.output
    assert json.loads(call.arguments) == {"city": "Köln"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    await create(world, [result], tools=[TOOL], previous_response_id=asked.id)
    prompt = prompt_of(world, worker)
    places = [prompt.index(part) for part in ("hello", "Köln", "It rains.")]
    assert places == sorted(places)
    # The same without anything stored: a client sends the items back.
    items = [{"role": "user", "content": "hello"}, call.to_dict(), result]
    await create(world, items, tools=[TOOL], store=False)
    assert prompt_of(world, worker) == prompt
    named = {"type": "function", "name": "get_weather"}
    await create(world, tools=[TOOL], tool_choice=named)
    assert worker.submits[-1].sampling.grammar is not None


async def test_going_on(world):
    worker = await world.worker(answer="one")
    first = await create(world, "a", instructions="never again")
    second = await create(world, "b", previous_response_id=first.id)
    third = await create(world, "c", previous_response_id=second.id, store=False)
    prompt = prompt_of(world, worker)
    assert "never again" not in prompt
    assert prompt.count("one") == 2
    assert third.previous_response_id == second.id
    with pytest.raises(openai.NotFoundError):
        await world.client.responses.retrieve(third.id)
    await world.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await create(world, "d", previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"
    assert (await create(world, "d", previous_response_id=second.id)).status == "completed"
    items = await world.client.responses.input_items.list(second.id)
    assert [item.content for item in items.data] == ["b"]


async def test_what_cannot_be_stored_is_answered_and_says_so(world):
    await world.worker()
    world.responses.full = True
    answer = await create(world)
    assert (answer.output_text, answer.store) == (ANSWER, False)


async def test_no_room_to_wait_in_costs_the_storing_alone(world, monkeypatch):
    await world.worker()
    monkeypatch.setattr(WaitingRoom, "take", lambda *_: False)
    answer = await create(world)
    assert (answer.output_text, answer.store) == (ANSWER, False)
    assert world.responses.rows == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_room_to_wait_in_is_given_back(world, monkeypatch, stream):
    taken = []
    monkeypatch.setattr(WaitingRoom, "release", lambda _, size: taken.append(-size))
    monkeypatch.setattr(WaitingRoom, "take", lambda _, size: taken.append(size) or True)
    worker = await world.worker()
    body = {"model": "fox", "input": "hello", "stream": stream}
    assert (await world.http.post("/v1/responses", json=body)).status_code == 200
    worker.script = lambda submit: [
        TokenEntry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            seq=0,
            token_ids=[],
            finish=FinishReason.ERROR,
            code="invalid_request",
            message="cannot run this",
        )
    ]
    assert (await world.http.post("/v1/responses", json=body)).status_code == 400
    assert len(taken) == 4
    assert sum(taken) == 0


async def test_a_response_is_its_keys_alone(world):
    await world.worker()
    answer = await create(world)
    (kept,) = world.responses.rows.values()
    world.responses.rows = {("another", answer.id): kept}
    for ask in (world.client.responses.retrieve, world.client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(answer.id)
    stranger = world.client.with_options(api_key=ADMIN_KEY)
    with pytest.raises(openai.PermissionDeniedError):
        await stranger.responses.retrieve(answer.id)


async def test_what_the_text_must_look_like(world):
    worker = await world.worker(answer="{}")
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = await create(world, text={"format": form})
    assert worker.submits[-1].sampling.grammar.kind.value == "json_schema"
    assert answer.text.format.type == "json_schema"
    await create(world, text={"format": {"type": "json_object"}})
    assert worker.submits[-1].sampling.grammar is not None
    await create(world, text={"format": {"type": "text"}})
    assert worker.submits[-1].sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"model": "none"}, "model"),
    ],
)
async def test_refused_by_name(world, fields, param):
    response = await world.http.post(
        "/v1/responses", json={"model": "fox", "input": "hello", **fields}
    )
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("begun", [False, True])
async def test_an_engine_that_fails(world, begun):
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
    if not begun:
        with pytest.raises(openai.BadRequestError, match="cannot run this"):
            await create(world)
        return
    events = [event async for event in await create(world, stream=True)]
    assert [event.type for event in events[-2:]] == ["response.failed", "error"]
    assert events[-2].response.error.code == "invalid_request"
    assert "cannot run this" in events[-1].message
    assert world.responses.rows == {}
    assert world.usage.rows[-1]["status"] == "invalid_request"
