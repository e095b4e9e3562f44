"""The frames of a decision log in its file: four bytes of length, and msgpack, squeezed by zstd (by
zlib up to format 2).
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import zstandard

from pilotlight.common.errors import BadRequest

LEVEL, WINDOW_BYTES = 6, 1 << 22
"""What one start has said comes again with the next one, and with its end: in a large cluster from
further back than the 32 KiB that zlib knows."""
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 20


class Squeezer:
    """Frames into one stream."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            compression_level=LEVEL, window_log=WINDOW_BYTES.bit_length() - 1
        )
        self._stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()

    def put(self, frame: bytes) -> bytes:
        """What is to be written by now, which need not have this frame."""
        return self._stream.compress(_LENGTH.pack(len(frame)) + frame)

    def flush(self) -> bytes:
        """What is left to be written, so that every frame can be read."""
        return self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def end(self) -> bytes:
        """The stream's end. No frame may follow."""
        return self._stream.flush()


class _Stream(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...


def frames_of(path: Path) -> Iterator[bytes]:
    """A file's frames, as far as it is whole: to its last flush, where a process was killed.

    Raises:
        BadRequest: it is no such file.
    """
    stream, held = None, b""
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            stream = stream or _stream_of(piece)
            try:
                held += stream.decompress(piece)
            except (zlib.error, zstandard.ZstdError) as error:
                raise BadRequest(f"{path} is no decision log: {error}") from error
            at = 0
            while len(held) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(held, at)
                if len(held) - at - _LENGTH.size < length:
                    break
                yield held[at + _LENGTH.size : at + _LENGTH.size + length]
                at += _LENGTH.size + length
            held = held[at:]


def _stream_of(beginning: bytes) -> _Stream:
    if beginning.startswith(zstandard.FRAME_HEADER):
        return zstandard.ZstdDecompressor().decompressobj()
    return zlib.decompressobj()
