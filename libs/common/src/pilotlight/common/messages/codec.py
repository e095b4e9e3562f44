"""Encoding and framing of messages.

JSON on the bus, so that ``nats sub`` shows what goes on; msgpack for token batches and for frames
between processes of one host. Unknown fields are ignored: releases can mix.
"""

import asyncio
import struct
from typing import Any, TypeVar

import msgspec

from pilotlight.common.errors import MessageTooLarge, MessageUndecodable

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""Largest message on the bus; the server is configured with the same number."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest frame between two processes of one host."""

_LENGTH = struct.Struct(">I")
_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of everything that travels between processes."""


def encode_json(message: object) -> bytes:
    """Encode for the bus.

    Raises:
        MessageTooLarge: the encoding is beyond ``MAX_PAYLOAD_BYTES``.
    """
    return _checked(_json_encoder.encode(message))


def decode_json(data: bytes, as_type: type[T]) -> T:
    """Decode from the bus.

    Raises:
        MessageUndecodable: the bytes are not a valid ``as_type``.
    """
    decoder = _json_decoders.get(as_type)
    if decoder is None:
        decoder = _json_decoders[as_type] = msgspec.json.Decoder(as_type)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise MessageUndecodable(f"not a valid {_name(as_type)}: {error}") from error


def encode_msgpack(message: object) -> bytes:
    """Encode a token batch or a frame's body."""
    return _checked(_msgpack_encoder.encode(message), MAX_FRAME_BYTES)


def decode_msgpack(data: bytes, as_type: Any) -> Any:
    """Decode a token batch or a frame's body; ``as_type`` may be a union of tagged structs.

    Raises:
        MessageUndecodable: the bytes are not a valid ``as_type``.
    """
    decoder = _msgpack_decoders.get(as_type)
    if decoder is None:
        decoder = _msgpack_decoders[as_type] = msgspec.msgpack.Decoder(as_type)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise MessageUndecodable(f"not a valid {_name(as_type)}: {error}") from error


def frame(message: object) -> bytes:
    """A frame on a Unix socket: four bytes of length, big-endian, then msgpack."""
    body = encode_msgpack(message)
    return _LENGTH.pack(len(body)) + body


def write_frame(writer: asyncio.StreamWriter, message: object) -> None:
    """Hand a frame to a connection; it is sent when the peer reads.

    Raises:
        ConnectionResetError: it is closed. uvloop raises ``RuntimeError`` there, which would end
            whoever writes; asyncio's own loop loses the frame without a word.
    """
    data = frame(message)
    if writer.transport.is_closing():
        raise ConnectionResetError("the connection is closed")
    writer.write(data)


async def read_frame(reader: asyncio.StreamReader, as_type: Any) -> Any:
    """Read one frame; None at a clean end of the stream.

    Raises:
        MessageTooLarge: the announced length is beyond ``MAX_FRAME_BYTES``.
        MessageUndecodable: the stream ended within a frame, or the body is not a valid ``as_type``.
    """
    try:
        head = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise MessageUndecodable("the stream ended within a frame's length") from error
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise MessageTooLarge(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
    try:
        return decode_msgpack(await reader.readexactly(length), as_type)
    except asyncio.IncompleteReadError as error:
        raise MessageUndecodable("the stream ended within a frame") from error


class FrameBuffer:
    """Cuts a byte stream into frames, for readers without asyncio (the engine child)."""

    def __init__(self, as_type: Any) -> None:
        self._as_type = as_type
        self._bytes = bytearray()
        self._at = 0
        """What is before it has been taken."""

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes as they came; return the frames that are now complete."""
        self.add(data)
        frames: list[Any] = []
        while (one := self.take()) is not None:
            frames.append(one)
        return frames

    def add(self, data: bytes) -> None:
        """Add bytes as they came."""
        del self._bytes[: self._at]
        self._at = 0
        self._bytes += data

    def take(self) -> Any:
        """The next frame, which is decoded now and not when it came; None where none is complete.

        Raises:
            MessageTooLarge: the announced length is beyond ``MAX_FRAME_BYTES``.
            MessageUndecodable: the body is not of the type.
        """
        begin = self._at + _LENGTH.size
        if len(self._bytes) < begin:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes, self._at)
        if length > MAX_FRAME_BYTES:
            raise MessageTooLarge(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
        if len(self._bytes) < begin + length:
            return None
        self._at = begin + length
        return decode_msgpack(bytes(self._bytes[begin : self._at]), self._as_type)


def _checked(data: bytes, limit: int = MAX_PAYLOAD_BYTES) -> bytes:
    if len(data) > limit:
        raise MessageTooLarge(f"a message of {len(data)} bytes; at most {limit} are taken")
    return data


def _name(as_type: Any) -> str:
    return getattr(as_type, "__name__", str(as_type))
