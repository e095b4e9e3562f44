"""What a request says its answer must look like: OpenAI's ``response_format``, and vLLM's fields."""

import json
from typing import Any

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.openai.types import CommonRequest, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from pilotlight.policy.types import Grammar, GrammarKind

MAX_GRAMMAR_CHARS = 256 * 1024
"""As the engine takes them."""
_OBJECT: dict[str, Any] = {"type": "object"}


def grammar_of(request: CommonRequest) -> Grammar | None:
    """The grammar that the answer is to follow; None for free text.

    Raises:
        BadRequest: more than one is asked for, or it is too long. Whether it can be used is found out where it is compiled.
    """
    asked = [
        *_of_response_format(request),
        *_of_fields("structured_outputs", request.structured_outputs),
        *_of_fields(
            "guided_",
            StructuredOutputs(
                json=request.guided_json, regex=request.guided_regex, choice=request.guided_choice, grammar=request.guided_grammar
            ),
        ),
    ]
    if len(asked) > 1:
        raise BadRequest(
            f"{asked[0][0]} and {asked[1][0]} contradict each other: an answer follows one of them", param=asked[1][0]
        )
    if not asked:
        return None
    param, grammar = asked[0]
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"{param} has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken", param=param)
    return grammar


def _of_response_format(request: CommonRequest) -> list[tuple[str, Grammar]]:
    match request.response_format:
        case JsonObjectFormat():
            return [("response_format", _schema(_OBJECT))]
        case JsonSchemaFormat(json_schema=described):
            return [("response_format.json_schema.schema", _schema(described.schema))]
        case _:
            return []


def _of_fields(name: str, fields: StructuredOutputs | None) -> list[tuple[str, Grammar]]:
    if fields is None:
        return []
    prefix = name if name.endswith("_") else f"{name}."
    asked: list[tuple[str, Grammar]] = []
    if fields.json is not None:
        asked.append((f"{prefix}json", _given_schema(fields.json, f"{prefix}json")))
    if fields.json_object:
        asked.append((f"{prefix}json_object", _schema(_OBJECT)))
    if fields.regex is not None:
        asked.append((f"{prefix}regex", Grammar(kind=GrammarKind.REGEX, text=fields.regex)))
    if fields.choice is not None:
        asked.append((f"{prefix}choice", Grammar(kind=GrammarKind.CHOICE, text=json.dumps(fields.choice))))
    if fields.grammar is not None:
        asked.append((f"{prefix}grammar", Grammar(kind=GrammarKind.LARK, text=fields.grammar)))
    return asked


def _given_schema(given: str | dict[str, Any], param: str) -> Grammar:
    """A schema as it is, or as the text of one."""
    if isinstance(given, dict):
        return _schema(given)
    try:
        return _schema(msgspec.json.decode(given, type=dict[str, Any]))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{param} is no JSON schema: {error}", param=param) from error


def _schema(schema: dict[str, Any]) -> Grammar:
    try:
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=msgspec.json.encode(schema).decode())
    except RecursionError as error:
        raise BadRequest("the JSON schema is nested too deeply") from error
