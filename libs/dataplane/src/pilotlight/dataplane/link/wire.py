"""Frames on a link: a header of 12 bytes, then a control message in msgpack or bytes of a chunk.

::

    | kind 1 | 0 0 0 | request 4 | length 4 |  body: ``length`` bytes
       C                0 or the request        a message of ``messages.link``
       B                the request             bytes of its chunk: up to the end of one unit, never beyond

Numbers are big-endian. Pure: bytes in, frames out.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.common.errors import MessageTooLarge, MessageUndecodable
from pilotlight.common.messages.codec import decode_msgpack, encode_msgpack

HEADER = struct.Struct(">BxxxII")
MAX_CONTROL_BYTES = 16 * 1024
"""Of a control message: a list of digests has 256 bytes, and nothing is longer."""


class FrameKind(IntEnum):
    """What a frame holds."""

    CONTROL = ord("C")
    BYTES = ord("B")


@dataclass(frozen=True, slots=True)
class Head:
    """A frame's header."""

    kind: FrameKind
    request: int
    length: int


def parse_head(data: bytes | bytearray | memoryview) -> Head:
    """Read a header.

    Raises:
        MessageUndecodable: it is none.
        MessageTooLarge: the frame would be longer than any may be.
    """
    number, request, length = HEADER.unpack(data)
    try:
        kind = FrameKind(number)
    except ValueError as error:
        raise MessageUndecodable(
            f"a frame of kind {number}, which there is not: the peer speaks something else"
        ) from error
    limit = UNIT_BYTES if kind is FrameKind.BYTES else MAX_CONTROL_BYTES
    if length > limit:
        raise MessageTooLarge(f"a frame of {length} bytes; at most {limit} are taken")
    return Head(kind, request, length)


def bytes_head(request: int, length: int) -> bytes:
    """The header before a number of a chunk's bytes."""
    return HEADER.pack(FrameKind.BYTES, request, length)


def control_frame(message: object, request: int = 0) -> bytes:
    """A control message as a frame."""
    body = encode_msgpack(message)
    return HEADER.pack(FrameKind.CONTROL, request, len(body)) + body


def decode_control(body: bytes | bytearray | memoryview, as_type: Any) -> Any:
    """A control message of one of these types.

    Raises:
        MessageUndecodable: it is none of them.
    """
    return decode_msgpack(bytes(body), as_type)
