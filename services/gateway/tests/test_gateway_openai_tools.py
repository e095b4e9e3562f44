"""Calls of tools with the official client: what a model of each dialect writes, and what a
conversation with calls becomes.
"""

import asyncio
import json

import openai
import pytest

from pilotlight.gateway.openai.testing import CHAT, QUESTION, STRICT, TOOLS
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.text.tools.testing import WEATHER, bundle_of, written_calls

pytestmark = pytest.mark.anyio

CALLS = [("get_weather", '{"city": "Köln 😀", "days": 3}'), ("get_time", "{}")]


@pytest.fixture(params=["hermes", "mistral", "llama"])
def dialect(request):
    return request.param


@pytest.fixture
def bundle(dialect):
    return bundle_of(dialect)


@pytest.fixture
def answer(dialect):
    """A model's answer: calls, and text before them where the dialect has that."""
    return written_calls(dialect, CALLS, "" if dialect == "llama" else "Let me see.")


def ask(world, messages=(QUESTION,), **options):
    return world.client.chat.completions.create(
        model="fox", messages=list(messages), **{"tools": TOOLS, **options}
    )


def prompt_of(world, submit):
    return world.entry.text.tokenizer.decode(submit.prompt_ids, skip_special_tokens=False)


def called(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def put_together(chunks):
    """Content, calls and the reason of a stream, by the wire's rules alone."""
    content, calls, reasons = None, {}, []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        content = (
            choice.delta.content if content is None else content + (choice.delta.content or "")
        )
        reasons.append(choice.finish_reason)
        for piece in choice.delta.tool_calls or ():
            if piece.index not in calls:
                assert piece.type == "function"
                assert piece.id
                calls[piece.index] = (piece.function.name, "")
            else:
                assert piece.id is None
                assert piece.function.name is None
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.function.arguments)
    assert set(reasons[:-1]) == {None}
    return content, list(calls.values()), reasons[-1]


async def test_calls_in_an_answer(world, answer, dialect):
    worker = await world.worker(answer=answer)
    reply = await ask(world)
    (choice,) = reply.choices
    assert called(choice.message) == CALLS
    assert choice.message.content == (None if dialect == "llama" else "Let me see.")
    assert choice.finish_reason == "tool_calls"
    assert reply.usage.completion_tokens == len(world.ids(answer))
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(
        len(call_id) == 9 if dialect == "mistral" else call_id.startswith("call_")
        for call_id in ids
    )
    (submit,) = worker.submits
    assert submit.sampling.grammar is None
    assert "get_weather" in prompt_of(world, submit)
    assert "get_time" in prompt_of(world, submit)


