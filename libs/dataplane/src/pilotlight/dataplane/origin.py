"""Where a chunk can come from.

A fetch takes each chunk from one of several *origins*: the node's disk, another node, the model's
own source.
"""

from collections.abc import Sequence
from typing import Protocol

from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Model


class NotHere(Exception):
    """An origin has not got this chunk, or not any more.

    Nothing is wrong with it: it is asked for others.
    """


class RecordedNow(Exception):
    """A chunk was asked for whose digest was not known here; by now it is recorded, or will be in a
    moment.
    """


class Origin(Protocol):
    """Gives chunks of one model.

    ``read`` blocks and runs in threads, for several chunks at a time; the rest must not block.
    """

    @property
    def kind(self) -> OriginKind: ...

    @property
    def name(self) -> str:
        """For reports, metrics and logs, and what it is known by when it lies: a node's id, a
        model's URI, ``disk``.
        """
        ...

    @property
    def link(self) -> str:
        """What its bytes share their way with: those of one link are counted, limited and measured
        together.
        """
        ...

    @property
    def trusted(self) -> bool:
        """Whether it may give chunks whose digest is not recorded.

        Only the source that was registered may.
        """
        ...

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        """Write the chunk's bytes from ``work.position`` on to ``work``, until nothing is left.

        It must raise when no byte came for its stall timeout, and let pass on what ``work`` raises
        (having cleaned up: a file that turned out to be wrong may be removed).

        Raises:
            NotHere: it has not got the chunk.
            PilotlightError: it cannot give it. The fetch asks it for nothing more.
        """
        ...


class Nearby(Protocol):
    """Knows origins that are nearer than a model's own source."""

    def origins(self, model: Model, manifest: Manifest) -> Sequence[Origin]:
        """Those there are at this moment, the best first. Asked before each chunk; must not
        block.
        """
        ...


class Keeper(Protocol):
    """Keeps chunks that came from further away, so that they are nearer next time."""

    def keep(
        self, digest: Digest, file_offset: int, size_bytes: int, kind: OriginKind, model: Digest
    ) -> None:
        """A chunk was verified. Must not block.

        The bytes stay there as long as the copy does. A later reader has to verify them.

        Args:
            digest: The chunk's.
            file_offset: Where it lies in the pool's file, in bytes.
            size_bytes: Its length.
            kind: What it came from.
            model: Of whose fetch.
        """
        ...
