"""Tools: what a request says that may be called, and how its answer is held to that and read."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.openai.structured import MAX_GRAMMAR_CHARS, grammar_of
from pilotlight.gateway.schema.requests import ChatRequest, FunctionSpec, NamedChoice
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.policy.request import Grammar
from pilotlight.text.tools.dialects import PLAIN, ToolDialect
from pilotlight.text.tools.grammar import Function, Markers, call_grammar
from pilotlight.text.tools.parser import ToolParser

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that is given without any."""
_ANY_PARAMETERS: dict[str, Any] = {"type": "object"}
_ID_CHARS = 24
MAX_SCHEMA_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How one request uses tools. All of it off: it has none, or must not call them."""

    described: tuple[dict[str, Any], ...] | None = None
    """What the chat template is told of the functions."""
    dialect: ToolDialect | None = None
    """How calls are written; None when none are looked for."""
    names: frozenset[str] = frozenset()
    grammar: Grammar | None = None
    single: bool = False
    """The answer ends with its first call."""
    forced: bool = False
    """The answer is calls, and nothing else."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that are the dialect's markers."""

    def parser(self) -> ToolParser | None:
        """Reads one answer; None when it is text and nothing else."""
        return (
            None
            if self.dialect is None
            else ToolParser(self.dialect, self.names, single=self.single, forced=self.forced)
        )

    def call_id(self, request_id: str, choice: int, call: int) -> str:
        """A call's id: the same one whenever it is asked for."""
        digest = hashlib.blake2b(f"{request_id}/{choice}/{call}".encode()).hexdigest()
        if self.dialect is not None and self.dialect.max_id_chars is not None:
            return digest[: self.dialect.max_id_chars]
        return f"call_{digest[:_ID_CHARS]}"


NO_TOOLS = ToolUse()


def tool_use_of(request: ChatRequest, text: ModelText) -> ToolUse:
    """How a request uses tools.

    Raises:
        BadRequest: what is said of tools is wrong or contradicts itself, or the model cannot be
            told of them.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return NO_TOOLS
    functions = _checked([tool.function for tool in request.tools])
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    if named is not None and named not in functions:
        raise BadRequest(
            f"tool_choice names {named!r}, which is none of the tools", param="tool_choice"
        )
    if choice == "none":
        return NO_TOOLS
    if grammar_of(request) is not None:
        raise BadRequest(
            "tools and an answer of a given form contradict each other: leave one of them out, or set tool_choice to none",
            param="tools",
        )
    forced = named is not None or choice == "required"
    dialect = _dialect(request, text, forced=forced)
    several = request.parallel_tool_calls is not False and named is None
    markers = _markers(dialect, text)
    allowed = [functions[named]] if named is not None else list(functions.values())
    grammar = None
    if forced or any(function.strict for function in allowed):
        held_to = [
            Function(
                name=function.name,
                parameters=_parameters(function) if forced or function.strict else _ANY_PARAMETERS,
            )
            for function in allowed
        ]
        grammar = call_grammar(dialect, held_to, markers, forced=forced, several=several)
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise BadRequest(
                f"the tools make a grammar of {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken",
                param="tools",
            )
    return ToolUse(
        described=tuple(_described(function) for function in functions.values())
        if text.tools.describes
        else None,
        dialect=dialect,
        names=frozenset(function.name for function in allowed),
        grammar=grammar,
        single=not several,
        forced=forced,
        kept_ids=frozenset(markers.ids.values()),
    )


def _checked(functions: list[FunctionSpec]) -> dict[str, FunctionSpec]:
    """The functions by their names."""
    by_name: dict[str, FunctionSpec] = {}
    chars = 0
    for index, function in enumerate(functions):
        where = f"tools[{index}].function"
        if _NAME.fullmatch(function.name) is None:
            raise BadRequest(
                f"{where}.name: a function's name has 1 to 64 letters, digits, underscores and hyphens",
                param=f"{where}.name",
            )
        if function.name in by_name:
            raise BadRequest(
                f"{where}.name: there are two functions {function.name!r}", param=f"{where}.name"
            )
        _check_schema(function.parameters, f"{where}.parameters")
        chars += len(msgspec.json.encode(function))
        by_name[function.name] = function
    if chars > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"the tools have {chars} characters; at most {MAX_GRAMMAR_CHARS} are taken",
            param="tools",
        )
    return by_name


def _check_schema(schema: dict[str, Any] | None, where: str) -> None:
    """Looks for what is certainly wrong.

    What a grammar cannot be made of is found out where it is compiled.
    """
    if schema is None:
        return
    if schema.get("type", "object") != "object":
        raise BadRequest(
            f"{where}: arguments are an object, so the schema's type is 'object'", param=where
        )
    if not isinstance(schema.get("properties", {}), dict) or not isinstance(
        schema.get("required", []), list
    ):
        raise BadRequest(
            f"{where}: not a JSON schema: properties is an object, required an array", param=where
        )
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise BadRequest(f"{where}: nested more than {MAX_SCHEMA_DEPTH} deep", param=where)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def _dialect(request: ChatRequest, text: ModelText, *, forced: bool) -> ToolDialect:
    known = text.tools.dialect
    if not forced and not text.tools.describes:
        raise BadRequest(
            f"the chat template of {request.model} does not tell the model of tools: leave them out, or force a call with "
            "tool_choice 'required' or a function's name",
            param="tools",
        )
    if not forced and known is None:
        raise BadRequest(
            f"how {request.model} writes calls of tools is not known: leave them out, or force a call with tool_choice 'required' "
            "or a function's name",
            param="tools",
        )
    return known or PLAIN


def _markers(dialect: ToolDialect, text: ModelText) -> Markers:
    added = text.tokenizer.added_tokens
    apart = {
        *dialect.markers,
        *(token for token, token_id in added.items() if token_id in text.eos_token_ids),
    }
    return Markers(
        ids={marker: added[marker] for marker in dialect.markers if marker in added},
        others=tuple(token_id for token, token_id in added.items() if token not in apart),
    )


def _parameters(function: FunctionSpec) -> dict[str, Any]:
    return _NO_PARAMETERS if function.parameters is None else function.parameters


def _described(function: FunctionSpec) -> dict[str, Any]:
    """As chat templates know functions: every member is there."""
    described: dict[str, Any] = {"name": function.name, "description": function.description or ""}
    parameters = function.parameters or {}
    described["parameters"] = {
        **parameters,
        "type": "object",
        "properties": parameters.get("properties", {}),
    }
    return {"type": "function", "function": described}
