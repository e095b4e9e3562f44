"""Server-sent events as bytes."""

from collections.abc import Callable

import msgspec

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.edge.errors import error_body

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx and its kin would hold tokens back.
    "x-accel-buffering": "no",
}

_MARK = "\ufdd0"
"""A text that nothing else in an event is: Unicode gives this code point to no character."""
_encoder = msgspec.json.Encoder()


def event(body: object) -> bytes:
    """One data event."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


def around(shape: Callable[[str], object]) -> tuple[bytes, bytes]:
    """What stands before and after the text in events that differ in their text alone.

    Args:
        shape: makes the body of such an event.
    """
    head, _, tail = event(shape(_MARK)).partition(_encoder.encode(_MARK))
    return head, tail


def filled(parts: tuple[bytes, bytes], text: str) -> bytes:
    """The event with this text; ``parts`` are from ``around``."""
    head, tail = parts
    return head + _encoder.encode(text) + tail


def comment(text: str) -> bytes:
    """A line that clients skip: it keeps the connection alive and tells a person what goes on."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


def error_event(error: PilotlightError) -> bytes:
    """The last event of a stream that failed after its first byte."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
