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

_OFF: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
"""Values of fields in ``NotSupported`` that switch them off, beside null."""
_SEED_MASK = 2**63 - 1

_decoders: dict[type, msgspec.json.Decoder[object]] = {}
_WHERE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")

R = TypeVar("R", bound=CommonRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a request asks for beside its tokens: how the answer is to look."""

    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    logprobs: bool
    top_logprobs: int = 0


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
        stream=bool(request.stream), include_usage=include_usage, stops=stops, logprobs=logprobs, top_logprobs=top_logprobs
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
    max_tokens = _room(model, prompt_tokens, limit_of(request))
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


def _room(model: Model, prompt_tokens: int, asked: int | None) -> int:
    limit = model.spec.max_context_tokens
    left = limit - prompt_tokens
    if left < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer; the context of {model.name} is {limit} tokens"
        )
    if asked is not None and asked > left:
        raise ContextTooLong(
            f"the prompt's {prompt_tokens} tokens and {asked} tokens of output are more than the {limit} tokens of {model.name}'s context",
            param="max_tokens",
        )
    return left if asked is None else asked


def _refuse_unsupported(request: NotSupported) -> None:
    names = NotSupported.__struct_fields__
    for name in (*names, "tools", "tool_choice") if isinstance(request, CompletionRequest) else names:
        value = getattr(request, name)
        if value is not None and not any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in _OFF.get(name, ())
        ):
            raise BadRequest(f"{name} is not supported; leave it out", param=name)


def _invalid(message: str) -> BadRequest:
    where = _WHERE.search(message)
    if where is None:
        missing = re.search(r"missing required field `(\w+)`", message)
        return BadRequest(message, param=missing.group(1) if missing else None)
    path = where.group(1)
    missing = re.search(r"missing required field `(\w+)`", message)
    param = f"{path}.{missing.group(1)}" if missing else path
    return BadRequest(f"{param or 'the body'}: {message[: where.start()]}", param=param or None)