async def test_calls_in_a_stream(world, answer, dialect):
    await world.worker(answer=answer)
    stream = await ask(world, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    opening = chunks[0].choices[0].delta
    assert (opening.role, opening.content, opening.tool_calls) == ("assistant", None, None)
    assert put_together(chunks) == (
        None if dialect == "llama" else "Let me see.",
        CALLS,
        "tool_calls",
    )
    assert chunks[-1].usage.completion_tokens == len(world.ids(answer))


async def test_arguments_come_as_they_are_written(world, answer, dialect):
    worker = await world.worker(answer=answer)
    part = len(world.ids(answer[: answer.index("Köln")]))
    worker.post = lambda ran: ran.entries[:part]
    stream = await ask(world, stream=True)
    chunks = [await anext(stream), await anext(stream)]
    content, calls, reason = put_together(chunks)
    assert content == (None if dialect == "llama" else "Let me see.")
    assert (calls, reason) == ([("get_weather", '{"city": "')], None)
    (ran,) = worker.ran.values()
    await worker.send(ran, ran.entries[part:])
    chunks += [chunk async for chunk in stream]
    assert put_together(chunks) == (content, CALLS, "tool_calls")


async def test_the_clients_own_accumulation(world, answer, dialect):
    await world.worker(answer=answer)
    async with world.client.chat.completions.stream(
        model="fox", messages=[QUESTION], tools=STRICT
    ) as stream:
        done = [
            event async for event in stream if event.type == "tool_calls.function.arguments.done"
        ]
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert called(choice.message) == CALLS
    assert [event.arguments for event in done] == [arguments for _, arguments in CALLS]
    assert choice.message.tool_calls[0].function.parsed_arguments == json.loads(CALLS[0][1])
    assert choice.message.content == (None if dialect == "llama" else "Let me see.")
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("dialect", ["hermes"])
async def test_an_answer_without_calls(world):
    await world.worker(answer="It rains. {1} <tool_c \n")
    reply = await ask(world)
    assert reply.choices[0].message.content == "It rains. {1} <tool_c \n"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    chunks = [chunk async for chunk in await ask(world, stream=True)]
    assert put_together(chunks) == ("It rains. {1} <tool_c \n", [], "stop")
    body = {"model": "fox", "messages": [QUESTION], "tools": TOOLS}
    assert (
        "tool_calls" not in (await world.http.post(CHAT, json=body)).json()["choices"][0]["message"]
    )


async def test_the_next_turn(world, answer, dialect):
    """The client sends back what it got, and what its functions answered."""
    worker = await world.worker(answer=answer)
    first = (await ask(world)).choices[0].message
    calls = first.tool_calls[:1]
    message = {
        "role": "assistant",
        "content": first.content,
        "tool_calls": [call.to_dict() for call in calls],
    }
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": '{"rain": true}'}
    await ask(world, [QUESTION, message, result])
    prompt = prompt_of(world, worker.submits[1])
    expected = {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 😀", "days": 3}}\n</tool_call>',
        "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln 😀", "days": 3}, "id": "'
        + calls[0].id,
        "llama": '{"name": "get_weather", "parameters": {"city": "Köln 😀", "days": 3}}',
    }
    assert expected[dialect] in prompt
    assert "rain" in prompt.split(expected[dialect])[1]


@pytest.mark.parametrize("dialect", ["mistral"])
async def test_ids_that_others_made(world):
    worker = await world.worker(answer="ok")
    call = {
        "id": "call_of-another:model",
        "type": "function",
        "function": {"name": "get_time", "arguments": ""},
    }
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": [{"type": "text", "text": "12:00"}],
        },
    ]
    await ask(world, messages, tool_choice="none")
    prompt = prompt_of(world, worker.submits[0])
    short = prompt.split('"arguments": {}, "id": "')[1][:9]
    assert short.isalnum()
    assert f'"call_id": "{short}"' in prompt
    assert "AVAILABLE_TOOLS" not in prompt


@pytest.mark.parametrize(
    ("options", "forced", "several", "names"),
    [
        ({"tool_choice": "required"}, True, True, ["get_weather", "get_time"]),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            True,
            False,
            ["get_weather", "get_time"],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_time"}}},
            True,
            False,
            ["get_time"],
        ),
        ({"tools": [STRICT[0], TOOLS[1]]}, False, True, ["get_weather", "get_time"]),
        (
            {"tools": STRICT, "tool_choice": "auto", "parallel_tool_calls": False},
            False,
            False,
            ["get_weather", "get_time"],
        ),
    ],
)
@pytest.mark.parametrize("dialect", ["hermes"])
async def test_what_the_engine_is_held_to(world, options, forced, several, names):
    worker = await world.worker(answer="ok")
    await ask(world, **options)
    grammar = worker.submits[0].sampling.grammar
    assert grammar.kind.value == "lark"
    assert [
        name for name in ("get_weather", "get_time") if f'\\"{name}\\"' in grammar.text
    ] == names
    start = grammar.text.splitlines()[0]
    assert ("free" not in start) == forced
    assert start.endswith("*") == several
    marker = world.entry.text.tokenizer.added_tokens["<tool_call>"]
    assert f"<[{marker}]>" in grammar.text
    # All tools are told, also when one of them must be called.
    assert "get_weather" in prompt_of(world, worker.submits[0])
    if not forced and options["tools"][1] is TOOLS[1]:
        assert f'"city": {json.dumps(WEATHER["properties"]["city"])}' in grammar.text


