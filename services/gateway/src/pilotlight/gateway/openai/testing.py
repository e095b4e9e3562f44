"""What requests with tools are made of, for tests."""

from typing import Any

from pilotlight.text.tools.testing import WEATHER

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is the weather in Köln?"}


def function(name: str, parameters: object = WEATHER, **changes: Any) -> dict[str, Any]:
    """One tool of a request."""
    return {
        "type": "function",
        "function": {"name": name, "description": "It tells.", "parameters": parameters, **changes},
    }


TOOLS = [function("get_weather"), function("get_time", {"type": "object", "properties": {}})]
STRICT = [
    function("get_weather", strict=True),
    function("get_time", {"type": "object", "properties": {}}, strict=True),
]
