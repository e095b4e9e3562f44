"""``/tokenize`` and ``/detokenize``: what a model's tokenizer makes of a text, and back."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.auth import KeyInfo
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.openai.conversation import conversation_of
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.openai.tools import tool_use_of
from pilotlight.gateway.schema.requests import ChatRequest
from pilotlight.gateway.schema.sizes import check_sizes
from pilotlight.gateway.schema.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)

INLINE_IDS = 4096
"""Ids that are decoded at once: about a millisecond."""
TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"


class TokenRoutes:
    """The handlers."""

    def __init__(self, api: OpenAiApi, encoder: PromptEncoder) -> None:
        self._api = api
        self._encoder = encoder

    def routes(self) -> list[Route]:
        """Both."""
        return [
            Route(TOKENIZE_PATH, self.tokenize, methods=["POST"]),
            Route(DETOKENIZE_PATH, self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a conversation as the model's template writes it."""
        asker = await self._api.asker(request)
        body = await self._api.read(request, TokenizeRequest, asker.key)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("one of prompt and messages is needed, and not both", param="prompt")
        entry = await self._api.entry(body.model, asker.key)
        token_ids = (
            await self._of_text(entry, body, body.prompt, asker.key)
            if body.prompt is not None
            else await self._of_chat(entry, body, asker.key)
        )
        texts = None
        if body.return_token_strs:
            decoder = entry.text.tokenizer
            texts = [decoder.token_bytes(each).decode(errors="replace") for each in token_ids]
        return _json(
            Tokenized(
                count=len(token_ids),
                max_model_len=entry.model.spec.max_context_tokens,
                tokens=token_ids,
                token_strs=texts,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        asker = await self._api.asker(request)
        body = await self._api.read(request, DetokenizeRequest, asker.key)
        entry = await self._api.entry(body.model, asker.key)
        vocab_size = entry.model.spec.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise BadRequest(
                f"token ids of {entry.model.name} are 0 to {vocab_size - 1}", param="tokens"
            )

        def decoded() -> str:
            return entry.text.tokenizer.decode(body.tokens, skip_special_tokens=False)

        few = len(body.tokens) <= INLINE_IDS
        return _json(Detokenized(prompt=decoded() if few else await asyncio.to_thread(decoded)))

    async def _of_text(
        self, entry: CatalogEntry, body: TokenizeRequest, text: str, key: KeyInfo
    ) -> list[int]:
        if not text:
            return []
        special = body.add_special_tokens is not False
        return await self._encoder.completion(entry, text, key.key_id, add_special_tokens=special)

    async def _of_chat(self, entry: CatalogEntry, body: TokenizeRequest, key: KeyInfo) -> list[int]:
        chat = ChatRequest(
            model=entry.model.name,
            messages=body.messages or [],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        check_sizes(chat)
        conversation = conversation_of(chat, entry.text, tool_use_of(chat, entry.text))
        special = bool(body.add_special_tokens)
        return await self._encoder.chat(entry, conversation, key.key_id, add_special_tokens=special)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
