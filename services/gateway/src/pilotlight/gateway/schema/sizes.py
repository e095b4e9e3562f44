"""How much a request's body may hold, by number: what is small in bytes can be much to look at."""

from collections.abc import Iterable

import msgspec

from pilotlight.common.errors import MessageTooLarge, TooLarge
from pilotlight.gateway.schema.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GivenCall,
)

MAX_MESSAGES = 8192
MAX_PARTS = 8192
"""Parts of contents and calls of tools, those of all messages."""
MAX_ARGUMENTS_BYTES = 1024 * 1024
"""Of all calls of tools in a conversation."""
MAX_PROMPTS = 4096
MAX_PROMPT_IDS = 1024 * 1024
"""Token ids in all prompts of a plain completion."""
MAX_OTHER_BYTES = 1024 * 1024
"""All of a body but its messages or its prompt: tools, schemas and the like."""

_encoder = msgspec.msgpack.Encoder()


def check_sizes(request: msgspec.Struct) -> None:
    """Count what a request holds. Other shapes than those of completions are counted when they have
    become one.

    Raises:
        TooLarge: more than is taken.
    """
    if isinstance(request, ChatRequest):
        _check_messages(request.messages)
    elif isinstance(request, CompletionRequest):
        _check_prompts(request.prompt)


def check_rest(rest: msgspec.Struct) -> None:
    """Weigh a request from which messages or prompt were taken out; for large bodies.

    Raises:
        TooLarge: it is more than is taken.
    """
    size = len(_encoder.encode(rest))
    if size > MAX_OTHER_BYTES:
        raise TooLarge(
            f"the body without its messages or prompt has {size} bytes; at most {MAX_OTHER_BYTES} are taken"
        )


def _check_messages(messages: list[ChatMessage]) -> None:
    _at_most(MAX_MESSAGES, len(messages), "messages")
    calls: list[GivenCall] = []
    parts = 0
    for message in messages:
        if message.tool_calls:
            calls += message.tool_calls
        if isinstance(message.content, list):
            parts += len(message.content)
    if not parts and not calls:
        return
    _at_most(MAX_PARTS, parts + len(calls), "messages", "parts of contents and calls of tools")
    arguments = (call.function.arguments for call in calls)
    _at_most(MAX_ARGUMENTS_BYTES, _bytes_of(arguments), "messages", "bytes of arguments of calls")


def _check_prompts(prompt: str | list[str | int | list[int]]) -> None:
    if isinstance(prompt, str):
        return
    ids = sum(len(item) if isinstance(item, list) else isinstance(item, int) for item in prompt)
    if ids > MAX_PROMPT_IDS:
        raise MessageTooLarge(
            f"{ids} token ids; at most {MAX_PROMPT_IDS} are taken", param="prompt"
        )
    _at_most(MAX_PROMPTS, sum(not isinstance(item, int) for item in prompt), "prompt", "prompts")


def _at_most(limit: int, found: int, param: str, what: str = "") -> None:
    if found > limit:
        raise TooLarge(f"{found} {what or param}; at most {limit} are taken", param=param)


def _bytes_of(texts: Iterable[str]) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)
