"""How far one chunk is on its way into the pool.

A fetch makes a ``ChunkFill`` for the chunk and gives an origin a ``ChunkWork``, into which the
origin writes the chunk's bytes in order, or has files of this machine read. A try that breaks off
leaves what came: the next one goes on there.

::

    received    [unit 0][unit 1][uni              the next origin goes on at the byte, or at the last whole unit where the
                                   x breaks       list of the units' digests is known
    verified    [unit 0][unit 1]                  where it is known, units are verified one by one; else all at the end

No bytes are passed on before they are verified, and none is written once a try was revoked, however
late its thread wakes.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from blake3 import blake3

from pilotlight.checkpoint.digests import UNIT_BYTES, UNIT_DIGEST_BYTES, chunk_digest_of, units_of
from pilotlight.dataplane.file_reads import FileReads
from pilotlight.dataplane.readers import Abandoned, ReadProgress
from pilotlight.native.reads import FileRead, FileSpan, FileTooShort, NotResident, ReadCancelled
from pilotlight.policy.ids import Digest

Place = Callable[[int, memoryview], None]
"""Puts bytes at an offset from the chunk's start. Raises ``HostPoolFull``. Threads may call it."""


class WrongBytes(Exception):
    """What came has not the digest that is recorded."""


@dataclass(frozen=True, slots=True)
class VerifiedPrefix:
    """What of a chunk may be passed on while the rest is on its way."""

    units: tuple[bytes, ...] | None = None
    """The digests of all its units; None: they are not known yet."""
    size_bytes: int = 0
    """From the chunk's start on: verified, and never written again."""
    is_lost: bool = False
    """There will be no more of it."""


