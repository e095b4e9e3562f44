"""Models on a hub: a commit is looked up once, and from then on every file is asked for by that
commit, so that it cannot move.

::

    registration   GET {endpoint}/api/models/{org}/{name}/revision/{revision}?blobs=true     commit, files, sizes, digests
    fetch          GET {endpoint}/{org}/{name}/resolve/{commit}/{file}   Range: bytes=a-b
                       200/206                    a small file, from the hub itself; its ETag is its digest
                       302 X-Linked-Etag: SHA-256  a large one, from wherever Location says
                   GET {Location}   Range: bytes=a-b          without our token; asked again as long as it is good
"""

import re
import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import quote

import msgspec

from pilotlight.checkpoint.content import GIT, SHA256, ContentHash
from pilotlight.checkpoint.errors import (
    BadCheckpoint,
    SourceChanged,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
)
from pilotlight.checkpoint.folders import belongs
from pilotlight.checkpoint.reader import MAX_FILES, SourceFile
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.model_uris import HubUri
from pilotlight.common.sources.http import Answer, GuardedHttp, Origin
from pilotlight.common.sources.ranged import Broken, Patience, RangedSource

MAX_LISTING_BYTES = 32 * 1024 * 1024
_HEX = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_STALE = (400, 401, 403, 404, 410)
"""What a place that was referred to answers when the reference is no longer good."""


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct, rename={"blob_id": "blobId"}):
    rfilename: str
    size: int | None = None
    blob_id: str | None = None
    lfs: _Lfs | None = None


