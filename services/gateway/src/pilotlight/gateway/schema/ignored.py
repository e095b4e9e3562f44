"""Fields of a body with which nothing is done: at its top, and in the objects and lists in it that
have fields of their own.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.schema.decoding import NOT_UTF8
from pilotlight.gateway.schema.messages import CountRequest, MessagesRequest, Thinking, ToolSpec
from pilotlight.gateway.schema.ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaPromptRequest,
)
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest, StreamOptions

MAX_NAMED = 16
"""Ignored fields that are named at most."""
_Kind = type[msgspec.Struct]
_PARTS: Mapping[_Kind, Mapping[str, _Kind]] = {
    ChatRequest: {"stream_options": StreamOptions},
    CompletionRequest: {"stream_options": StreamOptions},
    CountRequest: {"thinking": Thinking, "tools": ToolSpec},
    MessagesRequest: {"thinking": Thinking, "tools": ToolSpec},
    OllamaChatRequest: {"options": OllamaOptions},
    OllamaGenerateRequest: {"options": OllamaOptions},
}
"""Fields that are looked into. Conversations are not: they are long, and their turns have what
clients keep with them."""
_UNHEEDED: Mapping[_Kind, tuple[str, ...]] = {
    Thinking: ("budget_tokens", "display"),
    OllamaChatRequest: ("keep_alive",),
    OllamaGenerateRequest: ("keep_alive",),
    OllamaEmbedRequest: ("keep_alive", "options"),
    OllamaPromptRequest: ("keep_alive", "options"),
}
"""Fields that are known, so that documents show them, and change nothing."""
_UNSAID = (b"null", b"{}", b"[]")
_known: dict[_Kind, frozenset[str]] = {}
"""Names of the heeded fields of each type: to look for one in a tuple of a hundred takes longer
than all else."""
_names: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items: msgspec.json.Decoder[list[dict[str, msgspec.Raw]]] = msgspec.json.Decoder(
    list[dict[str, msgspec.Raw]]
)
_NAMED = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def ignored_fields(body: bytes, as_type: _Kind) -> list[str]:
    """Names in a body that was decoded which nothing is done with, as far as they can be named in a
    header: with the field that they are in, ``options.num_ctx``.

    Raises:
        BadRequest: a name is not UTF-8. Names of fields that are not known are read here alone.
    """
    try:
        names = [*_ignored(_names.decode(body), as_type)]
    except UnicodeDecodeError as error:
        raise BadRequest(NOT_UTF8) from error
    return list(dict.fromkeys(name for name in names if _NAMED.fullmatch(name)))[:MAX_NAMED]


def _ignored(fields: Mapping[str, msgspec.Raw], as_type: _Kind) -> Iterator[str]:
    known = _known.get(as_type)
    if known is None:
        known = _known[as_type] = frozenset(as_type.__struct_fields__)
    for name in fields:
        if name not in known:
            yield name
    for name in _UNHEEDED.get(as_type, ()):
        if name in fields and bytes(fields[name]) not in _UNSAID:
            yield name
    for field, kind in _PARTS.get(as_type, {}).items():
        if field in fields:
            for part in _parts(fields[field]):
                for name in _ignored(part, kind):
                    yield f"{field}.{name}"


def _parts(value: msgspec.Raw) -> list[dict[str, msgspec.Raw]]:
    """The objects of a field: of null none."""
    text = bytes(value)
    if text.startswith(b"["):
        return _items.decode(text)
    return [_names.decode(text)] if text.startswith(b"{") else []
