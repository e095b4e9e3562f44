"""Routes of the Messages API."""

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pilotlight.gateway.edge.client_headers import note_header
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.openai.tools import tool_use_of
from pilotlight.gateway.schema.messages import CountRequest, InputTokens, MessagesRequest
from pilotlight.gateway.schema.sizes import check_sizes
from pilotlight.gateway.surfaces.messages.errors import error_body
from pilotlight.gateway.surfaces.messages.narrator import MessageNarrator
from pilotlight.gateway.surfaces.messages.request import chat_of
from pilotlight.gateway.surfaces.narrated import in_shape, narrated

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"


class MessageRoutes:
    """The handlers."""

    def __init__(self, api: OpenAiApi) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(MESSAGES_PATH, in_shape(self.create, error_body), methods=["POST"]),
            Route(COUNT_PATH, in_shape(self.count, error_body), methods=["POST"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        note_header(request.scope, "request-id", request.state.request_id)
        asker = await self._api.asker(request, key_headers(request.headers))
        body = await self._api.read(request, MessagesRequest, asker.key)
        chat = chat_of(body)
        check_sizes(chat)
        conversed = await self._api.converse(request.scope, asker, chat)
        narrator = MessageNarrator(conversed, asker.request_id)
        return narrated(conversed, narrator, stream=bool(body.stream))

    async def count(self, request: Request) -> Response:
        """Tokens of the prompt that a conversation makes."""
        note_header(request.scope, "request-id", request.state.request_id)
        asker = await self._api.asker(request, key_headers(request.headers))
        body = await self._api.read(request, CountRequest, asker.key)
        chat = chat_of(body)
        check_sizes(chat)
        entry = await self._api.entry(body.model, asker.key)
        tools = tool_use_of(chat, entry.text)
        token_ids = await self._api.prompt_of(entry, chat, tools, asker.key)
        count = InputTokens(input_tokens=len(token_ids))
        return Response(msgspec.json.encode(count), media_type="application/json")


def key_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The request's headers, with the key where the other APIs have it."""
    key = headers.get("x-api-key")
    return headers if key is None else {"authorization": f"Bearer {key}"}