class _Listing(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a file's bytes lie, and as what."""

    url: str
    etag: str


class HubSource(RangedSource):
    """The files of one repository at one commit."""

    def __init__(
        self,
        uri: HubUri,
        endpoint: str,
        http: GuardedHttp,
        patience: Patience,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            uri: the repository; it must be pinned before files are listed or read: see ``pin``.
            endpoint: the hub's address.
            http: the connections, with their limits.
            patience: how often, and for how long, a read is tried.
            clock: tells for how long a server wants to be left alone; None: the system's.
        """
        super().__init__(patience)
        self.uri = uri
        self._endpoint = endpoint
        self._origin = Origin.of(endpoint)
        self._http = http
        self._clock = clock or SystemClock()
        self._listed: tuple[SourceFile, ...] | None = None
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()

    def pin(self) -> HubUri:
        """Ask what the revision stands for at this moment; the URI with that commit.

        Raises:
            SourceMissing: there is no such repository or revision.
            SourceDenied: it is not for us.
            SourceUnavailable: the hub does not answer, or answers nonsense.
            BadCheckpoint: there are too many files.
        """
        revision = quote(self.uri.revision or "main", safe="")
        listing = self._ask(
            f"{self._endpoint}/api/models/{self.uri.repository}/revision/{revision}?blobs=true"
        )
        pinned = HubUri(self.uri.org, self.uri.name, listing.sha)
        if not pinned.pinned:
            raise SourceUnavailable(
                f"the hub names {listing.sha[:80]!r} as the commit of {self.uri}"
            )
        if len(listing.siblings) > MAX_FILES:
            raise BadCheckpoint(f"the repository holds more than {MAX_FILES} files")
        flat = [found for found in listing.siblings if belongs(found.rfilename)]
        self._listed = tuple(sorted(map(_pin, flat), key=lambda file: file.name))
        self.uri = pinned
        return pinned

    def list_files(self) -> tuple[SourceFile, ...]:
        """As ``Source.list_files``; folders are left out, as there."""
        if self._listed is None:
            self.pin()
        assert self._listed is not None
        return self._listed

    def read(self, file: SourceFile, offset: int, size_bytes: int) -> bytes:
        """As ``Source.read``; a whole file is checked against its digest."""
        data = super().read(file, offset, size_bytes)
        if size_bytes == file.size_bytes and not ContentHash.of(file, data).agrees:
            raise SourceChanged(
                "the bytes do not have the digest that the hub names", file=file.name
            )
        return data

    def stream(self, file: SourceFile, start: int, stop: int) -> Generator[bytes]:
        """As ``RangedSource.stream``."""
        place = self._places.get(file.name)
        if place is not None:
            with (
                self._forgotten_if_broken(file.name, place),
                self._get(place.url, start, stop) as answer,
            ):
                if answer.status not in _STALE:
                    if answer.status in (200, 206) and _etag(answer.headers) != place.etag:
                        raise SourceChanged(
                            "what the hub referred to is another file now", file=file.name
                        )
                    yield from _body(answer, file, start, stop)
                    return
            self._forget(file.name, place)
        assert self.uri.pinned
        url = (
            f"{self._endpoint}/{self.uri.repository}/resolve/{self.uri.revision}/{quote(file.name)}"
        )
        with self._get(url, start, stop) as answer:
            _check_claims(answer, file, str(self.uri.revision))
            _refuse(answer, f"{self.uri}", self._clock, file.name)
            _check_content(answer, file)
            if Origin.of(answer.url) == self._origin or answer.status == 416:
                yield from _body(answer, file, start, stop)
                return
            place = _place(answer, file)
            with self._lock:
                self._places[file.name] = place
            with self._forgotten_if_broken(file.name, place):
                yield from _body(answer, file, start, stop)

    def close(self) -> None:
        """As ``Source.close``."""
        self._http.close()

    @contextmanager
    def _forgotten_if_broken(self, name: str, place: _Place) -> Generator[None]:
        """The hub may refer to a server that works next time."""
        try:
            yield
        except Broken:
            self._forget(name, place)
            raise

    def _forget(self, name: str, place: _Place) -> None:
        with self._lock:
            # Another thread may have been referred to a better one meanwhile.
            if self._places.get(name) is place:
                del self._places[name]

    def _get(self, url: str, start: int, stop: int) -> AbstractContextManager[Answer]:
        return self._http.get(url, {"range": f"bytes={start}-{stop - 1}"})

    def _ask(self, url: str) -> _Listing:
        for attempt in range(self._patience.tries):
            try:
                with self._http.get(url) as answer:
                    _refuse(answer, str(self.uri), self._clock)
                    return msgspec.json.decode(answer.read(MAX_LISTING_BYTES), type=_Listing)
            except msgspec.DecodeError as error:
                raise SourceUnavailable(
                    f"what answers at {self._endpoint} is no hub: {error}"
                ) from error
            except Broken as error:
                self._wait(attempt, error)
        raise AssertionError("the last try returns or raises")


def _pin(found: _Sibling) -> SourceFile:
    name = found.rfilename
    if found.size is None or found.size < 0:
        raise SourceUnavailable("the hub does not tell the file's size", file=name)
    digest = found.lfs.sha256 if found.lfs is not None else found.blob_id
    if digest is None or _HEX.fullmatch(digest) is None:
        raise SourceUnavailable("the hub does not tell the file's digest", file=name)
    return SourceFile(
        name=name,
        size_bytes=found.size,
        version=f"{SHA256 if found.lfs is not None else GIT}{digest}",
    )


def _place(answer: Answer, file: SourceFile) -> _Place:
    """Where the hub referred to.

    Without an ETag nothing would tell whether that is another file the next time.
    """
    etag = _etag(answer.headers)
    if not etag:
        raise SourceUnavailable(
            "the server that the hub refers to does not say which content it gives (ETag)",
            file=file.name,
        )
    return _Place(answer.url, etag)


def _etag(headers: dict[str, str]) -> str:
    return headers.get("etag", "").removeprefix("W/").strip('"')


def _check_claims(answer: Answer, file: SourceFile, commit: str) -> None:
    """That the hub does not say of itself that it gives something else, even where what it refers
    to cannot be had.
    """
    told = answer.endpoint_headers
    if told.get("x-repo-commit", commit) != commit:
        raise SourceChanged(
            f"the hub gives commit {told['x-repo-commit'][:40]!r} for {commit}", file=file.name
        )
    if "x-linked-etag" in told:
        _check_content(answer, file)


def _check_content(answer: Answer, file: SourceFile) -> None:
    told = answer.endpoint_headers
    given = told.get("x-linked-etag", told.get("etag", "")).removeprefix("W/").strip('"')
    if not given:
        raise SourceUnavailable(
            "the hub does not say which content it gives (X-Linked-Etag)", file=file.name
        )
    if given != file.version.removeprefix(SHA256).removeprefix(GIT):
        raise SourceChanged(f"the hub gives content {given[:64]!r} now", file=file.name)


def _body(answer: Answer, file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of an answer, once it is sure that they are those that were asked for."""
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise SourceUnavailable("the server encodes what must come as it is", file=file.name)
    if answer.status == 206:
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if match is None or (int(match[1]), int(match[2]) + 1) != (start, stop):
            raise SourceUnavailable(
                "the server gives another range than it was asked for", file=file.name
            )
        if int(match[3]) != file.size_bytes:
            raise SourceChanged(f"the file has {match[3]} bytes now", file=file.name)
        yield from answer.body
    elif answer.status == 200 and (start, stop) == (0, file.size_bytes):
        yield from answer.body
    elif answer.status == 200:
        raise SourceUnavailable("the server gives whole files only, no ranges", file=file.name)
    elif answer.status == 416:
        raise SourceChanged("the file is shorter now", file=file.name)
    elif answer.status >= 500 or answer.status in (408, 429):
        raise Broken(f"the server answers {answer.status}")
    else:
        raise SourceUnavailable(f"the server answers {answer.status}", file=file.name)


def _refuse(answer: Answer, what: str, clock: Clock, file: str | None = None) -> None:
    """Raise for an answer that holds nothing of what was asked for."""
    status = answer.status
    if status in (200, 206, 416):
        return
    reason = answer.endpoint_headers.get("x-error-code", "")
    told = f"the hub answers {status}{f' {reason[:40]}' if reason.isalnum() else ''}"
    if status in (401, 403):
        raise SourceDenied(
            f"{what}: {told}: there is no such repository, or it is private or gated and needs a token that may read it",
            file=file,
        )
    if status in (404, 410) and file is not None:
        raise SourceChanged(f"{told}: the file or its repository is gone", file=file)
    if status in (404, 410):
        raise SourceMissing(f"{what}: {told}: there is no such repository or revision")
    if status >= 500 or status in (408, 429):
        raise Broken(
            f"{what}: {told}", _retry_after_s(answer.headers.get("retry-after", ""), clock)
        )
    raise SourceUnavailable(f"{what}: {told}; check PILOTLIGHT_HUB_ENDPOINT", file=file)


def _retry_after_s(value: str, clock: Clock) -> float | None:
    if value.isdecimal():
        return float(value[:9])
    try:
        return max(0.0, (parsedate_to_datetime(value) - clock.wall()).total_seconds())
    except (ValueError, TypeError):
        return None
