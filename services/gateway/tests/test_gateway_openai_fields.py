"""Fields beyond OpenAI's own, sent by the official client: those that work, those that are refused
by name, those that change nothing.
"""

import json

import openai
import pytest

from pilotlight.gateway.schema.requests import NotSupported
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_fallback_json, byte_level_json

pytestmark = pytest.mark.anyio

THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Knows ``enable_thinking`` as Qwen3's template does."""
USER = {"role": "user", "content": "hello"}
BEGUN = {"role": "assistant", "content": "The quick "}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."


@pytest.fixture
def bundle() -> TextBundle:
    return TextBundle(
        tokenizer_json=byte_level_json(), chat_template=THINKING, special_tokens=SPECIALS
    )


def chat(world, *messages, **extra):
    return world.client.chat.completions.create(
        model="fox", messages=list(messages) or [USER], extra_body=extra
    )


async def prompt(world, *messages, **extra):
    worker = world.workers[0] if world.workers else await world.worker()
    await chat(world, *messages, **extra)
    return world.entry.text.tokenizer.decode(
        worker.submits[-1].prompt_ids, skip_special_tokens=False
    )


async def refused(world, *messages, **extra):
    if not world.workers:
        await world.worker()
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(world, *messages, **extra)
    assert caught.value.param in caught.value.message
    return caught.value


TURN = "<|im_start|>user\nhello<|im_end|>\n"


async def test_what_the_prompt_ends_with(world):
    assert await prompt(world) == TURN + "<|im_start|>assistant\n"
    assert await prompt(world, add_generation_prompt=True) == TURN + "<|im_start|>assistant\n"
    assert await prompt(world, add_generation_prompt=False) == TURN
    continued = TURN + "<|im_start|>assistant\nThe quick "
    assert await prompt(world, USER, BEGUN, continue_final_message=True) == continued
    assert (
        await prompt(world, USER, BEGUN, continue_final_message=True, add_generation_prompt=False)
        == continued
    )
    parts = {"role": "assistant", "content": [{"type": "text", "text": "The quick "}]}
    assert await prompt(world, USER, parts, continue_final_message=True) == continued


async def test_what_cannot_be_continued_is_said(world):
    both = await refused(
        world, USER, BEGUN, continue_final_message=True, add_generation_prompt=True
    )
    assert (both.param, "add_generation_prompt" in both.message) == ("continue_final_message", True)
    assert (
        await refused(world, USER, continue_final_message=True)
    ).param == "continue_final_message"
    called = {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    assert (await refused(world, USER, called, continue_final_message=True)).status_code == 400
    assert (
        await refused(world, USER, BEGUN, continue_final_message="yes")
    ).param == "continue_final_message"


async def test_a_templates_variables(world):
    assert (await prompt(world, chat_template_kwargs={"enable_thinking": False})).endswith(
        "<think>\n\n</think>\n\n"
    )
    assert (await prompt(world, chat_template_kwargs={"enable_thinking": True})).endswith(
        "assistant\n"
    )
    assert (await prompt(world, chat_template_kwargs={"unknown": [1, {"a": None}]})).endswith(
        "assistant\n"
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": []},
        {"tools": []},
        {"bos_token": "x"},
        {"add_generation_prompt": False},
        {"raise_exception": 1},
        {"__class__": 1},
        {"": 1},
        {"big": "x" * 20_000},
        {str(number).join("ab"): 1 for number in range(3000)},
        "enable_thinking",
        [1],
    ],
)
async def test_variables_replace_nothing_and_are_bounded(world, variables):
    assert (await refused(world, chat_template_kwargs=variables)).param == "chat_template_kwargs"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_is_shown_where_that_is_asked_for(world, stream):
    worker = await world.worker()
    token_ids = world.ids(ANSWER)
    worker.script = lambda submit: entries_of(submit, token_ids, finish=None)
    extra = {"stop": ["own fo", "never"], "include_stop_str_in_output": True, "stream": stream}
    answer = await world.http.post(
        "/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, **extra}
    )
    events = (
        [line for line in answer.text.split("\n\n") if "text_completion" in line]
        if stream
        else [answer.text]
    )
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "The quick brown fo"
    assert choices[-1]["finish_reason"] == "stop"
    reply = await chat(world, stop="quick", include_stop_str_in_output=True)
    assert reply.choices[0].message.content == "The quick"
    assert (await chat(world, stop="quick")).choices[0].message.content == "The "


