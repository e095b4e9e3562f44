"""What a chat template does with tools, found by letting it write a conversation with one and
reading that back.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pilotlight.common.errors import BadRequest
from pilotlight.text.decoding import TokenDecoder
from pilotlight.text.template import ChatTemplate
from pilotlight.text.tools.dialects import DIALECTS, ToolDialect
from pilotlight.text.tools.parser import ToolParser

_NAME = "probe_function"
_QUESTION = "probe_question"
_RESULT = "probe_result"
_ID = "probecall"
"""Nine letters: some templates insist."""
_ARGUMENTS = {"probe_key": "probe_value"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}
_USER = {"role": "user", "content": _QUESTION}
_TOOL_RESULT = {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": _RESULT}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTools:
    """What a template does with tools. All of it off: it knows none."""

    describes: bool = False
    """It writes what tools there are."""
    dialect: ToolDialect | None = None
    """How it writes calls; None when it writes none, or in a way that is not known."""
    writes_calls: bool = False
    """It writes the calls of earlier turns, in whatever way."""
    writes_results: bool = False
    """It writes what tools answered."""
    arguments_as_text: bool = False
    """It takes a call's arguments as JSON text. Others take them as an object."""


def template_tools(template: ChatTemplate, tokenizer: TokenDecoder) -> TemplateTools:
    """What this template does with tools: a function of template and tokenizer alone.

    A template that fails on a conversation with tools knows none.

    Raises:
        TooLarge: it writes without end, even of a short conversation.
    """
    described = _rendered(template, [_USER], tools=[_TOOL])
    describes = _NAME in described
    tools = [_TOOL] if describes else None
    written = _calls_written(template, tools)
    if written is None:
        results = _RESULT in _rendered(template, [_USER, _TOOL_RESULT], tools=tools)
        return TemplateTools(describes=describes, writes_results=results)
    text, as_text = written
    begun = described if describes else _rendered(template, [_USER])
    conversation = [_USER, _call_message(as_text=as_text), _TOOL_RESULT]
    return TemplateTools(
        describes=describes,
        dialect=_dialect(_answer(text, begun), tokenizer),
        writes_calls=True,
        writes_results=_RESULT in _rendered(template, conversation, tools=tools),
        arguments_as_text=as_text,
    )


def _calls_written(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[str, bool] | None:
    """A conversation with a call, and whether its arguments were given as text; None when the
    template leaves calls out.
    """
    value = _ARGUMENTS["probe_key"]
    texts = {
        as_text: _rendered(
            template,
            [_USER, _call_message(as_text=as_text)],
            tools=tools,
            add_generation_prompt=False,
        )
        for as_text in (False, True)
    }
    for as_text, text in texts.items():
        if _NAME in text and json.dumps(value) in text:
            return text, as_text
    # Not as JSON, but not as Python writes an object either.
    if _NAME in texts[False] and value in texts[False] and repr(value) not in texts[False]:
        return texts[False], False
    return None


def _call_message(*, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """What the template writes; nothing when it fails."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except BadRequest:
        return ""


def _answer(written: str, begun: str) -> str:
    """The assistant's turn of a conversation: what follows the beginning that a model is given."""
    if begun and written.startswith(begun):
        return written[len(begun) :]
    return written[written.rfind(_QUESTION) + len(_QUESTION) :]


def _dialect(answer: str, tokenizer: TokenDecoder) -> ToolDialect | None:
    """The first dialect that reads the probe's call out of this answer."""
    for dialect in DIALECTS:
        parser = ToolParser(dialect, [_NAME])
        pieces = [*parser.feed(answer).calls, *parser.finish().calls]
        if [piece.name for piece in pieces if piece.name is not None] != [_NAME]:
            continue
        if _is_probe("".join(piece.arguments for piece in pieces)):
            # A marker that a call can do without is none where it is no token: a model does not
            # spell it.
            spelled = dialect.unmarked and dialect.opening not in tokenizer.added_tokens
            return replace(dialect, opening="") if spelled else dialect
    return None


def _is_probe(arguments: str) -> bool:
    try:
        return json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False
