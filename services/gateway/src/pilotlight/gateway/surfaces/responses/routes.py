"""Routes of the Responses API."""

from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pilotlight.common.errors import BadRequest, NotFound
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.schema.requests import ChatMessage, ChatRequest
from pilotlight.gateway.schema.responses import (
    DeletedResponse,
    InputItems,
    Response,
    ResponsesRequest,
)
from pilotlight.gateway.schema.sizes import check_sizes
from pilotlight.gateway.surfaces.narrated import narrated
from pilotlight.gateway.surfaces.responses.narrator import ResponseNarrator
from pilotlight.gateway.surfaces.responses.request import chat_of, items_of
from pilotlight.gateway.surfaces.responses.store import (
    ResponseStore,
    StoredResponse,
    WaitingRoom,
)

RESPONSES_PATH = "/v1/responses"
RESPONSE_PATH = "/v1/responses/{response_id}"


@dataclass(frozen=True, slots=True)
class _Given:
    """What is stored of a request, encoded."""

    items: msgspec.Raw
    messages: msgspec.Raw
    size_bytes: int

    @classmethod
    def of(cls, body: ResponsesRequest, chat: ChatRequest) -> "_Given":
        """Of a request, without its instructions, which are each request's own."""
        items = msgspec.json.encode(items_of(body))
        messages = msgspec.json.encode(chat.messages[1:] if body.instructions else chat.messages)
        size_bytes = len(items) + len(messages) + len(body.instructions or "")
        return cls(msgspec.Raw(items), msgspec.Raw(messages), size_bytes)


@dataclass(frozen=True, slots=True)
class ResponseRoutes:
    """The handlers."""

    api: OpenAiApi
    store: ResponseStore
    room: WaitingRoom = field(default_factory=WaitingRoom)

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(RESPONSES_PATH, self.create, methods=["POST"]),
            Route(RESPONSE_PATH, self.read, methods=["GET"]),
            Route(RESPONSE_PATH, self.remove, methods=["DELETE"]),
            Route(f"{RESPONSE_PATH}/input_items", self.items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answer, and keep the answer to go on from."""
        asker = await self.api.asker(request)
        key_id = asker.key.key_id
        body = await self.api.read(request, ResponsesRequest, asker.key)
        chat = chat_of(body, await self._before(key_id, body.previous_response_id))
        check_sizes(chat)
        given = _Given.of(body, chat)
        conversed = await self.api.converse(request.scope, asker, chat)
        stored = body.store is not False and self.room.take(given.size_bytes)

        async def keep(response: Response, answer: ChatMessage) -> bool:
            row = StoredResponse(
                response=response, items=given.items, messages=given.messages, answer=answer
            )
            return await self.store.put(key_id, row)

        # What was given is not kept twice while the request waits.
        asked = msgspec.structs.replace(body, input="", store=stored)
        narrator = ResponseNarrator(conversed, asked, asker.request_id, self.api.now_unix_s(), keep)
        answer = narrated(conversed, narrator, stream=bool(body.stream))
        return self._until_stored(answer, given.size_bytes) if stored else answer

    def _until_stored(self, answer: ASGIApp, size_bytes: int) -> ASGIApp:
        """An answer that gives its room back when it has ended, in whatever way."""

        async def send_it(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await answer(scope, receive, send)
            finally:
                self.room.release(size_bytes)

        return send_it

    async def read(self, request: Request) -> HttpResponse:
        """A response that was stored."""
        return _json((await self._stored(request)).response)

    async def items(self, request: Request) -> HttpResponse:
        """What was asked."""
        stored = await self._stored(request)
        return _json(InputItems(data=stored.asked()))

    async def remove(self, request: Request) -> HttpResponse:
        """Delete a response; those that go on from it stay."""
        asker = await self.api.asker(request)
        response_id: str = request.path_params["response_id"]
        await self.store.remove(asker.key.key_id, response_id)
        return _json(DeletedResponse(id=response_id))

    async def _stored(self, request: Request) -> StoredResponse:
        asker = await self.api.asker(request)
        if request.query_params.get("stream", "false") != "false":
            raise BadRequest("a stored response is not streamed again", param="stream")
        return await self.store.get(asker.key.key_id, request.path_params["response_id"])

    async def _before(self, key_id: str, response_id: str | None) -> list[ChatMessage]:
        if response_id is None:
            return []
        try:
            return (await self.store.get(key_id, response_id)).conversation()
        except NotFound as error:
            error.param = "previous_response_id"
            raise


def _json(body: msgspec.Struct) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(body), media_type="application/json")
