"""From a request's body to what the engine is asked for. Everything that cannot be honoured is refused, by the field's name."""

import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pilotlight.common.errors import BadRequest, ContextTooLong
from pilotlight.gateway.openai.structured import grammar_of
from pilotlight.gateway.openai.tools import NO_TOOLS, ToolUse
from pilotlight.gateway.openai.types import ChatRequest, CommonRequest, CompletionRequest, NotSupported
from pilotlight.policy.types import Model, Sampling

DEFAULT_COMPLETION_TOKENS = 16
"""What ``/v1/completions`` writes at most when it is not told otherwise: OpenAI's number."""

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
_INSTEAD = {
    "add_special_tokens": "send token ids as the prompt of /v1/completions",
    "allowed_token_ids": "use logit_bias or a grammar",
    "bad_words": "use logit_bias",
    "chat_template": "the model's own is used; send a prompt of your own to /v1/completions",
    "ebnf": "use structured_outputs.grammar",
    "enable_thinking": "use chat_template_kwargs where the model's template knows it",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "grammar": "use structured_outputs.grammar",
    "json_schema": "use response_format",
    "no_stop_trim": "use include_stop_str_in_output",
    "reasoning": "use chat_template_kwargs where the model's template knows it",
    "reasoning_effort": "use chat_template_kwargs where the model's template knows it",
    "regex": "use structured_outputs.regex",
    "repeat_penalty": "use repetition_penalty",
    "structural_tag": "use tools or structured_outputs.grammar",
    "thinking": "use chat_template_kwargs where the model's template knows it",
}
"""What to do about a field that is not supported, where there is more to it than leaving it out."""
_SEED_MASK = 2**63 - 1

