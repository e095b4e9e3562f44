"""Archives of graphs and of compiled kernels in this worker's memory, where its engine child can
read them.

An archive is executable input. It is checked before it is kept, and lies in a sealed file without a
name: nothing can change it afterwards.
"""

import fcntl
import os
from collections import OrderedDict

from blake3 import blake3

from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import Blob

KEPT_BYTES = 512 << 20
"""Of all archives of one worker, some 25 of them; those that were used last stay."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class WrongArchive(Exception):
    """The bytes are not those of the archive; ``field`` is what differs."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


class GraphFile:
    """A file without a name, for one archive. ``close`` gives its memory back."""

    def __init__(self) -> None:
        """Empty, and written by whoever knows ``path``."""
        self._descriptor = os.memfd_create("graphs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @property
    def path(self) -> str:
        """Where processes of this user find it, while it is open."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def seal(self) -> None:
        """From now on nobody writes."""
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)

    def write(self, data: bytes) -> None:
        """Holds these bytes, for good."""
        with os.fdopen(os.dup(self._descriptor), "wb") as file:
            file.write(data)
        self.seal()

    def read(self, blob: Blob) -> bytes:
        """Its bytes, if they are an archive's.

        Raises:
            WrongArchive: they are not.
        """
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes != blob.size_bytes or size_bytes > blob.most_bytes:
            raise WrongArchive(f"{blob.holds}_size")
        data = os.pread(self._descriptor, size_bytes, 0)
        check_archive(blob, data)
        return data

    def close(self) -> None:
        """Gives its memory back as soon as nobody reads it any more; a second time, nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_archive(blob: Blob, data: bytes) -> None:
    """Whether bytes are an archive's, whole.

    Raises:
        WrongArchive: they are not.
    """
    if len(data) != blob.size_bytes or len(data) > blob.most_bytes:
        raise WrongArchive(f"{blob.holds}_size")
    if blake3(data).hexdigest() != blob.digest:
        raise WrongArchive(f"{blob.holds}_digest")


class GraphFiles:
    """The archives that were used last."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._files: OrderedDict[Digest, tuple[GraphFile, int]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Of all that are kept."""
        return sum(size_bytes for _, size_bytes in self._files.values())

    def path_of(self, blob: Blob) -> str:
        """Where an archive is; empty: not here."""
        kept = self._files.get(blob.digest)
        if kept is None:
            return ""
        self._files.move_to_end(blob.digest)
        return kept[0].path

    def keep(self, blob: Blob, data: bytes) -> str:
        """Keeps an archive, in the place of those that were used longest ago; where it is.

        Raises:
            WrongArchive: the bytes are not its own.
            OSError: there is no memory for it.
        """
        check_archive(blob, data)
        if path := self.path_of(blob):
            return path
        file = GraphFile()
        try:
            file.write(data)
        except BaseException:
            file.close()
            raise
        self._files[blob.digest] = file, len(data)
        while self.num_bytes > self._most_bytes and len(self._files) > 1:
            _, (oldest, _) = self._files.popitem(last=False)
            oldest.close()
        return file.path

    def drop(self, digest: Digest) -> None:
        """Keeps an archive no longer, if it does."""
        if digest in self._files:
            self._files.pop(digest)[0].close()

    def close(self) -> None:
        """Keeps nothing any more."""
        for digest in tuple(self._files):
            self.drop(digest)
