"""Server-sent events as bytes."""

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

_encoder = msgspec.json.Encoder()


def event(body: object) -> bytes:
    """One data event."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip: it keeps the connection alive and tells a person what goes on."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


def error_event(error: PilotlightError) -> bytes:
    """The last event of a stream that failed after its first byte."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
