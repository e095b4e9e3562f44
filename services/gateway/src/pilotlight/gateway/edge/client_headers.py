"""Headers by which a client and this gateway speak of one request: ids, and what is told of it."""

import re

from starlette.types import Scope

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

Header = tuple[bytes, bytes]


def id_headers(scope: Scope, own_id: str, trace_id: str) -> list[Header]:
    """Headers that name the request in its answer.

    A client's own ``X-Request-Id`` is returned where it is well-formed. The gateway's id stands
    beside it: a client may send one id twice, and records need an id for each request.

    Args:
        scope: with the request's headers.
        own_id: the gateway's id.
        trace_id: empty where the request is not traced.
    """
    own = own_id.encode()
    theirs = client_id(scope)
    headers = [(REQUEST_ID.encode(), own if theirs is None else theirs)]
    if theirs is not None:
        headers.append((OWN_REQUEST_ID.encode(), own))
    if trace_id:
        headers.append((b"x-trace-id", trace_id.encode()))
    return headers


def client_id(scope: Scope) -> bytes | None:
    """The request's id as the client gave it; None without one that is well-formed."""
    name = REQUEST_ID.encode()
    for header, value in scope["headers"]:
        if header == name:
            return value if _ID.fullmatch(value) else None
    return None


def note_header(scope: Scope, name: str, value: str) -> None:
    """Add a header to the answer, which has not begun."""
    noted: list[Header] = scope["state"].setdefault(_NOTED, [])
    noted.append((name.encode(), value.encode("ascii", "replace")))


def noted_headers(scope: Scope) -> list[Header]:
    """What was noted for the answer."""
    return scope["state"].get(_NOTED, [])
