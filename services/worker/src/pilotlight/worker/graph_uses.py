"""How often graphs of artifacts were replayed, which says in which order they are restored: in this
worker's memory, and in a folder of its node, for the worker after it and for those beside it.

::

    FOLDER / FINGERPRINT.json    {"format": 1, "uses": {"1": 900, "8": 30}}

A worker that has news reads a file, adds them and replaces it whole. Of two at the same moment one
replaces the other's: then the order is that of less use, and no graph is another one for it. What
cannot be read counts as not being there, and what cannot be written stays in memory.
"""

import asyncio
import os
import tempfile
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import structlog
from msgspec import Meta

from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.service import Background
from pilotlight.common.waiting import within
from pilotlight.policy.graphs.restoring import PROMPTS, used
from pilotlight.policy.ids import Digest

log = structlog.get_logger()

FOLDER = "graph-uses"
"""Within a node's state folder."""
FORMAT = 1
REMEMBERED = 64
"""Artifacts of which it is known; those that ran last stay. As many files."""
READ_S = 0.1
"""A start waits no longer for its file."""
MAX_BYTES = 16 << 10
"""Of one file."""
MOST_SIZES = 256
"""Of one artifact, which has some forty: those with the most use are kept."""
MOST_TIMES = 1 << 48

Size = Annotated[int, Meta(ge=1, lt=2 * PROMPTS)]
Times = Annotated[int, Meta(ge=1, le=MOST_TIMES)]


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file holds."""

    format: Literal[1]
    uses: Annotated[dict[Size, Times], Meta(max_length=MOST_SIZES)]


class _News(NamedTuple):
    digest: Digest
    now: Mapping[int, int]
    again: bool


class GraphUses:
    """What one worker knows of them."""

    def __init__(self, background: Background, folder: Path | None = None) -> None:
        """Nothing is read yet.

        Args:
            background: for what is written.
            folder: the node's; None: it is known for as long as the worker runs.
        """
        self._background, self._folder = background, folder
        self._known: OrderedDict[Digest, dict[int, int]] = OrderedDict()
        self._news: deque[_News] = deque()
        """What is not written yet."""
        self._turn = asyncio.Lock()
        """Of this worker, one reads or writes."""

    async def of(self, digest: Digest) -> dict[int, int]:
        """How often each size of an artifact was used. A start of one that this worker knows does
        not wait for its file: the others' latest news are worth less than a millisecond.
        """
        if self._folder is not None and digest not in self._known:
            with suppress(DeadlineExceeded):
                reading = self._read_again(self._folder, digest)
                await within(READ_S, reading, "reading how often graphs were used")
        return self._known.get(digest, {})

    def known(self, digest: Digest) -> dict[int, int] | None:
        """As ``of``; None where its file has to be read first."""
        uses = self._known.get(digest)
        return {} if uses is None and self._folder is None else uses

    def add(self, digest: Digest, now: Mapping[int, int], *, again: bool) -> None:
        """A stage of an artifact tells what it has used.

        Args:
            digest: the artifact's fingerprint.
            now: by size.
            again: it has told of some before.
        """
        news = _News(digest, now, again)
        if self._folder is None:
            self._know_of(news, None)
        else:
            self._news.append(news)
            self._background.spawn(f"uses of {digest}", self._keep(self._folder))

    async def _read_again(self, folder: Path, digest: Digest) -> None:
        await self._keep(folder)
        async with self._turn:
            found = await asyncio.to_thread(read_uses, _path(folder, digest))
            if found is not None:
                self._remember(digest, found)

    async def _keep(self, folder: Path) -> None:
        """Writes what is not written yet."""
        async with self._turn:
            while self._news:
                news = self._news.popleft()
                path = _path(folder, news.digest)
                kept = self._know_of(news, await asyncio.to_thread(read_uses, path))
                try:
                    await asyncio.to_thread(write_uses, path, kept)
                except OSError as error:
                    log.warning("uses not kept", action="graph_uses_not_kept", error=str(error))

    def _know_of(self, news: _News, found: dict[int, int] | None) -> dict[int, int]:
        """What a file says, or else is known, with the news."""
        before = self._known.get(news.digest, {}) if found is None else found
        known = used(before, news.now, again=news.again)
        self._remember(news.digest, known)
        return known

    def _remember(self, digest: Digest, uses: dict[int, int]) -> None:
        self._known[digest] = uses
        self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def read_uses(path: Path) -> dict[int, int] | None:
    """What a file says of an artifact's graphs; None: there is none, or none of use."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise msgspec.ValidationError(f"it has more than {MAX_BYTES} bytes")
        return msgspec.json.decode(data, type=_Kept).uses
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("uses ignored", action="graph_uses_ignored", path=str(path), error=str(error))
        return None


def write_uses(path: Path, uses: Mapping[int, int]) -> None:
    """Replaces a file whole, and removes those that were written longest ago if there are too many.

    Raises:
        OSError: it cannot be written.
    """
    most = sorted(((times, size) for size, times in uses.items() if times), reverse=True)
    kept = {size: min(times, MOST_TIMES) for times, size in most[:MOST_SIZES]}
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: another worker may write the same file. What a crash leaves of either is no
    # JSON, or goes with the oldest.
    descriptor, making = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(_Kept(format=FORMAT, uses=kept)))
        Path(making).replace(path)
    except BaseException:
        Path(making).unlink(missing_ok=True)
        raise
    _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Another worker may do so at the same time."""
    written: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            written.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(written)[:-REMEMBERED]:
        path.unlink(missing_ok=True)


def _path(folder: Path, digest: Digest) -> Path:
    return folder / f"{digest}.json"
