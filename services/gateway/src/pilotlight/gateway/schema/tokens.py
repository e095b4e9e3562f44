"""Bodies of ``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pilotlight.gateway.schema.requests import (
    MAX_TOOLS,
    ChatMessage,
    FunctionTool,
    ModelName,
    TokenId,
)

MAX_IDS = 1024 * 1024


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a text, or a conversation."""

    model: ModelName = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: (
        Annotated[
            bool,
            Meta(
                description="Those that the tokenizer adds: by default to a text, not to a conversation."
            ),
        ]
        | None
    ) = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """Response of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: ModelName = ""
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]


class Detokenized(msgspec.Struct, kw_only=True):
    """Response of ``POST /detokenize``."""

    prompt: str
