"""Prompts: from messages or text to token ids. Long ones are made in a thread, so that streams go on meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pilotlight.common.errors import BadRequest, ContextTooLong
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.waiting import within
from pilotlight.gateway.catalog import CatalogEntry
from pilotlight.gateway.openai.types import ChatMessage, TextPart

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

    async def chat(self, entry: CatalogEntry, messages: list[ChatMessage]) -> list[int]:
        """Token ids of a conversation.

        Raises:
            BadRequest: the model's template does not take these messages.
            ContextTooLong: the prompt is far beyond the model's context.
            TooLarge: the prompt is beyond what the template may write.
        """
        plain = [_plain(message, index) for index, message in enumerate(messages)]
        chars = sum(len(message["content"]) for message in plain)
        text = entry.text

        def encode() -> list[int]:
            prompt = text.template.render(plain)
            _check_length(entry, prompt)
            return text.tokenizer.encode_chat(prompt)

        return _checked(await self._run(encode, chars))

    async def completion(self, entry: CatalogEntry, prompt: str | list[str | int | list[int]]) -> list[int]:
        """Token ids of a plain prompt, which may be token ids already.

        Raises:
            BadRequest: there is more than one prompt, or an id that the model does not have.
            ContextTooLong: the prompt is far beyond the model's context.
            MessageTooLarge: the prompt is beyond what the bus takes.
        """
        one = _one_prompt(prompt)
        if isinstance(one, list):
            vocab_size = entry.model.spec.vocab_size
            if not all(0 <= token_id < vocab_size for token_id in one):
                raise BadRequest(f"token ids of {entry.model.name} are 0 to {vocab_size - 1}", param="prompt")
            return _checked(one)

        def encode() -> list[int]:
            _check_length(entry, one)
            return entry.text.tokenizer.encode(one, add_special_tokens=True)

        return _checked(await self._run(encode, len(one)))

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


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    if message.tool_calls or message.function_call:
        raise BadRequest("tool calls are not supported", param=f"messages[{index}].tool_calls")
    content: str | list[TextPart] | None = message.content
    if content is None:
        if message.role != "assistant":
            raise BadRequest("a message needs content", param=f"messages[{index}].content")
        content = ""
    elif isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if prompt and all(isinstance(item, int) for item in prompt):
        return cast("list[int]", prompt)
    if len(prompt) > 1:
        raise BadRequest("several prompts in one request are not supported: send one request each", param="prompt")
    if not prompt or isinstance(prompt[0], int):
        raise BadRequest("the prompt is empty", param="prompt")
    return prompt[0]


def _checked(token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise BadRequest("the prompt is empty", param="prompt")
    if len(token_ids) > CHECK_SIZE_TOKENS:
        # Told now, and not after a cold start.
        encode_json(token_ids)
    return token_ids
