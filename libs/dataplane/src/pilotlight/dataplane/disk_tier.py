"""The disk tier: chunks as files of this node, named by their digest, within a byte limit.

::

    DIR/.lock                     held by the loader that uses the folder
    DIR/ab/abcdef….chunk          a chunk's bytes, as they lie in a part's image
    DIR/ab/abcdef….part           one that is being written; it is not read, and what a killed loader left is removed
    DIR/models/                   whose the chunks are (disk_owners)

A file gets its name when all of it was written, but nothing waits for the disk: after a power
failure it may be torn. So every file is verified whenever it is read, and one that is not what its
name says is removed. What is least important by the cache's order goes first, of equals what was
used the longest ago, also over a restart: a file's time of modification is when it was last used.
"""

import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path

import structlog

from pilotlight.checkpoint.bulk import pieces_of
from pilotlight.checkpoint.manifest import CHUNK_BYTES, Chunk, Manifest
from pilotlight.common.clock import Clock
from pilotlight.common.errors import DiskTierTaken
from pilotlight.dataplane.chunk_fill import ChunkWork, MixedBytes, WrongBytes
from pilotlight.dataplane.disk_books import NOBODY, DiskBooks
from pilotlight.dataplane.disk_owners import note_owner, read_owners
from pilotlight.dataplane.origin import NotHere, Origin
from pilotlight.native.reads import FileSpan, FileTooShort
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Model

log = structlog.get_logger()

RETRY_S = 60.0
"""After a failed write, for so long nothing is written."""
BLOCK_BYTES = 4096
"""Files take whole blocks of a disk; counted so."""

_NAME = re.compile(r"([0-9a-f]{64})\.(chunk|part)")


class DiskEvent(StrEnum):
    """What happens to a chunk of the disk tier."""

    READ = "read"
    STORED = "stored"
    EVICTED = "evicted"
    DAMAGED = "damaged"
    """Its file was not what its name says, and was removed."""
    OVERTAKEN = "overtaken"
    """Its bytes had left the pool before they were written."""
    OUTRANKED = "outranked"
    """The disk is full of models that are more important."""
    DROPPED = "dropped"
    """There were too many before it, or the disk could not be written to."""


Count = Callable[[DiskEvent], None]
"""Hears of each event, in any thread."""


class Unwritten(Exception):
    """A chunk was not stored, and nothing is wrong."""


class Outranked(Unwritten):
    """What is on the disk is more important."""


