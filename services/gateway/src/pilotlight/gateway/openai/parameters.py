"""From a request's body to what the engine is asked for.

Everything that cannot be honoured is refused, by the field's name.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence

import msgspec

from pilotlight.common.errors import BadRequest, ContextTooLong
from pilotlight.gateway.openai.echo import wanted_of
from pilotlight.gateway.openai.structured import grammar_of
from pilotlight.gateway.openai.tools import NO_TOOLS, ToolUse
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest
from pilotlight.policy.model import Model
from pilotlight.policy.request import Sampling

DEFAULT_COMPLETION_TOKENS = 16
"""What ``/v1/completions`` writes at most when it is not told otherwise: OpenAI's number."""

_SEED_MASK = 2**63 - 1


class Options(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request asks for beside its tokens: how the answer is to look."""

    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    logprobs: bool
    top_logprobs: int = 0
    include_stop: bool = False
    """The text ends with the stop string that ended it."""


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
    """The seed of a prompt's answer number ``choice``, from the request's seed, which number 0
    keeps.
    """
    if choice == 0:
        return seed
    # Not the next number: two requests with neighbouring seeds would share all but two of their
    # answers.
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
    options: Options,
    tools: ToolUse = NO_TOOLS,
) -> Sampling:
    """How the request's tokens are sampled.

    Without a seed it gets one, so that it can be resumed elsewhere with the same tokens.

    Args:
        request: what the client sent.
        model: gives the vocabulary and the context's length.
        prompt_tokens: the prompt's length.
        eos_token_ids: the tokens that end an answer, unless the client ignores them.
        rng: gives a seed where the client gave none.
        options: how the answer is to look.
        tools: what the grammar of tool calls asks of sampling.

    Raises:
        ContextTooLong: prompt and wanted output are longer than the model's context.
        BadRequest: a token id is not the model's, or what is asked for contradicts itself.
    """
    max_tokens = _room(request, model, prompt_tokens)
    if (request.min_tokens or 0) > max_tokens:
        raise BadRequest(
            f"min_tokens {request.min_tokens} is more than the {max_tokens} tokens that may come",
            param="min_tokens",
        )
    bias = request.logit_bias or {}
    if bias:
        _check_ids(model, "logit_bias", bias)
    if request.stop_token_ids:
        _check_ids(model, "stop_token_ids", request.stop_token_ids)
    ignore_eos = bool(request.ignore_eos) or _scores_a_text(request, options, max_tokens)
    return Sampling(
        seed=(request.seed & _SEED_MASK) if request.seed is not None else rng.getrandbits(63),
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        ignore_eos=ignore_eos,
        stop_token_ids=tuple(
            dict.fromkeys((*(() if ignore_eos else eos_token_ids), *(request.stop_token_ids or ())))
        ),
        logprobs=options.logprobs,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0
        if request.repetition_penalty is None
        else request.repetition_penalty,
        logit_bias=tuple(sorted(bias.items())),
        min_tokens=request.min_tokens or 0,
        top_logprobs=options.top_logprobs,
        grammar=tools.grammar or grammar_of(request),
        prompt_logprobs=wanted_of(request),
    )


def _scores_a_text(
    request: ChatRequest | CompletionRequest, options: Options, max_tokens: int
) -> bool:
    """It asks how probable its prompt is, and for the least of output that there is: lm-eval does,
    and takes the last entry for that output. A token at which the model would stop is one, too.
    """
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    return echoes and options.logprobs and max_tokens == 1


def _check_ids(model: Model, param: str, token_ids: Iterable[int]) -> None:
    vocab_size = model.spec.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise BadRequest(
            f"{param}: token ids of {model.name} are 0 to {vocab_size - 1}", param=param
        )


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
        # An engine that only tells of the prompt makes one token, which is thrown away.
        return max(1, asked)
    return left if chat else min(left, DEFAULT_COMPLETION_TOKENS)