@pytest.mark.parametrize("dialect", ["hermes"])
@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_most_ends_the_answer(world, answer, stream):
    worker = await world.worker()
    token_ids = world.ids(answer)
    # The engine never ends by itself.
    worker.script = lambda submit: entries_of(submit, token_ids, finish=None)
    reply = await ask(world, parallel_tool_calls=False, stream=stream)
    if stream:
        content, calls, reason = put_together([chunk async for chunk in reply])
    else:
        message, reason = reply.choices[0].message, reply.choices[0].finish_reason
        content, calls = message.content, called(message)
        first = written_calls("hermes", CALLS[:1], "Let me see.")
        assert reply.usage.completion_tokens == len(world.ids(first))
    assert (content, calls, reason) == ("Let me see.", CALLS[:1], "tool_calls")
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.cancelled and ran.done)


@pytest.mark.parametrize("dialect", ["hermes"])
async def test_what_may_end_an_answer_within_a_call(world, answer):
    await world.worker(answer=answer)
    cut = await ask(world, max_tokens=len(world.ids(answer)) - 30)
    assert cut.choices[0].finish_reason == "length"
    name, arguments = called(cut.choices[0].message)[0]
    assert name == "get_weather"
    assert CALLS[0][1].startswith(arguments)
    stopped = await ask(world, stop="days")
    assert called(stopped.choices[0].message) == [("get_weather", '{"city": "Köln 😀", "')]
    before = await ask(world, stop="<tool_call>")
    assert before.choices[0].message.content == "Let me see."
    assert before.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("delivered", [0, 1, 20, 50])
async def test_a_worker_that_dies_within_a_call(world, answer, dialect, delivered):
    first = await world.worker("w0", answer=answer)
    first.post = lambda ran: ran.entries[:delivered]
    asking = asyncio.create_task(ask(world, stream=True, tool_choice="required"))
    await first.until(lambda: len(first.submits) == 1)
    second = await world.worker("w1", answer=answer)
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 2)
    await first.die()
    await first.declare_dead()
    chunks = [chunk async for chunk in await asking]
    assert put_together(chunks) == (
        None if dialect == "llama" else "Let me see.",
        CALLS,
        "tool_calls",
    )
    assert second.submits[0].output_ids == world.ids(answer)[:delivered]
    assert second.submits[0].sampling.grammar == first.submits[0].sampling.grammar


@pytest.mark.parametrize("dialect", ["hermes"])
async def test_several_answers_and_log_probabilities(world, answer):
    await world.worker(answer=answer)
    reply = await ask(world, n=2, logprobs=True)
    assert [called(choice.message) for choice in reply.choices] == [CALLS, CALLS]
    assert len({call.id for choice in reply.choices for call in choice.message.tool_calls}) == 4
    assert [len(choice.logprobs.content) for choice in reply.choices] == [
        len(world.ids(answer))
    ] * 2
    chunks = [chunk async for chunk in await ask(world, logprobs=True, stream=True)]
    assert put_together(chunks)[1] == CALLS
    tokens = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert len(tokens) == len(world.ids(answer))


@pytest.mark.parametrize("dialect", ["none"])
async def test_a_model_that_knows_no_tools(world):
    worker = await world.worker(answer=written_calls("plain", CALLS[:1]))
    with pytest.raises(openai.BadRequestError, match="does not tell the model of tools") as refused:
        await ask(world)
    assert refused.value.param == "tools"
    plain = await ask(world, tool_choice="none")
    assert plain.choices[0].message.content == written_calls("plain", CALLS[:1])
    forced = await ask(world, tool_choice="required")
    assert called(forced.choices[0].message) == CALLS[:1]
    assert forced.choices[0].message.content is None
    assert worker.submits[1].sampling.grammar.text.startswith("start: call\n")
    assert "get_weather" not in prompt_of(world, worker.submits[1])
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [forced.choices[0].message.tool_calls[0].to_dict()],
    }
    with pytest.raises(openai.BadRequestError, match="does not write calls") as lost:
        await ask(world, [QUESTION, message], tool_choice="none")
    assert lost.value.param == "messages[1].tool_calls"