_decoders: dict[type, msgspec.json.Decoder[object]] = {}
_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*?)(?:\[\.\.\.\])?`$")
_PART = re.compile(r"messages\[\d+\]\.content\[\d+\]\.type")

R = TypeVar("R", bound=CommonRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a request asks for beside its tokens: how the answer is to look."""

    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    logprobs: bool
    top_logprobs: int = 0
    include_stop: bool = False
    """The text ends with the stop string that ended it."""


def decode_body(body: bytes, as_type: type[R]) -> R:
    """Decode a request strictly.

    Raises:
        BadRequest: it is not JSON, a value has the wrong type or is out of range, or a field is set that is not supported.
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
        raise BadRequest("the body is not valid UTF-8") from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    assert isinstance(request, as_type)
    _refuse_unsupported(request)
    return request


def options_of(request: ChatRequest | CompletionRequest) -> Options:
    """How the answer is to look.

    Raises:
        BadRequest: options contradict each other.
    """
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if isinstance(request, ChatRequest):
        logprobs, top_logprobs = bool(request.logprobs), request.top_logprobs or 0
        if top_logprobs and not logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    else:
        logprobs, top_logprobs = request.logprobs is not None, request.logprobs or 0
    include_usage = request.stream_options is not None and request.stream_options.include_usage
    return Options(
        stream=bool(request.stream),
        include_usage=include_usage,
        stops=stops,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        include_stop=bool(request.include_stop_str_in_output),
    )


def count_choices(request: ChatRequest | CompletionRequest, prompts: int, limit: int) -> int:
    """How many answers a request asks for, to all of its prompts.

    Raises:
        BadRequest: more than one request may.
    """
    n = request.n or 1
    if n * prompts > limit:
        asked = f"{n} answers" if prompts == 1 else f"{n} answers to each of {prompts} prompts"
        raise BadRequest(
            f"{asked} are more than the {limit} that one request may ask for; send several requests",
            param="n" if n > limit or prompts == 1 else "prompt",
        )
    return n * prompts


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of a prompt's answer number ``choice``, from the request's seed, which number 0 keeps."""
    if choice == 0:
        return seed
    # Not the next number: two requests with neighbouring seeds would share all but two of their answers.
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _SEED_MASK


def limit_of(request: ChatRequest | CompletionRequest) -> int | None:
    """How many tokens of output the client asks for at most; None when it leaves that open."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def sampling_of(
    request: ChatRequest | CompletionRequest,
    model: Model,
    prompt_tokens: int,
    eos_token_ids: Sequence[int],
    rng: random.Random,
    tools: ToolUse = NO_TOOLS,
) -> Sampling:
    """How the request's tokens are drawn. Without a seed it gets one, so that it can be resumed elsewhere with the same tokens.

    Raises:
        ContextTooLong: prompt and wanted output are longer than the model's context.
        BadRequest: a token id is not the model's, or what is asked for contradicts itself.
    """
    options = options_of(request)
    max_tokens = _room(request, model, prompt_tokens)
    if (request.min_tokens or 0) > max_tokens:
        raise BadRequest(
            f"min_tokens {request.min_tokens} is more than the {max_tokens} tokens that may come", param="min_tokens"
        )
    bias = request.logit_bias or {}
    _check_ids(model, "logit_bias", bias)
    _check_ids(model, "stop_token_ids", request.stop_token_ids or ())
    return Sampling(
        seed=(request.seed & _SEED_MASK) if request.seed is not None else rng.getrandbits(63),
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(dict.fromkeys((*(() if request.ignore_eos else eos_token_ids), *(request.stop_token_ids or ())))),
        logprobs=options.logprobs,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=tuple(sorted(bias.items())),
        min_tokens=request.min_tokens or 0,
        top_logprobs=options.top_logprobs,
        grammar=tools.grammar or grammar_of(request),
    )


def _check_ids(model: Model, param: str, token_ids: Iterable[int]) -> None:
    vocab_size = model.spec.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise BadRequest(f"{param}: token ids of {model.name} are 0 to {vocab_size - 1}", param=param)


def _room(request: ChatRequest | CompletionRequest, model: Model, prompt_tokens: int) -> int:
    """How many tokens may come. The wording is OpenAI's: there are clients that look for it."""
    limit, asked = model.spec.max_context_tokens, limit_of(request)
    left = limit - prompt_tokens
    chat = isinstance(request, ChatRequest)
    if left < 1:
        raise ContextTooLong.by_prompt(limit, prompt_tokens, chat=chat)
    if asked is not None and asked > left:
        named = chat and request.max_completion_tokens is not None
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + asked} tokens "
            f"({prompt_tokens} in the {'messages' if chat else 'prompt'}, {asked} in the completion)",
            param="max_completion_tokens" if named else "max_tokens",
        )
    if asked is not None:
        return asked
    return left if chat else min(left, DEFAULT_COMPLETION_TOKENS)


def _refuse_unsupported(request: NotSupported) -> None:
    names = NotSupported.__struct_fields__
    off = _OFF | _OFF_BY_KIND.get(type(request), {})
    for name in (*names, "tools", "tool_choice") if isinstance(request, CompletionRequest) else names:
        value = getattr(request, name)
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in off.get(name, ())
        ):
            raise BadRequest(f"{name} is not supported: {_INSTEAD.get(name, 'leave it out')}", param=name)


def _invalid(message: str) -> BadRequest:
    where = _WHERE.search(message)
    said = message[: where.start()] if where is not None else message
    path = where.group(1) if where is not None else ""
    part = _PART.fullmatch(path)
    kind = re.fullmatch(r"Invalid value '(.*)'", said)
    if part is not None and kind is not None:
        return BadRequest(f"{path}: this model takes text only, and no part of type {kind.group(1)[:64]!r}", param=path)
    missing = re.search(r"missing required field `(\w+)`", said)
    if missing is not None:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    unknown = re.search(r"contains unknown field `(\w+)`", said)
    if unknown is not None:
        path = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        said = "there is no such field here"
    return BadRequest(f"{path or 'the body'}: {said}", param=path or None)