HARMLESS = {
    "best_of": 1,
    "use_beam_search": False,
    "priority": 0,
    "bad_words": [],
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "truncate_prompt_tokens": None,
    "chat_template": None,
    "return_token_ids": False,
    "skip_special_tokens": True,
    "add_special_tokens": False,
    "length_penalty": 1.0,
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "request_id": "x",
    "guided_decoding_backend": "outlines",
    "of_a_later_release": {"x": 1},
}
CHANGING = {
    "chat_template": "{{ messages }}",
    "prompt_logprobs": 0,
    "bad_words": ["x"],
    "allowed_token_ids": [5],
    "truncate_prompt_tokens": 10,
    "return_token_ids": True,
    "priority": 3,
    "use_beam_search": True,
    "verbosity": "low",
    "skip_special_tokens": False,
    "add_special_tokens": True,
    "documents": [{"text": "x"}],
    "regex": "[ab]",
    "typical_p": 0.5,
}


async def test_fields_that_change_nothing_are_taken(world):
    await world.worker()
    assert (await chat(world, **HARMLESS)).choices[0].message.content == ANSWER


@pytest.mark.parametrize("field", [*CHANGING, *NotSupported.__struct_fields__])
async def test_fields_that_would_change_the_answer_are_refused_by_name(world, field):
    error = await refused(world, **{field: CHANGING.get(field, {"some": "thing"})})
    assert (error.status_code, error.param, error.code) == (400, field, "invalid_request")


async def test_special_tokens_of_a_plain_prompt_are_the_other_way_round(world):
    await world.worker()
    plain = {"model": "fox", "prompt": "x"}
    await world.client.completions.create(**plain, extra_body={"add_special_tokens": True})
    with pytest.raises(openai.BadRequestError):
        await world.client.completions.create(**plain, extra_body={"add_special_tokens": False})


async def test_plain_completions_have_16_tokens_unless_they_are_told(make_world):
    world = await make_world(max_context_tokens=64)
    worker = await world.worker()
    answer = await world.client.completions.create(model="fox", prompt=[5, 6])
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")
    await world.client.completions.create(model="fox", prompt=[5] * 60)
    await world.client.completions.create(model="fox", prompt=[5], max_tokens=40)
    await chat(world)
    assert [submit.sampling.max_tokens for submit in worker.submits[:3]] == [16, 4, 40]
    assert worker.submits[3].sampling.max_tokens > 16


LITELLM = "this model's maximum context length is"
"""What LiteLLM looks for, in lower case, before it falls back to a model with a longer context."""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "fox " * 100}]}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "fox " * 50_000}]},
            "messages",
        ),
        ("chat/completions", {"messages": [USER], "max_tokens": 100}, "max_tokens"),
        (
            "chat/completions",
            {"messages": [USER], "max_completion_tokens": 100},
            "max_completion_tokens",
        ),
        ("completions", {"prompt": [5] * 64}, "prompt"),
        ("completions", {"prompt": "fox " * 50_000}, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": 64}, "max_tokens"),
    ],
)
async def test_the_context_error_is_worded_as_openais(make_world, path, body, param):
    world = await make_world(max_context_tokens=64)
    error = (await world.http.post(f"/v1/{path}", json={"model": "fox", **body})).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"{LITELLM} 64 tokens" in error["message"].lower()


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "refusal", "video_url"])
async def test_a_part_that_is_no_text_is_named(world, kind):
    error = await refused(
        world,
        {
            "role": "user",
            "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "x"}}],
        },
    )
    assert error.param == "messages[0].content[1].type"
    assert f"takes text only, and no part of type '{kind}'" in error.message


