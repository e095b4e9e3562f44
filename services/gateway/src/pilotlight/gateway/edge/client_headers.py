"""Headers by which a client and this gateway speak of one request: ids, and what is told of it."""

import re
from collections.abc import Callable, Sequence

from starlette.types import Message, Scope, Send

from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.edge.departure import Receiving

MAX_ID_CHARS = 128
REQUEST_ID = "x-request-id"
OWN_REQUEST_ID = "x-pilotlight-request-id"
EXPOSED = (
    REQUEST_ID,
    OWN_REQUEST_ID,
    "x-trace-id",
    "x-should-retry",
    "retry-after",
    "x-pilotlight-cold-start",
    "x-pilotlight-expected-s",
    "x-pilotlight-ignored-fields",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
"""Headers of answers that scripts of other origins may read."""
_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@~-]{0,%d}" % (MAX_ID_CHARS - 1))
_NOTED = "reply_headers"
_LATER = "reply_headers_later"
_REQUEST_ID = REQUEST_ID.encode()
_OWN_REQUEST_ID = OWN_REQUEST_ID.encode()

Header = tuple[bytes, bytes]


def id_headers(theirs: bytes | None, own_id: str, trace_id: str) -> list[Header]:
    """Headers that name the request in its answer.

    A client's own ``X-Request-Id`` is returned where it is well-formed. The gateway's id stands
    beside it: a client may send one id twice, and records need an id for each request.

    Args:
        theirs: the client's id; None: it gave none that is well-formed.
        own_id: the gateway's id.
        trace_id: empty where the request is not traced.
    """
    own = own_id.encode()
    headers = [(_REQUEST_ID, own if theirs is None else theirs)]
    if theirs is not None:
        headers.append((_OWN_REQUEST_ID, own))
    if trace_id:
        headers.append((b"x-trace-id", trace_id.encode()))
    return headers


def client_id(scope: Scope) -> bytes | None:
    """The request's id as the client gave it; None without one that is well-formed."""
    for header, value in scope["headers"]:
        if header == _REQUEST_ID:
            return value if _ID.fullmatch(value) else None
    return None


def plain_headers(scope: Scope) -> dict[str, str]:
    """A request's headers; of those with one name the first."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in reversed(scope["headers"])
    }


def note_header(scope: Scope, name: str, value: str) -> None:
    """Add a header to the answer, which has not begun."""
    noted: tuple[str, ...] = scope["state"].get(_NOTED, ())
    scope["state"][_NOTED] = (*noted, name, value)


def note_later(scope: Scope, told: Callable[[], Sequence[str]]) -> None:
    """Let this make headers of the answer when it begins: names and values in turn. Where many
    wait, what it keeps takes less memory than they would.
    """
    scope["state"][_LATER] = told


def noted_headers(scope: Scope) -> list[Header]:
    """What was noted for the answer."""
    noted: Sequence[str] = scope["state"].get(_NOTED, ())
    later: Callable[[], Sequence[str]] | None = scope["state"].get(_LATER)
    if later is not None:
        noted = (*noted, *later())
    return [
        (name.encode(), value.encode("ascii", "replace"))
        for name, value in zip(noted[::2], noted[1::2], strict=True)
    ]


class SendWithIds:
    """Sends an answer with its request's ids, and what was noted for it. No closure: those that
    wait would keep more.
    """

    __slots__ = ("_client_id", "_own", "_scope", "_send", "status")

    def __init__(self, send: Send, scope: Scope, own: Receiving | None = None) -> None:
        """``own`` is the connection whose ``send`` it is; None where something stands between."""
        self._send, self._scope, self._own = send, scope, own
        # The request's headers are let go before there is an answer.
        self._client_id = client_id(scope)
        self.status = 0
        """What was sent; 0: nothing yet."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), *self._added()]
        await self._send(message)

    def begin(self, status: int, headers: Sequence[Header], data: bytes, *, more: bool) -> bool:
        """Begin the answer without ASGI's messages; False: nothing was sent, it takes those.

        Args:
            status: of HTTP.
            headers: of the answer; with ``content-length``, if there is no more.
            data: the first part of its body.
            more: other parts follow.
        """
        own = self._own
        if own is None or not own.begin(status, [*headers, *self._added()], data, more=more):
            return False
        self.status = status
        return True

    def go_on(self, data: bytes, *, more: bool) -> bool:
        """Another part of the body, as ``begin``."""
        return self._own is not None and self._own.go_on(data, more=more)

    def _added(self) -> list[Header]:
        """Headers that the answer has besides."""
        trace_id = current_traceparent()[3:35]
        ids = id_headers(self._client_id, self._scope["state"]["request_id"], trace_id)
        return ids + noted_headers(self._scope)
