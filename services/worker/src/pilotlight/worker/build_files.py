"""Archives of one build, on their way from the engines that record them to the artifact."""

from collections.abc import Sequence

from pilotlight.common.messages.graphs import ArchiveRecorded, KernelsRecorded
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import COMPILE_CACHE, GRAPHS, Blob, range_kind
from pilotlight.policy.model import Stage
from pilotlight.worker.graph_files import GraphFile, WrongArchive

WITNESS = "witness"
"""A file of a build that no artifact has: graphs of an engine whose arena lies elsewhere."""


class LeftOut(Exception):
    """An artifact has no blob of a kind; ``field`` says why, by name."""

    def __init__(self, kind: str, field: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field


class BuildFiles:
    """The archives of one build, where its engines can read and write them. ``close`` gives their
    memory back.
    """

    def __init__(self, ranges: Sequence[Stage] = ()) -> None:
        """All are empty.

        Args:
            ranges: of layers whose graphs are recorded, too.
        """
        self.ranges = tuple(ranges)
        kinds = (COMPILE_CACHE, GRAPHS, WITNESS, *map(range_kind, ranges))
        self._files = {kind: GraphFile() for kind in kinds}
        self.archives: dict[Digest, bytes] = {}
        """Those that were written, by what they are known by."""

    def path(self, kind: str) -> str:
        """Where the archive of a kind is."""
        return self._files[kind].path

    def written(self, recorded: ArchiveRecorded | KernelsRecorded | None, kind: str) -> Blob:
        """An engine has written an archive: nobody does any more.

        Raises:
            LeftOut: it did not.
        """
        if recorded is None:
            raise LeftOut(kind, "engine", "it recorded nothing")
        if recorded.blob is None:
            raise LeftOut(kind, recorded.refused, recorded.message)
        self._files[kind].seal()
        try:
            self.archives[recorded.blob.digest] = self._files[kind].read(recorded.blob)
        except WrongArchive as error:
            raise LeftOut(kind, error.field, "it is not what the engine wrote") from error
        return recorded.blob

    def close(self) -> None:
        """No engine reads or writes any more."""
        for file in self._files.values():
            file.close()