class ChunkFill:
    """How much of one chunk has come, from all its origins. Its tries are one after the other."""

    def __init__(
        self, digest: Digest | None, size_bytes: int, place: Place, files: FileReads | None = None
    ) -> None:
        """Nothing has come yet.

        Args:
            digest: The recorded one; None: none is recorded.
            size_bytes: Of the whole chunk.
            place: Puts bytes where they belong.
            files: Reads files to where the chunk lies; None: they come in pieces, as everything
                else.
        """
        self.digest = digest
        self.files = files
        self.size_bytes = size_bytes
        self.lock = threading.Lock()
        self.received_bytes = 0
        """From the chunk's start on."""
        self.prefix = VerifiedPrefix()
        """As it was when something of it changed last; any thread may look."""
        self._watchers: list[Callable[[], None]] = []
        self._place = place
        self._units: list[bytes] = []
        self._list: tuple[bytes, ...] | None = None
        self._open_unit = blake3()
        self._origins: set[str] = set()
        self._shares: list[tuple[str, int]] = []
        """Which origin gave the bytes up to where."""
        self._takes_unchecked = False
        self._alone = False
        """Bytes of several origins were wrong together, and one cannot tell whose: from now on each
        origin begins at the start."""

    @property
    def left_bytes(self) -> int:
        """What has not come yet."""
        return self.size_bytes - self.received_bytes

    @property
    def verified_bytes(self) -> int:
        """Bytes from the chunk's start on, in whole units, that are known to be right."""
        known = self._list is not None or self.is_whole
        return min(len(self._units) * UNIT_BYTES, self.size_bytes) if known else 0

    @property
    def is_whole(self) -> bool:
        """Every byte is there and, where a digest is recorded, verified."""
        return self.received_bytes == self.size_bytes

    @property
    def shares(self) -> dict[str, int]:
        """Bytes that are there, by the origin that gave them."""
        found: dict[str, int] = {}
        start = 0
        for origin, stop in self._shares:
            found[origin] = found.get(origin, 0) + stop - start
            start = stop
        return found

    @property
    def units(self) -> tuple[bytes, ...]:
        """The digests of the whole units that have come."""
        return tuple(self._units)

    @property
    def found(self) -> Digest:
        """The digest of the whole chunk."""
        return chunk_digest_of(self._units)

    def begin(self, origin: str, progress: ReadProgress, *, trusted: bool = False) -> "ChunkWork":
        """The next try, by an origin of this name. The one before was revoked.

        From one that is not trusted no byte is taken as long as no digest is recorded that it could
        be checked against.
        """
        self._takes_unchecked = trusted
        if self._origins - {origin}:
            if self._list is not None:
                self.rewind(len(self._units))
            elif self._alone:
                self.restart()
        return ChunkWork(self, origin, progress)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call it, in whatever thread, whenever ``prefix`` changes. It must not block."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Call it no more."""
        with suppress(ValueError):
            self._watchers.remove(watcher)

    def lose(self) -> None:
        """It is not filled any more: tell the senders that pass it on, unless it is whole."""
        with self.lock:
            if self.prefix.size_bytes < self.size_bytes:
                self._tell(is_lost=True)

    def _tell(self, *, is_lost: bool = False) -> None:
        units = self._list if self._list is not None else self.units if self.is_whole else None
        prefix = VerifiedPrefix(units, self.verified_bytes, is_lost)
        if prefix != self.prefix:
            self.prefix = prefix
            for watcher in tuple(self._watchers):
                watcher()

    def restart(self) -> None:
        """Forget everything that is not verified."""
        self.rewind(len(self._units) if self._list is not None else 0)

    def rewind(self, units: int) -> None:
        """Forget what came after this number of units."""
        del self._units[units:]
        self.received_bytes = min(len(self._units) * UNIT_BYTES, self.size_bytes)
        self._open_unit = blake3()
        while self._shares and self._shares[-1][1] > self.received_bytes:
            origin, _ = self._shares.pop()
            if self.received_bytes > (self._shares[-1][1] if self._shares else 0):
                self._shares.append((origin, self.received_bytes))
        if not self.received_bytes:
            self._origins.clear()

    def expect(self, origin: str, units: Sequence[bytes]) -> None:
        """As ``ChunkWork.expect``."""
        if self.digest is None:
            raise WrongBytes("a list of units came of a chunk whose digest is not recorded")
        fits = len(units) == units_of(self.size_bytes) and all(
            len(unit) == UNIT_DIGEST_BYTES for unit in units
        )
        if not fits or chunk_digest_of(units) != self.digest:
            raise WrongBytes("the list of the units' digests is not this chunk's")
        if self._list is None:
            self._list = tuple(units)
            agreeing = next(
                (at for at, unit in enumerate(self._units) if unit != units[at]), len(self._units)
            )
            if agreeing < len(self._units) or self._origins - {origin}:
                # Of a unit that others began one could not tell whose fault it is.
                self.rewind(agreeing)
            self._tell()

    def append(self, origin: str, data: memoryview) -> None:
        """The next bytes, which lie within one unit."""
        if len(data) > self.size_bytes - self.received_bytes:
            raise WrongBytes("more bytes came than the chunk has")
        self.check_taking()
        self._place(self.received_bytes, data)
        self._open_unit.update(data)
        self._count(origin, len(data))
        if self.received_bytes % UNIT_BYTES == 0 or self.is_whole:
            self._close_unit(self._open_unit.digest())

    def check_taking(self) -> None:
        """Whether bytes of the present try may be taken: they can be checked, or need not be.

        Raises:
            WrongBytes: they cannot be checked, and the origin is not trusted.
        """
        if self.digest is None and not self._takes_unchecked:
            raise WrongBytes(
                "bytes came of a chunk whose digest is not recorded: no check is possible"
            )

    def add_units(self, origin: str, units: Iterable[bytes]) -> None:
        """The next units, which lie in their places; their digests."""
        for unit in units:
            self._count(origin, min(UNIT_BYTES, self.left_bytes))
            self._close_unit(unit)

    def _count(self, origin: str, size_bytes: int) -> None:
        self._origins.add(origin)
        self.received_bytes += size_bytes
        if self._shares and self._shares[-1][0] == origin:
            self._shares.pop()
        self._shares.append((origin, self.received_bytes))

    def _close_unit(self, digest: bytes) -> None:
        self._units.append(digest)
        self._open_unit = blake3()
        at = len(self._units) - 1
        if self._list is not None and self._units[at] != self._list[at]:
            self.rewind(at)
            raise WrongBytes(f"unit {at} has not the digest that the chunk's list names")
        if self.is_whole and self.digest is not None and self.found != self.digest:
            found, mixed = self.found, len(self._origins) > 1
            self.rewind(0)
            self._alone = self._alone or mixed
            if mixed:
                raise MixedBytes(
                    f"what several origins gave has digest {found[:16]}…, recorded is {self.digest[:16]}…"
                )
            raise WrongBytes(f"it has digest {found[:16]}…, recorded is {self.digest[:16]}…")
        if self._list is not None or self.is_whole:
            self._tell()


