"""Prompts: from bodies to token ids.

Text helpers do what a client or a checkpoint sizes, so that streams go on meanwhile.
"""

from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from pilotlight.common.errors import BadRequest, ContextTooLong
from pilotlight.common.messages.codec import encode_json
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.schema.decoding import decode_body
from pilotlight.gateway.schema.sizes import check_sizes
from pilotlight.gateway.texts.frames import Chat, Completion, Conversation
from pilotlight.gateway.texts.texts import Texts

INLINE_BYTES = 64 * 1024
"""A body of up to this many bytes is decoded at once: a millisecond or two, whatever it holds."""
CHECK_SIZE_TOKENS = 500_000
"""A prompt of fewer tokens fits the bus in any case."""

R = TypeVar("R", bound=msgspec.Struct)


class PromptEncoder:
    """Reads bodies and encodes prompts. ``owner`` is whose request it is: owners take turns."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def read(self, body: bytes, as_type: type[R], owner: str = "") -> R:
        """Decode a body strictly, and count what it holds.

        Raises:
            BadRequest: it is not what the API takes, or more of it.
            QueueFull, TextUnavailable: not now.
        """
        if len(body) > INLINE_BYTES:
            return await self._texts.read(body, as_type, owner)
        request = decode_body(body, as_type)
        check_sizes(request)
        return request

    def wait_s(self, owner: str) -> float:
        """How long one more prompt of an owner's would wait to be prepared, in seconds, as far as
        it is known.
        """
        return self._texts.wait_s(owner)

    async def chat(
        self,
        entry: CatalogEntry,
        conversation: Conversation,
        owner: str = "",
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            entry: the model.
            conversation: as its template expects it.
            owner: whose request it is.
            add_special_tokens: also those that templates write themselves.

        Raises:
            BadRequest: the model's template does not take these messages.
            ContextTooLong: the prompt is longer than the model's context.
            TooLarge: the prompt is beyond what the template may write.
            TextFailed: the model's template or tokenizer fails on it.
            QueueFull, TextUnavailable: not now.
        """
        model = entry.model
        context_tokens = model.spec.max_context_tokens
        job = Chat(
            digest=model.text_digest,
            model=model.name,
            context_tokens=context_tokens,
            conversation=conversation,
            add_special_tokens=add_special_tokens,
        )
        return _not_empty(await self._texts.encode(job, owner))

    async def completion(
        self,
        entry: CatalogEntry,
        prompt: str | list[int],
        owner: str = "",
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a plain prompt, which may be token ids already.

        Args:
            entry: the model.
            prompt: a text, or token ids.
            owner: whose request it is.
            add_special_tokens: those that the tokenizer puts around a text.

        Raises:
            BadRequest: it is empty, or has an id that the model does not have.
            ContextTooLong: the prompt is longer than the model's context.
            MessageTooLarge: the prompt is beyond what the bus takes.
            TextFailed: the model's tokenizer fails on it.
            QueueFull, TextUnavailable: not now.
        """
        model = entry.model
        context_tokens = model.spec.max_context_tokens
        if isinstance(prompt, str):
            job = Completion(
                digest=model.text_digest,
                model=model.name,
                context_tokens=context_tokens,
                prompt=prompt,
                add_special_tokens=add_special_tokens,
            )
            return _not_empty(await self._texts.encode(job, owner))
        vocab_size = model.spec.vocab_size
        if len(prompt) > context_tokens:
            raise ContextTooLong.by_prompt(context_tokens, len(prompt), chat=False)
        if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise BadRequest(f"token ids of {model.name} are 0 to {vocab_size - 1}", param="prompt")
        if len(prompt) > CHECK_SIZE_TOKENS:
            # Told now, and not after a cold start.
            encode_json(prompt)
        return _not_empty(prompt)


def prompts_of(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a plain completion, each a text or token ids.

    Raises:
        BadRequest: there is none, or token ids stand beside whole prompts.
    """
    if isinstance(prompt, str):
        return (prompt,)
    whole = [item for item in prompt if not isinstance(item, int)]
    if whole and len(whole) < len(prompt):
        raise BadRequest(
            "a prompt is a text or a list of token ids; this list has token ids beside such",
            param="prompt",
        )
    if not prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    return whole or (cast("list[int]", prompt),)


def _not_empty(token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise BadRequest("the prompt is empty", param="prompt")
    return token_ids
