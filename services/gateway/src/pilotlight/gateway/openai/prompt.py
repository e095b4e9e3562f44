"""Prompts: from messages or text to token ids. Long ones are made in a thread, so that streams go on meanwhile."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from pilotlight.common.errors import BadRequest, ContextTooLong
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.waiting import within
from pilotlight.gateway.catalog import CatalogEntry
from pilotlight.gateway.openai.conversation import Conversation

INLINE_CHARS = 4096
"""A prompt of up to so many characters is encoded at once: less than handing it to a thread and back costs."""
MAX_THREADS = 4
DEADLINE_S = 30.0
CHECK_SIZE_TOKENS = 500_000
"""A prompt of fewer tokens fits the bus in any case."""

T = TypeVar("T")


class PromptEncoder:
    """Encodes prompts, a bounded number at a time."""

    def __init__(self) -> None:
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def chat(self, entry: CatalogEntry, conversation: Conversation) -> list[int]:
        """Token ids of a conversation.

        Raises:
            BadRequest: the model's template does not take these messages.
            ContextTooLong: the prompt is far beyond the model's context.
            TooLarge: the prompt is beyond what the template may write.
        """
        text = entry.text

        def encode() -> list[int]:
            prompt = text.template.render(conversation.messages, tools=conversation.tools)
            _check_length(entry, prompt)
            return text.tokenizer.encode_chat(prompt)

        return _checked(await self._run(encode, conversation.chars))

    async def completion(self, entry: CatalogEntry, prompt: str | list[int]) -> list[int]:
        """Token ids of a plain prompt, which may be token ids already.

        Raises:
            BadRequest: it is empty, or has an id that the model does not have.
            ContextTooLong: the prompt is far beyond the model's context.
            MessageTooLarge: the prompt is beyond what the bus takes.
        """
        if isinstance(prompt, list):
            vocab_size = entry.model.spec.vocab_size
            if not all(0 <= token_id < vocab_size for token_id in prompt):
                raise BadRequest(f"token ids of {entry.model.name} are 0 to {vocab_size - 1}", param="prompt")
            return _checked(prompt)

        def encode() -> list[int]:
            _check_length(entry, prompt)
            return entry.text.tokenizer.encode(prompt, add_special_tokens=True)

        return _checked(await self._run(encode, len(prompt)))

    async def _run(self, work: Callable[[], T], chars: int) -> T:
        if chars <= INLINE_CHARS:
            return work()
        async with self._threads:
            return await within(DEADLINE_S, asyncio.to_thread(work), "encoding the prompt")


def _check_length(entry: CatalogEntry, prompt: str) -> None:
    """Refuse at once what encoding would only refuse after seconds of work."""
    limit = entry.model.spec.max_context_tokens
    if len(prompt) > limit and (least := entry.text.tokenizer.least_tokens(prompt)) > limit:
        raise ContextTooLong(f"the prompt has more than {least} tokens; the context of {entry.model.name} is {limit} tokens")


def prompts_of(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a plain completion, each a text or token ids.

    Raises:
        BadRequest: there is none, or token ids stand beside whole prompts.
    """
    if isinstance(prompt, str):
        return (prompt,)
    whole = [item for item in prompt if not isinstance(item, int)]
    if whole and len(whole) < len(prompt):
        raise BadRequest("a prompt is a text or a list of token ids; this list has token ids beside such", param="prompt")
    if not prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    return whole or (cast("list[int]", prompt),)


def _checked(token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise BadRequest("the prompt is empty", param="prompt")
    if len(token_ids) > CHECK_SIZE_TOKENS:
        # Told now, and not after a cold start.
        encode_json(token_ids)
    return token_ids