class MixedBytes(WrongBytes):
    """The same, of bytes that several origins gave: one cannot tell whose are wrong."""


class ChunkWork:
    """One try of one origin at one chunk. For the thread that reads, but for ``revoke``."""

    def __init__(self, fill: ChunkFill, origin: str, progress: ReadProgress) -> None:
        self._fill = fill
        self._origin = origin
        self._progress = progress
        self._read: FileRead | None = None

    @property
    def digest(self) -> Digest | None:
        """The chunk's, where it is recorded."""
        return self._fill.digest

    @property
    def size_bytes(self) -> int:
        """Of the whole chunk."""
        return self._fill.size_bytes

    @property
    def position(self) -> int:
        """Where the next byte goes, from the chunk's start: what comes before is there already.

        ``expect`` may move it back.
        """
        return self._fill.received_bytes

    @property
    def left_bytes(self) -> int:
        """What is still to be written."""
        return self._fill.left_bytes

    def expect(self, units: Sequence[bytes]) -> None:
        """Tell the digests of all of the chunk's units; from now on each unit is verified as soon
        as it is there.

        Raises:
            WrongBytes: they are not this chunk's.
        """
        with self._fill.lock:
            self._check()
            self._fill.expect(self._origin, units)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """The chunk's next bytes, in pieces of any size.

        Raises:
            Abandoned: no fetch waits for them any more.
            WrongBytes: they, or those before them, are not the chunk's, which was noticed now.
            HostPoolFull: the host has no memory for them.
        """
        with memoryview(data).cast("B") as view:
            done = 0
            while done < len(view):
                with self._fill.lock:
                    self._check()
                    size_bytes = UNIT_BYTES - self.position % UNIT_BYTES
                    with view[done : done + size_bytes] as piece:
                        self._fill.append(self._origin, piece)
                        count = len(piece)
                done += count
                self._progress(count)

    @property
    def takes_files(self) -> bool:
        """Whether ``read_files`` can go on from the position."""
        return self._fill.files is not None and self.position % UNIT_BYTES == 0

    def read_files(
        self, spans: Sequence[FileSpan], check: Callable[[], None], *, resident_only: bool = False
    ) -> None:
        """Have ranges of files read to where they belong, from the position to the chunk's end;
        where none is, it is zero.

        Args:
            spans: by their places in the chunk. Those before the position do not matter.
            check: called after reading and before any of it counts; it raises where the files are
                not what they were.
            resident_only: only what the system has in its memory.

        Raises:
            NotResident, FileTooShort: units that came before count.
            OSError: a file cannot be read; the same.
            Abandoned, WrongBytes, HostPoolFull: as ``write``.
        """
        files = self._fill.files
        assert files is not None
        with self._fill.lock:
            self._check()
            self._fill.check_taking()
            read = self._read = files.begin((self.position, self.size_bytes), spans)
            self._progress.follow(read)
        try:
            files.run(read, resident_only=resident_only)
        except ReadCancelled as error:
            raise Abandoned from error
        except (NotResident, FileTooShort, OSError):
            self._take_checked(check)
            raise
        else:
            self._take_checked(check)
        finally:
            with self._fill.lock:
                self._read = None
                self._progress.unfollow()

    def _take_checked(self, check: Callable[[], None]) -> None:
        check()
        with self._fill.lock:
            self._check()
            self._take()

    def _take(self) -> None:
        """Count the units that are done."""
        if self._read is not None:
            digests, self._read = self._read.digests, None
            self._fill.add_units(self._origin, digests)

    def check(self) -> None:
        """For an origin that waits for bytes, now and then.

        Raises:
            Abandoned: no fetch waits for them any more.
        """
        with self._fill.lock:
            self._check()

    def sign(self) -> None:
        """Tell that no bytes came, and yet they are on their way: the try has not stalled."""
        self._progress.sign()

    def revoke(self) -> None:
        """From when this returns, the try writes nothing any more."""
        with self._fill.lock:
            self._progress.abandoned = True
            if self._read is not None:
                self._read.cancel()
                if self.digest is not None:
                    # They are checked by it, whatever the files are by now.
                    with suppress(WrongBytes):
                        self._take()

    def _check(self) -> None:
        self._progress.check()
