"""Reading the bodies of requests, within limits."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import Receive

from pilotlight.common.errors import (
    BodyTimeout,
    DeadlineExceeded,
    TooLarge,
    UnsupportedEncoding,
)
from pilotlight.common.waiting import within
from pilotlight.gateway.edge.bodies import BodyRoom, room_of
from pilotlight.gateway.edge.departure import ClientGone, Receiving
from pilotlight.policy.bodies import decoded_bytes

BODY_DEADLINE_S = 60.0
"""For the whole body to arrive."""
_PLAIN = {b"content-encoding": b"identity", b"transfer-encoding": b"chunked"}
"""What bodies may be encoded as, by header."""


async def read_body(
    request: Request, limit_bytes: int, owner: str, *, decoded: bool = True
) -> bytes:
    """A request's body.

    It has room in the budget until the answer begins to be made.

    Args:
        request: whose it is.
        limit_bytes: the longest that is taken.
        owner: whose share of the budget it takes.
        decoded: JSON will be made of it; otherwise it is only cut apart.

    Raises:
        UnsupportedEncoding: it is compressed, or encoded in another way.
        TooLarge: it is longer than the limit, or takes more memory than there is for bodies.
        BodiesFull: other bodies leave no room for it now.
        BodyTimeout: it did not arrive in time.
        ClientGone: the client left while sending it.
    """
    headers, receive = request.scope["headers"], request.receive
    _check_encoding(headers)
    room = room_of(request.scope)
    announced = next((value for name, value in headers if name == b"content-length"), b"")
    length = int(announced) if announced.isdigit() else None
    if length is not None and length > limit_bytes:
        raise TooLarge(f"a body of {length} bytes; at most {limit_bytes} are taken")
    # Most have come with their heads.
    body = receive.whole_body() if isinstance(receive, Receiving) else None
    if body is None:
        if length is not None:
            room.take(owner, length)
        begun = bytearray()
        try:
            body = await _read(begun, receive, limit_bytes, room, owner)
        except BaseException:
            # Whoever keeps the error keeps its frames, and with them what had come.
            begun.clear()
            raise
    elif len(body) > limit_bytes:
        raise TooLarge(f"the body is longer than {limit_bytes} bytes")
    room.take(owner, decoded_bytes(body) if decoded else 2 * len(body))
    return body


async def _read(
    body: bytearray, receive: Receive, limit_bytes: int, room: BodyRoom, owner: str
) -> bytes:
    pause_s, clock = room.budget.pause_s, asyncio.get_running_loop()
    until_s = clock.time() + BODY_DEADLINE_S
    while True:
        part_until_s = min(until_s, clock.time() + pause_s)
        try:
            message = await within(part_until_s - clock.time(), receive(), "the body")
        except DeadlineExceeded as error:
            raise BodyTimeout(
                f"the body did not arrive within {BODY_DEADLINE_S:g} s"
                if part_until_s == until_s
                else f"no byte of the body arrived for {pause_s:g} s, after {len(body)}"
            ) from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if len(body) + len(part) > limit_bytes:
            raise TooLarge(f"the body is longer than {limit_bytes} bytes")
        room.take(owner, len(body) + len(part))
        body += part
        if not message.get("more_body", False):
            return bytes(body)


def _check_encoding(headers: Sequence[tuple[bytes, bytes]]) -> None:
    for name, plain in _PLAIN.items():
        values = [value for header, value in headers if header == name]
        if values == [plain] or not values:
            continue
        codings = {coding.strip().lower() for value in values for coding in value.split(b",")}
        if codings - {plain, b""}:
            told = ", ".join(sorted(coding.decode("latin-1") for coding in codings))[:100]
            raise UnsupportedEncoding(f"{name.decode()}: {told} is not taken")
