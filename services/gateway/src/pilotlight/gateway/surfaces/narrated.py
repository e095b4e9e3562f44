"""An answer told in another shape than that of completions: as a stream of named events, or whole.

What such a shape is made of is a ``Narrator``; errors have the shape of their surface too.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.edge import sse
from pilotlight.gateway.edge.client_headers import Header
from pilotlight.gateway.edge.errors import error_headers
from pilotlight.gateway.edge.http import (
    STREAM_HEADERS,
    Answering,
    Write,
    WrittenEvents,
    note_error,
)
from pilotlight.gateway.openai.api import Conversed
from pilotlight.gateway.openai.choice import Piece
from pilotlight.gateway.openai.exchange import progress_text
from pilotlight.gateway.serving.token_request import Held
from pilotlight.gateway.surfaces.blocks import Blocks, Change

NOT_JSON = "_arguments"
"""The member under which arguments come that are no JSON object."""

Handler = Callable[[Request], Awaitable[ASGIApp]]
ErrorBody = Callable[[PilotlightError, str], bytes]
"""Of an error and the request's id: the body that tells it."""


class Narrator(ABC):
    """How one answer is told. ``blocks`` has all of it that there is so far."""

    def __init__(self) -> None:
        self.blocks = Blocks()

    headers: Sequence[Header] = STREAM_HEADERS
    """Of a stream."""

    @abstractmethod
    def opening(self) -> bytes:
        """The first events of a stream."""

    def waiting(self, held: Held) -> bytes:
        """What a stream shows of a request that waits."""
        return sse.comment(progress_text(held))

    @abstractmethod
    def failed(self, error: PilotlightError) -> bytes:
        """The last events of a stream that fails after its first."""

    @abstractmethod
    def change(self, change: Change) -> bytes:
        """The events of what became of a block."""

    @abstractmethod
    async def closing(self, finish_reason: str) -> bytes:
        """The last events of a stream."""

    @abstractmethod
    async def whole(self, finish_reason: str) -> object:
        """The answer in one piece."""


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as an object; what is none, as when it was cut short, by its text."""
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {NOT_JSON: text}


def named_event(name: str, body: object) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\n" + sse.event(body)


def narrated(conversed: Conversed, narrator: Narrator, *, stream: bool) -> ASGIApp:
    """The one choice of what is answered, as it comes or in one piece."""
    exchange = conversed.exchange

    def finish_reason() -> str:
        return exchange.answer.finish_reason or "stop"

    async def events(write: Write) -> None:
        opened = False

        async def take(piece: Piece) -> None:
            nonlocal opened
            data = b"" if opened else narrator.opening()
            opened = True
            if isinstance(piece.what, Held):
                data += narrator.waiting(piece.what)
            else:
                changes = narrator.blocks.feed(piece.what)
                data += b"".join(narrator.change(change) for change in changes)
            if data:
                await write(data)

        await exchange.run(take)
        last = b"".join(narrator.change(change) for change in narrator.blocks.finish())
        await write(last + await narrator.closing(finish_reason()))

    async def whole() -> Response:
        async def take(piece: Piece) -> None:
            if not isinstance(piece.what, Held):
                narrator.blocks.feed(piece.what)

        await exchange.run(take)
        narrator.blocks.finish()
        body = msgspec.json.encode(await narrator.whole(finish_reason()))
        return Response(body, media_type="application/json")

    if not stream:
        return Answering(whole)
    return WrittenEvents(events, headers=narrator.headers, error_event=narrator.failed)


def in_shape(handler: Handler, error_body: ErrorBody) -> Handler:
    """A handler whose errors have the shape of its surface."""

    def refusal(request: Request, error: PilotlightError) -> Response:
        note_error(request.scope, error)
        return Response(
            error_body(error, request.state.request_id),
            error.status,
            error_headers(error),
            media_type="application/json",
        )

    async def shaped(request: Request) -> ASGIApp:
        try:
            answer = await handler(request)
        except PilotlightError as error:
            return refusal(request, error)

        async def send_it(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await answer(scope, receive, send)
            except PilotlightError as error:
                # Nothing was sent yet: a stream that has begun ends with an event.
                await refusal(request, error)(scope, receive, send)

        return send_it

    return shaped
