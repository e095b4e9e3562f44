"""Calls of tools through the whole system: gateway, bus, worker, engine, grammar helper."""

import json
from typing import Any

import jsonschema
import pytest
from embedded_system import RunningSystem
from openai.types.chat import ChatCompletionMessageFunctionToolCall

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "enum": ["France", "Spain", "Italy"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["country", "year", "notes"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_capital",
            "description": "A country's capital.",
            "parameters": PARAMETERS,
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}},
]
SCHEMAS = {"get_capital": PARAMETERS, "get_time": NOTHING}
QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}


def ask(system: RunningSystem, **options: Any) -> Any:
    with system.openai() as client:
        asked = {"messages": [QUESTION], "tools": TOOLS, "max_tokens": 200, **options}
        return client.chat.completions.create(model="ember-7m", **asked).choices[0]


def check(call: ChatCompletionMessageFunctionToolCall) -> None:
    validator: Any = jsonschema.Draft202012Validator(SCHEMAS[call.function.name])
    validator.validate(json.loads(call.function.arguments))


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_call_that_is_required_is_made_and_valid(
    system: RunningSystem, temperature: float
) -> None:
    """The model has learned of no tools: only the grammar makes this a call."""
    for seed in range(4):
        choice = ask(
            system,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=temperature,
            seed=seed,
        )
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        check(call)


def test_a_named_function_is_called_also_in_a_stream(system: RunningSystem) -> None:
    named = {
        "tool_choice": {"type": "function", "function": {"name": "get_capital"}},
        "temperature": 0,
    }
    choice = ask(system, **named)
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_capital"
    check(call)
    arguments = ""
    names: list[str] = []
    with system.openai() as client:
        chunks = client.chat.completions.create(
            model="ember-7m", messages=[QUESTION], tools=TOOLS, max_tokens=200, stream=True, **named
        )
        for piece in (
            piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()
        ):
            assert piece.function is not None
            names += [piece.function.name] if piece.function.name else []
            arguments += piece.function.arguments or ""
    assert (names, arguments) == (["get_capital"], call.function.arguments)


def test_a_conversation_goes_on_after_a_call(system: RunningSystem) -> None:
    choice = ask(system, tool_choice="required", parallel_tool_calls=False, temperature=0)
    message = choice.message.to_dict()
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "Paris"}
    follow_up = ask(system, messages=[QUESTION, message, result], temperature=0, max_tokens=20)
    assert follow_up.message.content
    assert (
        ask(system, tool_choice="none", temperature=0).message.content
        == "The capital of France is Paris."
    )
