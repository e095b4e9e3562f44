"""Versions of files that are digests of their content, as hubs give them: with all of a file one
can tell whether it is that file.

A folder's times and a bucket's ETags are no such versions.
"""

import hashlib
from typing import Self

from pilotlight.checkpoint.reader import SourceFile

SHA256 = "sha256-"
"""What a hub's large files are known by."""
GIT = "git-"
"""What git knows small files by."""


class ContentHash:
    """Takes a file's bytes in order, and tells whether they are those that its version names."""

    def __init__(self, file: SourceFile) -> None:
        """Take a file whose version names its content: see ``names_content``."""
        self._version = file.version
        if file.version.startswith(SHA256):
            self._prefix, self._hash = SHA256, hashlib.sha256()
        else:
            # That SHA-1 is not safe against forgers is known, and the reason for SHA-256 where it
            # counts.
            self._prefix, self._hash = (
                GIT,
                hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False),
            )

    @classmethod
    def of(cls, file: SourceFile, data: bytes) -> Self:
        """After a whole file."""
        made = cls(file)
        made.update(data)
        return made

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes. Other threads go on meanwhile."""
        self._hash.update(data)

    @property
    def agrees(self) -> bool:
        """Whether the bytes so far are the file."""
        return f"{self._prefix}{self._hash.hexdigest()}" == self._version


def names_content(file: SourceFile) -> bool:
    """Whether the file's version is a digest of its content."""
    return file.version.startswith((SHA256, GIT))
