"""Ranges of files read straight into mapped memory and hashed there, without Python's lock: see
``cpp/reads.cpp``.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from ctypes import c_char, c_int, c_int64, c_uint64, c_void_p
from typing import NamedTuple

from pilotlight.native.library import Library, out

DIGEST_BYTES = 32
_CANCELLED, _TOO_SHORT, _READ_FAILED, _NO_MEMORY, _NOT_RESIDENT = range(1, 6)


class ReadCancelled(Exception):
    """``cancel`` was called."""


class FileTooShort(Exception):
    """A file ends before its span does."""


class NoMemory(Exception):
    """The system has no memory for what is written to: its file system is full."""


class NotResident(Exception):
    """The system has not got the next bytes in its memory, and was to be asked for no others."""


class FileSpan(NamedTuple):
    """A range of a file, and the range [start, stop) of the memory that it goes to."""

    descriptor: int
    file_offset: int
    start: int
    stop: int


class Backing(NamedTuple):
    """The file that memory is a mapping of, and where the memory starts in it.

    It stays open until the read has ended or was cancelled.
    """

    descriptor: int
    offset: int


NO_FILE = Backing(-1, 0)
"""The memory is no file's, or of one that is not at hand."""


class FileRead:
    """One read into [start, stop) of some memory: units of BLAKE3 digests, zeros where no span is.

    ``run`` blocks without Python's lock, for the thread that reads; ``cancel`` and ``done_bytes``
    are for any.
    """

    def __init__(
        self,
        library: Library,
        memory: memoryview,
        bounds: tuple[int, int],
        unit_bytes: int,
        spans: Sequence[FileSpan],
        backing: Backing = NO_FILE,
    ) -> None:
        """Prepares it.

        Args:
            library: whose functions are called.
            memory: writable; it stays exported until the read is garbage.
            bounds: ``start`` and ``stop``, from the start of the memory.
            unit_bytes: what is hashed as one; the last unit is what is left.
            spans: in the order of their places, which do not overlap.
            backing: what the memory is a mapping of: new pages then cost several threads that read
                at once no more than one.

        Raises:
            ValueError: the bounds or a span lie outside of the memory.
        """
        start, stop = bounds
        if not 0 <= start <= stop <= len(memory) or any(
            not 0 <= span.start <= span.stop <= len(memory) for span in spans
        ):
            raise ValueError(
                f"[{start}, {stop}) and its spans are not all within memory of {len(memory)} bytes"
            )
        self._library = library
        self._memory = (c_char * len(memory)).from_buffer(memory)
        self._done = c_uint64()
        self._num_units = c_int()
        self._error = c_int()
        self._digests = ctypes.create_string_buffer(
            max(1, -(-(stop - start) // unit_bytes)) * DIGEST_BYTES
        )
        flat = (c_int64 * (4 * len(spans)))(*(number for span in spans for number in span))
        pointer, read = out(c_void_p)
        address = ctypes.addressof(self._memory)
        library.call(
            "read_open",
            address,
            *backing,
            start,
            stop,
            unit_bytes,
            flat,
            len(spans),
            ctypes.byref(self._done),
            pointer,
        )
        self._pointer = read()

    def run(self, *, resident_only: bool = False) -> None:
        """Reads on, from the first unit that is not done, to the end.

        Args:
            resident_only: only what the system has in its memory.

        Raises:
            ReadCancelled, FileTooShort, NoMemory, NotResident: see there; units before stay done.
            OSError: a file cannot be read.
        """
        code = self._library.get(
            "read_run",
            self._pointer,
            int(resident_only),
            self._digests,
            ctypes.byref(self._num_units),
            ctypes.byref(self._error),
        )
        failure = self._error.value
        if code == _NO_MEMORY and failure not in (errno.EFAULT, errno.ENOMEM):
            code = _READ_FAILED
        if code == _READ_FAILED:
            raise OSError(failure, os.strerror(failure))
        if code:
            raise {
                _CANCELLED: ReadCancelled,
                _TOO_SHORT: FileTooShort,
                _NO_MEMORY: NoMemory,
                _NOT_RESIDENT: NotResident,
            }[code]

    def cancel(self) -> None:
        """From when this returns, the memory is not written any more, and no unit becomes done."""
        self._library.get("read_cancel", self._pointer)

    @property
    def done_bytes(self) -> int:
        """Bytes that came, those of units that are not done among them; never less than before."""
        return self._done.value

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of the units that are done."""
        found = self._digests.raw[: self._num_units.value * DIGEST_BYTES]
        return tuple(found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES))

    def __del__(self) -> None:
        if pointer := getattr(self, "_pointer", 0):
            self._library.get("read_close", pointer)


def populate(library: Library, memory: memoryview) -> None:
    """Has the system give writable mapped memory its pages now. What is in them stays.

    Raises:
        OSError: it has none, or does not know how to.
    """
    mapped = (c_char * len(memory)).from_buffer(memory)
    if failure := library.get("populate", ctypes.addressof(mapped), len(memory)):
        raise OSError(failure, os.strerror(failure))


def blake3_of(library: Library, data: bytes) -> bytes:
    """Their digest, by the library."""
    digest = ctypes.create_string_buffer(DIGEST_BYTES)
    library.get("blake3", data, len(data), digest)
    return digest.raw
