"""Requests with tools, choices of tools and calls that are refused, each by the name of its field;
and unusual ones that are not.
"""

import json

import pytest

from pilotlight.gateway.openai.testing import CHAT, QUESTION, TOOLS, function
from pilotlight.text.tools.testing import bundle_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def bundle():
    return bundle_of("hermes")


def call(**changes):
    return {
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}", **changes},
    }


BAD = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [function("")]}, "tools[0].function.name"),
    ({"tools": [function("a b")]}, "tools[0].function.name"),
    ({"tools": [function("f\n")]}, "tools[0].function.name"),
    ({"tools": [function("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [function("f"), function("f")]}, "tools[1].function.name"),
    ({"tools": [function("f", [])]}, "tools[0].function.parameters"),
    ({"tools": [function("f", {"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [function("f", {"properties": []})]}, "tools[0].function.parameters"),
    ({"tools": [function("f", strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [function(f"f{number}") for number in range(129)]}, "tools"),
    ({"tools": [function("f", description="x" * 300_000)]}, "tools"),
    ({"tools": "get_weather"}, "tools"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [], "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
        "tool_choice",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "tools"),
    ({"tool_choice": "required", "guided_regex": "a"}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    (
        {"messages": [QUESTION, {"role": "user", "content": "x", "tool_calls": [call()]}]},
        "messages[1].tool_calls",
    ),
    (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls[0].function",
    ),
    (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call(arguments="{")]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call(arguments="[]")]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "tool_calls": [call(arguments='{"a":' * 5000)]},
            ]
        },
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [QUESTION, {"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[1].function_call",
    ),
    ({"messages": [QUESTION, {"role": "tool", "content": "1"}]}, "messages[1].tool_call_id"),
    (
        {"messages": [QUESTION, {"role": "tool", "content": "1", "tool_call_id": "call_9"}]},
        "messages[1].tool_call_id",
    ),
    ({"messages": [QUESTION, {"role": "tool", "tool_call_id": "call_9"}]}, "messages[1].content"),
]


async def test_bad_input(world):
    wrong = []
    for changes, param in BAD:
        body = {"model": "fox", "messages": [QUESTION], "tools": TOOLS, **changes}
        response = await world.http.post(CHAT, json=body)
        error = response.json()["error"]
        if (response.status_code, error["param"]) != (400, param) or not error["message"]:
            wrong.append((str(changes)[:100], response.status_code, error))
    assert wrong == []
    deep = '{"a":' * 100 + "{}" + "}" * 100
    body = json.dumps(
        {"model": "fox", "messages": [QUESTION], "tools": [function("f", {"properties": "DEEP"})]}
    )
    response = await world.http.post(CHAT, content=body.replace('"DEEP"', deep))
    assert response.json()["error"]["param"] == "tools[0].function.parameters"
    response = await world.http.post(
        "/v1/completions", json={"model": "fox", "prompt": "x", "tools": TOOLS}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_accepted_though_unusual(world):
    await world.worker(answer="ok")
    bare = {"type": "function", "function": {"name": "f"}}
    for changes in (
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "tool_choice": "none"},
        {"tools": [bare], "tool_choice": None, "parallel_tool_calls": None},
        {"tools": [bare], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}},
        {"tools": TOOLS, "response_format": {"type": "text"}},
        {"messages": [QUESTION, {"role": "assistant", "content": "x", "tool_calls": []}]},
    ):
        response = await world.http.post(
            CHAT, json={"model": "fox", "messages": [QUESTION], **changes}
        )
        assert response.status_code == 200, (changes, response.text)