class DiskTier:
    """The folder.

    Reading and asking: any thread; opening and writing: one at a time, and they block.
    """

    def __init__(self, folder: Path, limit_bytes: int, clock: Clock, count: Count) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._count = count
        self._mutex = threading.Lock()
        self._books = DiskBooks()
        self._lock_descriptor = -1
        self._off_until_s = float("-inf")

    @property
    def used_bytes(self) -> int:
        """What its files take of the disk. Never above the limit."""
        return self._books.used_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be read."""
        return not self._books

    @property
    def is_off(self) -> bool:
        """Whether it takes nothing at this moment, because the disk could not be written to."""
        return self._clock.monotonic_s() < self._off_until_s

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._books

    def open(self) -> None:
        """Lock the folder and take over what lies in it.

        Where it cannot be written to, the tier is off, and this is tried again.

        Raises:
            DiskTierTaken: another loader uses it.
        """
        try:
            self._open()
        except OSError as error:
            self._turn_off(error)

    def close(self) -> None:
        """Let another loader have the folder."""
        with self._mutex:
            self._books.clear()
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    def paths(self, count: int) -> list[Path]:
        """Files of chunks that are there, so many at the most."""
        with self._mutex:
            return [self._path(digest) for digest in islice(self._books, count)]

    def read(self, digest: Digest, work: ChunkWork) -> None:
        """As ``Origin.read``: a file that is gone, torn or wrong is forgotten, and nothing is wrong
        with the others.
        """
        try:
            descriptor = os.open(self._path(digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            self._lose(digest, error)
            raise NotHere from error
        try:
            if os.fstat(descriptor).st_size != work.size_bytes:
                raise WrongBytes(
                    f"the file has {os.fstat(descriptor).st_size} bytes, the chunk {work.size_bytes}"
                )
            _read_on(descriptor, work)
            _used_now(descriptor)
        except MixedBytes:
            raise
        except WrongBytes as error:
            log.warning(
                "chunk on disk is damaged",
                action="disk_chunk_damaged",
                digest=digest,
                error=str(error),
            )
            with suppress(OSError):
                self._path(digest).unlink(missing_ok=True)
            self._forget(digest, DiskEvent.DAMAGED)
            raise NotHere from error
        except OSError as error:
            self._lose(digest, error)
            raise NotHere from error
        finally:
            os.close(descriptor)
        with self._mutex:
            self._books.use(digest)
        self._count(DiskEvent.READ)

    def follow(self, order: Iterable[Digest]) -> None:
        """From now on models are worth what the cache says, the least important first."""
        with self._mutex:
            self._books.follow(order)

    def use(self, digest: Digest, model: Digest) -> None:
        """A chunk is a model's, too."""
        with self._mutex:
            self._books.use(digest, model)

    def write(
        self,
        digest: Digest,
        size_bytes: int,
        pieces: Iterable[memoryview],
        model: Digest = NOBODY,
    ) -> None:
        """Store a chunk, and give up less important ones for it.

        Args:
            digest: Of the chunk.
            size_bytes: Its length.
            pieces: Its bytes; that they are of this digest they say by ending without an error.
            model: Whose it is.

        Raises:
            Outranked: there is no room, but that of models which are more important.
            Unwritten: it was not stored.
        """
        taken = _on_disk(size_bytes)
        if digest in self._books or taken > self.limit_bytes or self.is_off:
            raise Unwritten
        try:
            if not self._is_ours():
                self._open()
            self._make_room(taken, model)
            self._write(digest, taken, pieces, model)
        except (OSError, DiskTierTaken) as error:
            self._turn_off(error)
            raise Unwritten from error
        self._count(DiskEvent.STORED)

    def _write(
        self, digest: Digest, taken: int, pieces: Iterable[memoryview], model: Digest
    ) -> None:
        path = self._path(digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        making = path.with_suffix(".part")
        with self._mutex:
            self._books.used_bytes += taken
        try:
            descriptor = os.open(
                making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                for piece in pieces:
                    _write_all(descriptor, piece)
                # The system begins to write it out now, rather than much at once later.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            making.rename(path)
        except BaseException:
            with self._mutex:
                self._books.used_bytes -= taken
            making.unlink(missing_ok=True)
            raise
        with self._mutex:
            self._books.add(digest, model, taken)
        note_owner(self.folder, digest, model)

    def _make_room(self, taken: int, model: Digest | None = None) -> None:
        """``model``: for whose chunk; None: for none, there is too much."""
        while self.used_bytes + taken > self.limit_bytes:
            with self._mutex:
                if model is not None and not self._books.gives_way_to(model):
                    raise Outranked
                victim = self._books.next()
            self._path(victim).unlink(missing_ok=True)
            self._forget(victim, DiskEvent.EVICTED)

    def _open(self) -> None:
        self.close()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(
            self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise DiskTierTaken(f"another loader uses the disk tier {self.folder}") from error
        self._lock_descriptor = descriptor
        found = sorted(self._adopt())
        owners = read_owners(self.folder, {digest for _, digest, _ in found})
        with self._mutex:
            for _, digest, taken in found:
                self._books.add(digest, owners.get(digest, NOBODY), taken)
                self._books.used_bytes += taken
        self._make_room(0)
        log.info(
            "disk tier opened",
            action="disk_tier_opened",
            folder=str(self.folder),
            chunks=len(self._books),
        )

    def _adopt(self) -> Iterator[tuple[int, Digest, int]]:
        """The chunks that lie there: when each was used, its digest, what it takes.

        What cannot be one is removed.
        """
        for below in self.folder.iterdir():
            if (
                not re.fullmatch("[0-9a-f]{2}", below.name)
                or below.is_symlink()
                or not below.is_dir()
            ):
                continue
            with os.scandir(below) as entries:
                for entry in entries:
                    name = _NAME.fullmatch(entry.name)
                    if name is None or not entry.is_file(follow_symlinks=False):
                        continue
                    stat = entry.stat(follow_symlinks=False)
                    if (
                        name[2] == "chunk"
                        and name[1].startswith(below.name)
                        and 0 < stat.st_size <= CHUNK_BYTES
                    ):
                        yield stat.st_mtime_ns, Digest(name[1]), _on_disk(stat.st_size)
                    else:
                        os.unlink(entry.path)

    def _is_ours(self) -> bool:
        """Whether the folder is still the one that is locked, and not one made anew."""
        if self._lock_descriptor < 0:
            return False
        try:
            return os.path.samestat(os.stat(self.folder / ".lock"), os.fstat(self._lock_descriptor))
        except FileNotFoundError:
            return False

    def _lose(self, digest: Digest, error: OSError) -> None:
        log.warning(
            "chunk on disk is lost", action="disk_chunk_lost", digest=digest, error=str(error)
        )
        self._forget(digest, DiskEvent.DAMAGED)

    def _forget(self, digest: Digest, event: DiskEvent) -> None:
        with self._mutex:
            was_here = self._books.remove(digest)
        if was_here:
            self._count(event)

    def _turn_off(self, error: Exception) -> None:
        self._off_until_s = self._clock.monotonic_s() + RETRY_S
        log.warning(
            "disk tier takes nothing for a while",
            action="disk_tier_off",
            folder=str(self.folder),
            retry_in_s=RETRY_S,
            error=str(error),
        )

    def _path(self, digest: Digest) -> Path:
        return self.folder / digest[:2] / f"{digest}.chunk"


class DiskOrigin:
    """The disk tier as an origin of every model's chunks."""

    kind = OriginKind.DISK
    name = "disk"
    link = "disk"
    trusted = False

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def origins(self, model: Model, manifest: Manifest) -> Sequence[Origin]:
        """As ``Nearby.origins``."""
        return () if self._tier.is_empty else (self,)

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        """As ``Origin.read``."""
        if work.digest is None or work.digest not in self._tier:
            raise NotHere
        self._tier.read(work.digest, work)


def _read_on(descriptor: int, work: ChunkWork) -> None:
    if work.takes_files:
        try:
            work.read_files([FileSpan(descriptor, 0, 0, work.size_bytes)], lambda: None)
        except FileTooShort as error:
            raise WrongBytes("the file has become shorter") from error
        return
    with closing(pieces_of(descriptor, work.position, work.size_bytes)) as pieces:
        for piece in pieces:
            work.write(piece)
    if work.left_bytes:
        raise WrongBytes("the file has become shorter")


def _used_now(descriptor: int) -> None:
    # A disk that can only be read from any more is good enough for this.
    with suppress(OSError):
        os.utime(descriptor)
    # The bytes are in the host pool now: the system need not keep them in memory, too.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        with data[done:] as left:
            done += os.write(descriptor, left)


def _on_disk(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
