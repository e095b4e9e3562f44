"""How a request's body is decoded: strictly, and with a refusal by name for what is not
supported.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import TypeVar

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.schema.requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    NotSupported,
)

_OFF: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "bad_words": ([],),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical_p": (1,),
}
"""Values of fields in ``NotSupported`` that switch them off, beside null."""
_OFF_BY_KIND: dict[type, dict[str, tuple[object, ...]]] = {
    ChatRequest: {"add_special_tokens": (False,)},
    CompletionRequest: {"add_special_tokens": (True,)},
}
PLAIN_OFF = (
    "tools",
    "tool_choice",
    "reasoning_effort",
    "enable_thinking",
    "thinking",
    "reasoning",
)
"""Fields of chats that plain completions do not have."""
PLAIN_ON = ("echo", "prompt_logprobs")
"""Fields of plain completions that chats do not have."""
_INSTEAD = {
    "add_special_tokens": "send token ids as the prompt of /v1/completions",
    "allowed_token_ids": "use logit_bias or a grammar",
    "bad_words": "use logit_bias",
    "chat_template": "the model's own is used; send a prompt of your own to /v1/completions",
    "echo": "use /v1/completions",
    "ebnf": "use structured_outputs.grammar",
    "enable_thinking": "use /v1/chat/completions",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "grammar": "use structured_outputs.grammar",
    "json_schema": "use response_format",
    "no_stop_trim": "use include_stop_str_in_output",
    "prompt_logprobs": "use /v1/completions",
    "reasoning": "use /v1/chat/completions",
    "reasoning_effort": "use /v1/chat/completions",
    "regex": "use structured_outputs.regex",
    "repeat_penalty": "use repetition_penalty",
    "structural_tag": "use tools or structured_outputs.grammar",
    "thinking": "use /v1/chat/completions",
}
"""What to do about a field that is not supported, where there is more to it than leaving it out."""
_NOT_SUPPORTED: Callable[[NotSupported], tuple[object, ...]] = attrgetter(
    *NotSupported.__struct_fields__
)
_decoders: dict[type, msgspec.json.Decoder[object]] = {}
NOT_UTF8 = "the body is not valid UTF-8"
_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*?)(?:\[\.\.\.\])?`$")
_PART = re.compile(r"messages\[\d+\]\.content\[\d+\]\.type")

R = TypeVar("R", bound=msgspec.Struct)


def decode_body(body: bytes, as_type: type[R]) -> R:
    """Decode a request strictly.

    Raises:
        BadRequest: it is not JSON, a value has the wrong type or is out of range, or a field is set
            that is not supported.
    """
    decoder = _decoders.get(as_type)
    if decoder is None:
        decoder = _decoders[as_type] = msgspec.json.Decoder(as_type)
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise BadRequest(NOT_UTF8) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    assert isinstance(request, as_type)
    if isinstance(request, CommonRequest):
        _refuse_unsupported(request)
    return request


def _refuse_unsupported(request: NotSupported) -> None:
    # All are null in nearly all requests.
    if _NOT_SUPPORTED(request).count(None) == len(NotSupported.__struct_fields__) and (
        isinstance(request, ChatRequest)
    ):
        return
    names: tuple[str, ...] = NotSupported.__struct_fields__
    if isinstance(request, CompletionRequest):
        names = (*(name for name in names if name not in PLAIN_ON), *PLAIN_OFF)
    for name in names:
        value = getattr(request, name)
        if value is not None and not _is_off(type(request), name, value):
            raise BadRequest(
                f"{name} is not supported: {_INSTEAD.get(name, 'leave it out')}", param=name
            )


def _is_off(kind: type, name: str, value: object) -> bool:
    """Whether a field's value switches it off."""
    off = _OFF_BY_KIND.get(kind, {}).get(name) or _OFF.get(name, ())
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in off)


def _invalid(message: str) -> BadRequest:
    where = _WHERE.search(message)
    said = message[: where.start()] if where is not None else message
    path = where.group(1) if where is not None else ""
    part = _PART.fullmatch(path)
    kind = re.fullmatch(r"Invalid value '(.*)'", said)
    if part is not None and kind is not None:
        return BadRequest(
            f"{path}: this model takes text only, and no part of type {kind.group(1)[:64]!r}",
            param=path,
        )
    missing = re.search(r"missing required field `(\w+)`", said)
    if missing is not None:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    unknown = re.search(r"contains unknown field `(\w+)`", said)
    if unknown is not None:
        path = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        said = "there is no such field here"
    return BadRequest(f"{path or 'the body'}: {said}", param=path or None)
