"""What LiteLLM's clients do: calls in OpenAI's shape, and errors as its own classes."""

import os
from typing import Any

import litellm
import pytest

MODEL = "openai/ember-7m"
TURNS = [{"role": "user", "content": "What is a pilot light?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def asked(**more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "api_base": f"{os.environ['PILOTLIGHT_URL']}/v1",
        "api_key": os.environ["PILOTLIGHT_API_KEY"],
        "max_tokens": 40,
        "temperature": 0,
        "num_retries": 0,
        **more,
    }


def test_a_chat() -> None:
    answer = litellm.completion(messages=TURNS, **asked())
    assert "pilot light" in answer.choices[0].message.content.lower()
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_answer_in_pieces() -> None:
    whole = litellm.completion(messages=TURNS, **asked()).choices[0].message.content
    pieces = litellm.completion(
        messages=TURNS, stream=True, stream_options={"include_usage": True}, **asked()
    )
    chunks = list(pieces)
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert told == whole
    built = litellm.stream_chunk_builder(chunks, messages=TURNS)
    assert built.usage.completion_tokens > 0


async def test_several_at_once() -> None:
    answer = await litellm.acompletion(messages=TURNS, n=2, **asked(temperature=1, seed=5))
    assert len(answer.choices) == 2


def test_a_plain_completion() -> None:
    model = asked() | {"model": "text-completion-openai/ember-7m"}
    answer = litellm.text_completion(prompt="A pilot light", **model)
    assert answer.choices[0].text


def test_a_named_function_is_called() -> None:
    choice = {"type": "function", "function": {"name": "pick"}}
    answer = litellm.completion(messages=TURNS, tools=[TOOL], tool_choice=choice, **asked())
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments[:1]) == ("pick", "{")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"api_key": "wrong"}, litellm.AuthenticationError),
        ({"model": "openai/none"}, litellm.NotFoundError),
        ({"max_tokens": 5000}, litellm.BadRequestError),
        ({"top_p": 5}, litellm.BadRequestError),
    ],
)
def test_errors_are_its_own(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        litellm.completion(messages=TURNS, **(asked() | wrong))