@pytest.mark.parametrize(
    "body", ["{", "[]", '{"model": "fox", "messages": [{"role": "user", "content": "\\ud800"}]}']
)
async def test_a_field_is_not_spoken_of_where_none_is_named(world, body):
    error = (await world.http.post("/v1/chat/completions", content=body)).json()["error"]
    assert error["param"] is None
    assert "the field" not in error["message"]


@pytest.mark.parametrize(
    ("asked", "guidance"),
    [
        ({"structured_outputs": {"json": {"type": "object"}}}, None),
        (
            {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}},
            None,
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            {"whitespace_flexible": True},
        ),
        (
            {"structured_outputs": {"json": '{"type": "object"}', "whitespace_pattern": " ?"}},
            {"whitespace_pattern": " ?"},
        ),
        (
            {"guided_json": {"type": "object"}, "guided_whitespace_pattern": "~"},
            {"whitespace_pattern": "~"},
        ),
        ({"guided_json": {"x-guidance": {"item_separator": ", "}}}, {"item_separator": ", "}),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"disable_any_whitespace": False},
            },
            {"whitespace_flexible": True},
        ),
    ],
)
async def test_blanks_in_json_are_asked_for(world, asked, guidance):
    worker = await world.worker()
    await chat(world, **asked)
    grammar = worker.submits[0].sampling.grammar
    assert json.loads(grammar.text).get("x-guidance") == guidance
    assert (
        await refused(world, structured_outputs={"json_object": True, "spaces": 1})
    ).param == "structured_outputs.spaces"


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
HERMES = THINKING.replace(
    "{% if add_generation_prompt",
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{% if add_generation_prompt",
).replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [THINKING, HERMES], ids=["plain", "hermes"])
class TestForcedCalls:
    @pytest.fixture
    def bundle(self, template: str) -> TextBundle:
        return TextBundle(
            tokenizer_json=byte_level_json(), chat_template=template, special_tokens=SPECIALS
        )

    async def test_a_call_that_is_cut_short_leaves_no_content(self, world, template, stream):
        call = (
            '{"name": "f", "arguments": {}}'
            if template is THINKING
            else '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        )
        await world.worker(answer=call)
        for tokens in range(1, len(world.ids(call)) + 1):
            reply = await world.client.chat.completions.create(
                model="fox",
                messages=[USER],
                tools=[TOOL],
                tool_choice="required",
                max_tokens=tokens,
                stream=stream,
            )
            choices = [chunk.choices[0] async for chunk in reply] if stream else reply.choices
            said = [choice.delta if stream else choice.message for choice in choices]
            assert not any(one.content for one in said), tokens
            assert stream or said[0].content is None
        assert any(one.tool_calls for one in said)


@pytest.mark.parametrize(
    "tokenizer_json", [byte_level_json(), byte_fallback_json()], ids=["byte-level", "byte-fallback"]
)
class TestBytes:
    @pytest.fixture
    def bundle(self, tokenizer_json: str) -> TextBundle:
        return TextBundle(
            tokenizer_json=tokenizer_json, chat_template=THINKING, special_tokens=SPECIALS
        )

    async def test_each_token_has_its_own_bytes(self, world):
        # The last character is in no vocabulary: whatever was trained, it is written in several
        # tokens.
        answer = f"{ANSWER} 🜁"
        await world.worker(answer=answer)
        reply = await world.client.chat.completions.create(
            model="fox", messages=[USER], logprobs=True
        )
        tokens = reply.choices[0].logprobs.content
        assert (
            bytes(byte for token in tokens for byte in token.bytes).decode().lstrip(" ") == answer
        )
        assert all(token.token == bytes(token.bytes).decode(errors="replace") for token in tokens)
        assert any("\N{REPLACEMENT CHARACTER}" in token.token for token in tokens)
        plain = await world.client.completions.create(
            model="fox", prompt="x", logprobs=1, max_tokens=4
        )
        assert plain.choices[0].logprobs.tokens == [token.token for token in tokens[:4]]
