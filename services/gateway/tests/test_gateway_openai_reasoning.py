"""Reasoning with the official clients: what is read apart, and the switches of templates."""

import openai
import pytest

from pilotlight.gateway.openai.reasoning import EFFORTS
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_level_json

pytestmark = pytest.mark.anyio

_TURNS = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "qwen3": _TURNS
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "deepseek": _TURNS
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    "always": _TURNS
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}",
    "effort": _TURNS + "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}",
    "plain": _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
USER = {"role": "user", "content": "hello"}
THOUGHT = "<think>\n2 + 2, hm\n</think>\n\nIt is 4."


@pytest.fixture(params=["qwen3"])
def family(request):
    return request.param


@pytest.fixture
def bundle(family) -> TextBundle:
    return TextBundle(
        tokenizer_json=byte_level_json(),
        chat_template=TEMPLATES[family],
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


def chat(world, **extra):
    return world.client.chat.completions.create(model="fox", messages=[USER], **extra)


async def prompt(world, **extra):
    worker = world.workers[0] if world.workers else await world.worker()
    await chat(world, extra_body=extra)
    decode = world.entry.text.tokenizer.decode
    return decode(worker.submits[-1].prompt_ids, skip_special_tokens=False)


async def refused(world, **extra):
    if not world.workers:
        await world.worker()
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(world, extra_body=extra)
    return caught.value.param


async def test_what_was_thought_stands_apart(world):
    await world.worker(answer=THOUGHT)
    message = (await chat(world)).choices[0].message
    assert (message.reasoning_content, message.content) == ("2 + 2, hm", "It is 4.")
    deltas = [chunk.choices[0].delta async for chunk in await chat(world, stream=True)]
    thought = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thought) == "2 + 2, hm"
    assert "".join(delta.content or "" for delta in deltas) == "It is 4."


async def test_an_answer_without_a_thought_is_as_ever(world):
    await world.worker(answer="It is 4.")
    message = (await chat(world)).choices[0].message
    assert message.content == "It is 4."
    assert not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("family", ["always"], indirect=True)
async def test_a_prompt_that_begins_the_thought(world):
    await world.worker(answer="2 + 2, hm\n</think>\n\nIt is 4.")
    message = (await chat(world)).choices[0].message
    assert (message.reasoning_content, message.content) == ("2 + 2, hm", "It is 4.")
    # A grammar holds the answer to its form from the first token: nothing is thought.
    formed = await chat(world, response_format={"type": "json_object"})
    assert not hasattr(formed.choices[0].message, "reasoning_content")


async def test_the_responses_api_tells_it_as_an_item(world):
    await world.worker(answer=THOUGHT)
    response = await world.client.responses.create(model="fox", input="hello")
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "2 + 2, hm")
    assert message.content[0].text == "It is 4."
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    kinds = [
        event.type
        async for event in await world.client.responses.create(
            model="fox", input="hello", stream=True
        )
    ]
    assert kinds.count("response.reasoning_text.done") == 1


async def test_the_messages_api_tells_it_as_a_block(world):
    await world.worker(answer=THOUGHT)
    body = {"model": "fox", "max_tokens": 99, "messages": [USER], "thinking": {"type": "enabled"}}
    answer = (await world.http.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][0]["thinking"] == "2 + 2, hm"


@pytest.mark.parametrize(
    "off",
    [
        {"enable_thinking": False},
        {"thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
    ],
)
async def test_thinking_is_switched_off(world, off):
    assert (await prompt(world, **off)).endswith("</think>\n\n")
    assert (await prompt(world)).endswith("assistant\n")
    assert (await prompt(world, reasoning_effort="low")).endswith("assistant\n")


@pytest.mark.parametrize("family", ["deepseek"], indirect=True)
async def test_another_familys_switch(world):
    assert (await prompt(world, enable_thinking=True)).endswith("<think>")
    assert (await prompt(world, enable_thinking=False)).endswith("</think>")


@pytest.mark.parametrize("family", ["effort"], indirect=True)
async def test_the_effort_goes_to_a_template_that_knows_it(world):
    for effort in EFFORTS:
        assert (await prompt(world, reasoning_effort=effort)).endswith(f"Reasoning: {effort}")


@pytest.mark.parametrize("family", ["plain"], indirect=True)
async def test_a_model_that_does_not_think(world):
    assert await refused(world, reasoning_effort="high") == "reasoning_effort"
    assert await refused(world, enable_thinking=True) == "enable_thinking"
    assert await refused(world, thinking={"type": "enabled"}) == "thinking"
    assert await prompt(world, enable_thinking=False) == await prompt(world)


@pytest.mark.parametrize("family", ["always"], indirect=True)
async def test_a_model_that_always_thinks(world):
    assert await refused(world, enable_thinking=False) == "enable_thinking"
    assert await prompt(world, reasoning_effort="high") == await prompt(world)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"thinking": "yes"}, "thinking"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(world, wrong, param):
    assert await refused(world, **wrong) == param


@pytest.mark.parametrize("field", ["reasoning_effort", "enable_thinking", "thinking", "reasoning"])
async def test_plain_completions_do_not_think(world, field):
    await world.worker()
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client.completions.create(model="fox", prompt="x", extra_body={field: True})
    assert caught.value.param == field
