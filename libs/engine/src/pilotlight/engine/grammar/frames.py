"""What engine and grammar helper say to each other: msgpack behind a length of four bytes."""

from collections.abc import Iterator
from typing import Any

import msgspec

from pilotlight.policy.request import Grammar, Vocabulary

LENGTH_BYTES = 4


class Open(msgspec.Struct, tag="open", frozen=True, kw_only=True):
    """Begin a session: a grammar and the output so far. A ``Verdict`` follows."""

    session: int
    vocabulary: Vocabulary
    vocab_size: int
    """Of the model; its tokenizer may know fewer."""
    grammar: Grammar
    output_ids: list[int]


class Advance(msgspec.Struct, tag="advance", frozen=True, kw_only=True):
    """The output has one token more. A ``Verdict`` follows."""

    session: int
    token_id: int


class Close(msgspec.Struct, tag="close", frozen=True, kw_only=True):
    """The request of a session has ended."""

    session: int


ToHelper = Open | Advance | Close


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What may come after the output so far."""

    session: int
    position: int
    """Output tokens that were taken into account."""
    allowed: bytes = b""
    """A bit for each token of the model, lowest first. Tokens that end an output have none: see
    ``accepting``."""
    accepting: bool = False
    """The output may end here."""
    complete: bool = False
    """Nothing may follow."""
    code: str = ""
    """Why there is no verdict: a code of the engine's errors."""
    message: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class Frames:
    """Messages out of a stream of bytes."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        """Add bytes; the messages that are complete with them."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
            if len(self._buffer) < end:
                return
            message = self._decoder.decode(bytes(self._buffer[LENGTH_BYTES:end]))
            del self._buffer[:end]
            yield message
