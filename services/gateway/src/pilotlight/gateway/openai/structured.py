"""What a request says its answer must look like: OpenAI's ``response_format``, and vLLM's
fields.
"""

import json
from operator import attrgetter
from typing import Any

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.schema.requests import (
    CommonRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from pilotlight.policy.request import Grammar, GrammarKind

MAX_GRAMMAR_CHARS = 256 * 1024
"""As the engine takes them."""
_OBJECT: dict[str, Any] = {"type": "object"}
_GIVEN = attrgetter(
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_NOTHING_GIVEN = (None,) * 6
_GUIDANCE = "x-guidance"
"""The member of a schema in which llguidance is told how its JSON is written."""


def grammar_of(request: CommonRequest) -> Grammar | None:
    """The grammar that the answer is to follow; None for free text.

    Raises:
        BadRequest: more than one is asked for, or it is too long. Whether it can be used is found
            out where it is compiled.
    """
    if _GIVEN(request) == _NOTHING_GIVEN:
        return None
    guidance = _guidance(request)
    asked = [
        *_of_response_format(request, guidance),
        *_of_fields("structured_outputs", request.structured_outputs, guidance),
        *_of_fields(
            "guided_",
            StructuredOutputs(
                json=request.guided_json,
                regex=request.guided_regex,
                choice=request.guided_choice,
                grammar=request.guided_grammar,
            ),
            guidance,
        ),
    ]
    if len(asked) > 1:
        raise BadRequest(
            f"{asked[0][0]} and {asked[1][0]} contradict each other: an answer follows one of them",
            param=asked[1][0],
        )
    if not asked:
        return None
    param, grammar = asked[0]
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"{param} has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken",
            param=param,
        )
    return grammar


def _of_response_format(
    request: CommonRequest, guidance: dict[str, Any]
) -> list[tuple[str, Grammar]]:
    match request.response_format:
        case JsonObjectFormat():
            return [("response_format", _schema(_OBJECT | guidance))]
        case JsonSchemaFormat(json_schema=described):
            return [("response_format.json_schema.schema", _schema(described.schema | guidance))]
        case _:
            return []


def _of_fields(
    name: str, fields: StructuredOutputs | None, guidance: dict[str, Any]
) -> list[tuple[str, Grammar]]:
    if fields is None:
        return []
    prefix = name if name.endswith("_") else f"{name}."
    asked: list[tuple[str, Grammar]] = []
    if fields.json is not None:
        asked.append((f"{prefix}json", _schema(_given(fields.json, f"{prefix}json") | guidance)))
    if fields.json_object:
        asked.append((f"{prefix}json_object", _schema(_OBJECT | guidance)))
    if fields.regex is not None:
        asked.append((f"{prefix}regex", Grammar(kind=GrammarKind.REGEX, text=fields.regex)))
    if fields.choice is not None:
        asked.append(
            (f"{prefix}choice", Grammar(kind=GrammarKind.CHOICE, text=json.dumps(fields.choice)))
        )
    if fields.grammar is not None:
        asked.append((f"{prefix}grammar", Grammar(kind=GrammarKind.LARK, text=fields.grammar)))
    return asked


def _guidance(request: CommonRequest) -> dict[str, Any]:
    """What a request says of blanks between the parts of JSON, for its schema.

    Where nothing is said, there are none.
    """
    fields = request.structured_outputs or StructuredOutputs()
    pattern = (
        request.guided_whitespace_pattern
        if fields.whitespace_pattern is None
        else fields.whitespace_pattern
    )
    if pattern is not None:
        return {_GUIDANCE: {"whitespace_pattern": pattern}}
    return (
        {_GUIDANCE: {"whitespace_flexible": True}} if fields.disable_any_whitespace is False else {}
    )


def _given(given: str | dict[str, Any], param: str) -> dict[str, Any]:
    """A schema as it is, or as the text of one."""
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{param} is no JSON schema: {error}", param=param) from error


def _schema(schema: dict[str, Any]) -> Grammar:
    try:
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=msgspec.json.encode(schema).decode())
    except RecursionError as error:
        raise BadRequest("the JSON schema is nested too deeply") from error
