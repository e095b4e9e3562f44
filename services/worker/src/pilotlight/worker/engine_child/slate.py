"""A page of memory that an engine child shares with its worker: what it does at this moment.

No frame could say so: what hangs sends none, and a frame for every batch would cost the worker a
turn of its loop. Written by the child alone. A look at it in mid-write may find a mix of two notes,
which the next look does not find again.

::

    | word, 8 | obeyed, 8 | doing, 8 | tokens, 8 | mark, 8 |
"""

import mmap
import struct
from dataclasses import dataclass
from zlib import crc32

from pilotlight.policy.hang import Doing
from pilotlight.policy.ids import InstanceId

_LAYOUT = struct.Struct("<5Q")
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Note:
    """What a child says of itself."""

    word: int
    """One more with each note."""
    obeyed: int
    """Commands that it has taken so far."""
    doing: Doing
    tokens: int
    """Of the batch."""
    mark: int
    """``mark_of`` the instance that the batch belongs to."""


class Slate:
    """The page; one that no other process sees, where there is no descriptor of a file that both
    have.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Maps the file, which stays the caller's.

        Raises:
            OSError: there is no memory, or no such file.
        """
        self._page = mmap.mmap(-1 if descriptor is None else descriptor, _PAGE_BYTES)
        self._word = 0
        self._obeyed = 0

    def write(self, doing: Doing, tokens: int = 0, mark: int = 0) -> None:
        """Turn to something else."""
        self._word += 1
        # ``pack_into`` would fill it with zeros first, which the worker may read.
        said = _LAYOUT.pack(self._word, self._obeyed, doing, tokens, mark)
        self._page[: len(said)] = said

    def obey(self) -> None:
        """One more command was taken, and is being carried out."""
        self._obeyed += 1
        self.write(Doing.OBEYING)

    def read(self) -> Note:
        """What was written last."""
        word, obeyed, doing, tokens, mark = _LAYOUT.unpack_from(self._page)
        return Note(word, obeyed, Doing(doing), tokens, mark)

    def close(self) -> None:
        """Let go of the page."""
        self._page.close()


def mark_of(instance_id: InstanceId) -> int:
    """What stands for an instance on a slate."""
    return crc32(instance_id.encode())
