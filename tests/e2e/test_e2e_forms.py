"""What an answer must look like, how many there are to be and how long they may take, through the
whole system.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from embedded_system import RunningSystem

from pilotlight.common.clock import SystemClock

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "What is a pilot light?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,8}-[0-9]{3}"
CHOICES = ["a small flame", "a lamp of an aeroplane", "naïve 你好"]
BOMB_S = 20.0
"""A bomb is to be refused by then: the engine's own limit of a compilation is 2 s of computing
time."""


def body(**options: Any) -> dict[str, Any]:
    """A request to the demo model, sampled at 1: it is the grammar that gives an answer its
    form.
    """
    extra = {
        name: options.pop(name) for name in ("structured_outputs", "timeout_s") if name in options
    }
    return {
        "model": "ember-7m",
        "messages": QUESTION,
        "max_tokens": 400,
        "seed": 5,
        **options,
        "extra_body": extra,
    }


def asked(system: RunningSystem, **options: Any) -> Any:
    """The answer in one piece."""
    with system.openai() as client:
        return client.chat.completions.create(**body(**options))


def streamed(system: RunningSystem, **options: Any) -> dict[int, str]:
    """The texts of a stream's choices."""
    texts: dict[int, str] = {}
    with system.openai() as client:
        for chunk in client.chat.completions.create(**body(**options), stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


def doubling(count: int) -> dict[str, Any]:
    """A schema of a few kilobytes that doubles with every reference."""
    twice = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {
        "$defs": {**twice, f"d{count}": {"type": "string", "pattern": "a"}},
        "$ref": "#/$defs/d0",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_the_form_that_is_asked_for(system: RunningSystem, stream: bool) -> None:
    def text(**options: Any) -> str:
        return (
            streamed(system, **options)[0]
            if stream
            else asked(system, **options).choices[0].message.content
        )

    described = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
    }
    jsonschema.validate(json.loads(text(response_format=described)), SCHEMA)
    assert re.fullmatch(REGEX, text(structured_outputs={"regex": REGEX}))
    assert text(structured_outputs={"choice": CHOICES}) in CHOICES


def test_a_grammar_that_cannot_be_compiled_is_refused_with_its_reason(
    system: RunningSystem,
) -> None:
    for form, reason in (
        ({"structured_outputs": {"regex": "(?=a)b"}}, "look-around"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "nothing"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            "not",
        ),
    ):
        for ask in (asked, streamed):
            with pytest.raises(openai.BadRequestError, match=reason) as caught:
                ask(system, **form)
            assert caught.value.code == "invalid_request"
    assert (
        asked(system, structured_outputs={"choice": CHOICES}).choices[0].message.content in CHOICES
    )


def test_a_bomb_ends_its_own_request_alone(system: RunningSystem) -> None:
    undisturbed = streamed(system, max_tokens=150)
    bombs: list[dict[str, Any]] = [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "memory", "schema": doubling(25)},
            }
        },
        {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}},
    ]

    def explode(form: dict[str, Any]) -> tuple[openai.APIStatusError, float]:
        start_s = SystemClock().monotonic_s()
        with pytest.raises(openai.APIStatusError) as caught:
            asked(system, **form)
        return caught.value, SystemClock().monotonic_s() - start_s

    with ThreadPoolExecutor(len(bombs) + 1) as pool:
        exploding = [pool.submit(explode, form) for form in bombs]
        beside = [streamed(system, max_tokens=150) for _ in range(2)]
        for error, took_s in (future.result() for future in exploding):
            assert (error.status_code, error.code) == (400, "invalid_request"), error.message
            assert took_s < BOMB_S
    assert beside == [undisturbed] * 2
    assert (
        asked(system, structured_outputs={"choice": CHOICES}).choices[0].message.content in CHOICES
    )


def test_several_answers_are_the_same_ones_again(system: RunningSystem) -> None:
    # The demo model is sure of what it says: at its usual temperature all answers are the same.
    wild = {"temperature": 2, "max_tokens": 40}
    whole = asked(system, n=4, **wild)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert list(texts) == [0, 1, 2, 3]
    assert len(set(texts.values())) == 4
    assert streamed(system, n=4, **wild) == texts
    alone = asked(system, **wild)
    assert alone.choices[0].message.content == texts[0]
    assert alone.usage.prompt_tokens == whole.usage.prompt_tokens
    formed = streamed(system, n=3, structured_outputs={"regex": REGEX})
    assert all(re.fullmatch(REGEX, formed[index]) for index in range(3))


def test_an_answer_that_takes_too_long_is_ended(system: RunningSystem) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        asked(system, max_tokens=400, timeout_s=0.05)
    assert (caught.value.status_code, caught.value.code) == (503, "deadline_exceeded")
    assert asked(system, max_tokens=4, timeout_s=60).choices[0].finish_reason in ("length", "stop")
