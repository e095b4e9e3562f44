"""What a plain completion tells of its prompt: ``echo`` and ``prompt_logprobs``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.gateway.openai.shown import ShownToken, shown_token
from pilotlight.gateway.schema.replies import PlacedToken
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest
from pilotlight.gateway.serving.token_log import PromptRead
from pilotlight.policy.request import MAX_PROMPT_VALUES
from pilotlight.text.decoding import TokenDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTelling:
    """What is told of one prompt."""

    prompt_ids: Sequence[int]
    text: str = ""
    """What the answer's text begins with."""
    tops: int | None = None
    """How many of the likeliest tokens are told with each that is echoed; None: no tokens are."""
    placed: int | None = None
    """The same for ``prompt_logprobs``."""
    silent: bool = False
    """Nothing is written beside."""


NOTHING_TOLD = PromptTelling(prompt_ids=())


class ToldPrompt(msgspec.Struct, frozen=True, gc=False):
    """What a choice says of its prompt."""

    text: str
    tokens: list[ShownToken]
    placed: list[dict[str, PlacedToken] | None] | None


def wanted_of(request: ChatRequest | CompletionRequest) -> int | None:
    """How much the engine has to tell of the prompt: ``Sampling.prompt_logprobs``.

    Raises:
        BadRequest: fields contradict each other.
    """
    if isinstance(request, ChatRequest):
        return None
    echoed = request.logprobs if request.echo else None
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest(
            "prompt_logprobs come with whole answers: leave stream out, or use echo with logprobs",
            param="prompt_logprobs",
        )
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise BadRequest(
            "max_tokens: 0 needs echo or prompt_logprobs: there would be no answer",
            param="max_tokens",
        )
    asked = [each for each in (echoed, request.prompt_logprobs) if each is not None]
    return max(asked, default=None)


def telling_of(
    request: CompletionRequest,
    prompt: str | Sequence[int],
    prompt_ids: Sequence[int],
    tokenizer: TokenDecoder,
) -> PromptTelling:
    """What is told of a prompt.

    Args:
        request: that it came with.
        prompt: as the client sent it.
        prompt_ids: as the model reads it.
        tokenizer: the model's.

    Raises:
        BadRequest: more is asked for than an engine tells.
    """
    wanted = wanted_of(request)
    if wanted is not None and len(prompt_ids) * (wanted + 1) > MAX_PROMPT_VALUES:
        most = MAX_PROMPT_VALUES // (wanted + 1)
        raise BadRequest(
            f"log probabilities of a prompt of {len(prompt_ids)} tokens: with {wanted} alternatives, at most {most} tokens are told; "
            "send a shorter prompt or ask for fewer alternatives",
            param="prompt",
        )
    text = ""
    if request.echo:
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.decode(prompt_ids, skip_special_tokens=False)
        )
    return PromptTelling(
        prompt_ids=prompt_ids,
        text=text,
        tops=request.logprobs if request.echo else None,
        placed=request.prompt_logprobs,
        silent=request.max_tokens == 0,
    )


def told_prompt(
    telling: PromptTelling, read: PromptRead | None, tokenizer: TokenDecoder
) -> ToldPrompt:
    """What a choice says of its prompt.

    Args:
        telling: what is wanted.
        read: what the engine says.
        tokenizer: the model's.

    Raises:
        BadRequest: the engine says nothing of what is wanted.
    """
    if telling.tops is None and telling.placed is None:
        return ToldPrompt(telling.text, [], None)
    logprobs = read.logprobs if read is not None else None
    if logprobs is None or len(logprobs.logprobs) != len(telling.prompt_ids) - 1:
        raise BadRequest(
            "the engine that serves this model tells no log probabilities of prompts: leave echo with logprobs and prompt_logprobs out",
            param="prompt_logprobs" if telling.tops is None else "echo",
        )
    tokens = [] if telling.tops is None else _echoed(telling, logprobs, telling.tops, tokenizer)
    placed = None if telling.placed is None else _placed(telling, logprobs, tokenizer)
    return ToldPrompt(telling.text, tokens, placed)


def _echoed(
    telling: PromptTelling, told: PromptLogprobs, tops: int, tokenizer: TokenDecoder
) -> list[ShownToken]:
    offset = 0
    shown: list[ShownToken] = []
    for place, token_id in enumerate(telling.prompt_ids):
        logprob = told.logprobs[place - 1] if place else None
        top = told.top[place - 1][:tops] if place else ()
        token = shown_token(tokenizer, token_id, logprob, offset, top)
        shown.append(token if place else replace(token, follows=False))
        offset += len(token.text)
    return shown


def _placed(
    telling: PromptTelling, told: PromptLogprobs, tokenizer: TokenDecoder
) -> list[dict[str, PlacedToken] | None]:
    places: list[dict[str, PlacedToken] | None] = [None]
    for place, token_id in enumerate(telling.prompt_ids[1:]):
        known = [(token_id, told.logprobs[place], told.ranks[place])]
        best = enumerate(told.top[place][: telling.placed], start=1)
        known += [(other, logprob, rank) for rank, (other, logprob) in best]
        places.append(
            {
                str(each): PlacedToken(
                    logprob=logprob, rank=rank, decoded_token=_text_of(tokenizer, each)
                )
                for each, logprob, rank in known
            }
        )
    return places


def _text_of(tokenizer: TokenDecoder, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")
