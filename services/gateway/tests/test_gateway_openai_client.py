"""The official client against a gateway on a real socket."""

import json

import openai
import pytest

from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch
from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.telemetry import start_telemetry, stop_telemetry
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


async def test_chat(world):
    worker = await world.worker()
    answer = await world.client.chat.completions.create(model="fox", messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage.completion_tokens == len(world.ids(ANSWER))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    submit = worker.submits[0]
    tokenizer = world.entry.text.tokenizer
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(submit.prompt_ids, skip_special_tokens=False) == prompt
    assert submit.sampling.max_tokens == 4096 - len(submit.prompt_ids)
    assert submit.sampling.stop_token_ids == tokenizer.eos_token_ids
    assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.top_k) == (
        1.0,
        1.0,
        0,
    )
    (row,) = world.usage.rows
    assert (row["status"], row["output_tokens"], row["key_id"]) == (
        "ok",
        len(world.ids(ANSWER)),
        "key-inference",
    )


async def test_chat_stream(world):
    await world.worker()
    stream = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(world.ids(ANSWER))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_stream_wire_shape(world):
    await world.worker(answer="hi")
    body = {"model": "fox", "messages": MESSAGES, "stream": True}
    response = await world.http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"].startswith("req-")
    events = [
        line.removeprefix("data: ")
        for line in response.text.split("\n\n")
        if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    parsed = [json.loads(event) for event in events[:-1]]
    assert parsed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parsed[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert all("usage" not in event for event in parsed)
    assert all(event["object"] == "chat.completion.chunk" for event in parsed)


async def test_completion_and_its_stream(world):
    worker = await world.worker()
    answer = await world.client.completions.create(
        model="fox", prompt="once upon a time", seed=7, temperature=0, top_p=0.5, max_tokens=99
    )
    assert answer.choices[0].text == ANSWER
    assert answer.object == "text_completion"
    submit = worker.submits[0]
    assert submit.prompt_ids == world.tokenizer.encode("once upon a time", add_special_tokens=True)
    assert (submit.sampling.seed, submit.sampling.temperature, submit.sampling.top_p) == (
        7,
        0.0,
        0.5,
    )
    stream = await world.client.completions.create(
        model="fox", prompt="once upon a time", stream=True, max_tokens=99
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_prompt_of_token_ids(world, prompt):
    worker = await world.worker()
    answer = await world.client.completions.create(model="fox", prompt=prompt)
    assert worker.submits[0].prompt_ids == [5, 6, 7]
    assert answer.usage.prompt_tokens == 3


async def test_prompt_in_a_list_of_one(world):
    worker = await world.worker()
    await world.client.completions.create(model="fox", prompt=["hello"])
    assert worker.submits[0].prompt_ids == world.tokenizer.encode("hello", add_special_tokens=True)


async def test_long_prompt_is_encoded_in_a_thread(make_world):
    world = await make_world(max_context_tokens=100_000)
    worker = await world.worker(answer="ok")
    text = "hello fox " * 5000
    await world.client.completions.create(model="fox", prompt=text)
    assert worker.submits[0].prompt_ids == world.tokenizer.encode(text, add_special_tokens=True)


async def test_max_tokens_ends_with_length(world):
    worker = await world.worker()
    answer = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, max_completion_tokens=5
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert worker.submits[0].sampling.max_tokens == 5


async def test_content_in_parts(world):
    worker = await world.worker()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await world.client.chat.completions.create(
        model="fox", messages=[{"role": "user", "content": parts}]
    )
    prompt = world.entry.text.tokenizer.decode(
        worker.submits[0].prompt_ids, skip_special_tokens=False
    )
    assert "one\ntwo" in prompt


async def test_stop_string_cancels_and_bills_no_more(world):
    worker = await world.worker()
    token_ids = world.ids(ANSWER)
    # The engine never ends by itself: only the stop string does.
    worker.script = lambda submit: entries_of(submit, token_ids, finish=None)
    answer = await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, stop=["fox", "never"]
    )
    assert answer.choices[0].message.content == "The quick brown "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(world.ids("The quick brown fox"))
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.cancelled and ran.done)


async def test_stop_string_in_a_stream(world):
    await world.worker()
    stream = await world.client.completions.create(
        model="fox", prompt="x", stop=" jumps", stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "The quick brown fox 😀"


async def test_ignore_eos_and_top_k(world):
    worker = await world.worker()
    await world.client.completions.create(
        model="fox", prompt="x", extra_body={"ignore_eos": True, "top_k": 40}
    )
    sampling = worker.submits[0].sampling
    assert (sampling.ignore_eos, sampling.stop_token_ids, sampling.top_k) == (True, (), 40)


async def test_seed_is_assigned(world):
    worker = await world.worker()
    for _ in range(2):
        await world.client.completions.create(model="fox", prompt="x")
    first, second = worker.submits
    assert first.sampling.seed != second.sampling.seed
    await world.client.completions.create(model="fox", prompt="x", seed=-1)
    assert worker.submits[2].sampling.seed == 2**63 - 1


async def test_models(world):
    models = [model async for model in await world.client.models.list()]
    assert [model.id for model in models] == ["fox"]
    assert (await world.client.models.retrieve("fox")).owned_by == "pilotlight"
    with pytest.raises(openai.NotFoundError) as caught:
        await world.client.models.retrieve("org/none")
    assert caught.value.code == "model_not_found"


async def test_errors_are_the_clients_own(world):
    with pytest.raises(openai.NotFoundError) as unknown:
        await world.client.chat.completions.create(model="none", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        await world.client.chat.completions.create(model="fox", messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        await world.client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        await world.client.with_options(api_key="pl-admin-for-tests").models.list()


async def test_error_of_the_engine_reaches_the_client(world):
    worker = await world.worker()
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
    with pytest.raises(openai.BadRequestError, match="cannot run this"):
        await world.client.completions.create(model="fox", prompt="x")


async def test_one_trace_with_a_handful_of_spans(world):
    spans = []

    async def keep(batch):
        spans.extend(batch.spans)

    await world.bus.subscribe(SPANS_SUBJECT, SpanBatch, keep)
    worker = await world.worker()
    start_telemetry("gateway", ServiceSettings(), world.bus)
    try:
        response = await world.http.post(
            "/v1/completions", json={"model": "fox", "prompt": "x", "stream": True}
        )
    finally:
        await stop_telemetry()
    await world.until(lambda: any(span.name == "POST /v1/completions" for span in spans))
    named = {span.name: span for span in spans if span.trace_id == response.headers["x-trace-id"]}
    root = named["POST /v1/completions"]
    assert root.parent_id == ""
    assert named["submit"].parent_id == named["stream"].parent_id == root.span_id
    assert len(spans) <= 6
    assert worker.submits


async def test_sampling_parameters_reach_the_worker(world):
    worker = await world.worker()
    await world.client.chat.completions.create(
        model="fox",
        messages=MESSAGES,
        presence_penalty=0.5,
        frequency_penalty=-1.5,
        logit_bias={"50": 7, "3": -100},
        max_completion_tokens=40,
        extra_body={
            "min_p": 0.1,
            "repetition_penalty": 1.3,
            "min_tokens": 4,
            "stop_token_ids": [9, 9],
            "ignore_eos": True,
        },
    )
    sampling = worker.submits[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.5,
        -1.5,
        1.3,
    )
    assert sampling.logit_bias == ((3, -100.0), (50, 7.0))
    assert (sampling.min_p, sampling.min_tokens, sampling.stop_token_ids, sampling.grammar) == (
        0.1,
        4,
        (9,),
        None,
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            json.dumps(SCHEMA, separators=(",", ":")),
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, "regex", "[ab]+"),
        (
            {"guided_json": json.dumps(SCHEMA)},
            "json_schema",
            json.dumps(SCHEMA, separators=(",", ":")),
        ),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ({"guided_grammar": 'start: "x"'}, "lark", 'start: "x"'),
    ],
)
async def test_what_an_answer_must_look_like_reaches_the_worker(world, body, kind, text):
    worker = await world.worker()
    await world.client.chat.completions.create(model="fox", messages=MESSAGES, extra_body=body)
    grammar = worker.submits[0].sampling.grammar
    assert (grammar.kind.value, grammar.text) == (kind, text)
    await world.client.chat.completions.create(
        model="fox", messages=MESSAGES, response_format={"type": "text"}
    )
    assert worker.submits[1].sampling.grammar is None


@pytest.mark.parametrize(
    ("more", "whole"),
    [({}, True), ({"logprobs": True}, True), ({"stop": "never"}, False), ({"stream": True}, False)],
)
async def test_workers_are_told_of_whole_answers(world, more, whole):
    """Tokens and the end in one entry, as they come then."""
    worker = await world.worker()
    ids = world.ids(ANSWER)
    worker.script = lambda submit: [
        TokenEntry(
            request_id=submit.request_id,
            attempt=1,
            seq=0,
            token_ids=ids,
            logprobs=[-0.5] * len(ids) if submit.sampling.logprobs else None,
            finish=FinishReason.STOP,
        )
    ]
    body = {"model": "fox", "messages": MESSAGES, **more}
    response = await world.http.post("/v1/chat/completions", json=body)
    assert [submit.whole for submit in worker.submits] == [whole]
    if "stream" in more:
        assert response.text.count("finish_reason") >= 2
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        (choice,) = response.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
    (row,) = world.usage.rows
    assert (row["status"], row["output_tokens"]) == ("ok", len(ids))
