"""One chunk's way from its origins: the nearest that has it, then the next.

::

    disk    [unit 0][unit 1]x  wrong, broken or stalled: set aside, the next goes on
    peer                    [unit 2][un]x
    source                          [unit 2][unit 3]...    only when there is no origin left has the fetch failed
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.common.clock import Clock
from pilotlight.common.errors import CorruptChunk, HostPoolFull, PilotlightError, SourceUnavailable
from pilotlight.common.waiting import Backoff, pause
from pilotlight.dataplane.chunk_fill import ChunkFill, MixedBytes, WrongBytes
from pilotlight.dataplane.lanes import Lanes
from pilotlight.dataplane.origin import Nearby, NotHere, Origin, RecordedNow
from pilotlight.dataplane.priority_semaphore import Recalled
from pilotlight.dataplane.readers import Reading
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.model import Model

log = structlog.get_logger()

DISTRUST_S = 600.0
"""How long a node or a disk that gave wrong bytes is not asked. A model's own source is asked again
by the next fetch."""

RECORD_TRIES = 6
_RECORD_BACKOFF = Backoff(first_s=0.05, limit_s=0.5)
"""A node that has read a part first says so while it is recording its digests."""


class OriginObserver(Protocol):
    """Hears what comes from where. Calls come within the event loop and must not block."""

    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None:
        """An origin gave ``size_bytes`` of a chunk that was found to be right."""
        ...

    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None:
        """A fetch set an origin aside, for the error with this code; ``corrupt_chunk``: it lies."""
        ...


class Distrusted:
    """Origins that gave wrong bytes, and are not asked for a while."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def add(self, name: str) -> None:
        """Ask it for nothing until ``DISTRUST_S`` from now."""
        self._until_s[name] = self._clock.monotonic_s() + DISTRUST_S

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are not asked at this moment."""
        now_s = self._clock.monotonic_s()
        self._until_s = {
            name: until_s for name, until_s in self._until_s.items() if now_s < until_s
        }
        return tuple(sorted(self._until_s))

    def __contains__(self, name: str) -> bool:
        return self._clock.monotonic_s() < self._until_s.get(name, 0.0)


@dataclass(slots=True, kw_only=True)
class ChunkFetch:
    """What the chunks of one fetch have in common: its origins, and which of them are set aside."""

    model: Model
    manifest: Manifest
    source: Origin
    """The model's own, asked when nothing nearer is left."""
    nearby: Sequence[Nearby]
    lanes: Lanes
    distrusted: Distrusted
    reading: Reading
    rank: Callable[[int], tuple[int, ...]]
    """How much a part matters, as ``Rank``."""
    observer: OriginObserver
    relearn: Callable[[], Awaitable[Manifest]]
    """Gets the manifest with every digest that is recorded by now."""
    _are_recorded: bool = True
    """Whether digests are recorded soon after a node has read a part. Those of a source that is
    checked as a whole are not."""
    _aside: dict[str, PilotlightError] = field(default_factory=dict[str, PilotlightError])

    async def fetch(self, part: int, index: int, fill: ChunkFill) -> OriginKind:
        """Fill one chunk of a part: whole and, where its digest is recorded, verified.

        What its last bytes came from.

        Raises:
            PilotlightError: no origin can give it: what the model's own source says, if it was
                asked.
            HostPoolFull: there is no memory for it.
        """
        chunk = self.manifest.parts[part].chunks[index]
        missing: set[str] = set()
        asked: dict[str, OriginKind] = {}
        while (origin := self._best(fill, missing)) is not None:
            asked[origin.name] = origin.kind
            try:
                await self._try(origin, (part, index), chunk, fill)
            except Recalled:
                continue
            except NotHere:
                missing.add(origin.name)
            except RecordedNow:
                self._are_recorded = await self._learn(part, index, fill)
            except MixedBytes as error:
                log.warning(
                    "chunk is read again",
                    action="chunk_mixed",
                    model=self.model.name,
                    part=part,
                    error=str(error),
                )
            except WrongBytes as error:
                where = f"part {part}, bytes [{chunk.image_offset}, {chunk.image_offset + chunk.size_bytes})"
                self._set_aside(origin, CorruptChunk(f"{origin.name}: {where}: {error}"))
            except HostPoolFull:
                raise
            except PilotlightError as error:
                if not isinstance(error, SourceUnavailable):
                    fill.restart()
                self._set_aside(origin, error)
            else:
                if fill.is_whole:
                    for name, size_bytes in fill.shares.items():
                        self.observer.on_chunk(asked[name], name, size_bytes)
                    return origin.kind
                self._set_aside(
                    origin,
                    SourceUnavailable(f"{origin.name} ended a chunk {fill.left_bytes} bytes early"),
                )
        raise self._failure(part)

    def _best(self, fill: ChunkFill, missing: set[str]) -> Origin | None:
        """The nearest origin that may still have the chunk."""
        nearer = [
            origin for nearby in self.nearby for origin in nearby.origins(self.model, self.manifest)
        ]
        for origin in (*nearer, self.source):
            usable = (
                origin.name not in self._aside
                and origin.name not in missing
                and origin.name not in self.distrusted
            )
            may_learn = origin.kind is OriginKind.PEER and self._are_recorded
            if usable and (origin.trusted or fill.digest is not None or may_learn):
                return origin
        return None

    async def _learn(self, part: int, index: int, fill: ChunkFill) -> bool:
        """Find the digest that another node has just recorded; whether it has."""
        rng = random.Random()
        for attempt in range(RECORD_TRIES):
            self.manifest = await self.relearn()
            digest = self.manifest.parts[part].chunks[index].digest
            if digest is not None:
                fill.digest = digest
                return True
            await pause(_RECORD_BACKOFF.delay_s(attempt, rng))
        return False

    async def _try(
        self, origin: Origin, place: tuple[int, int], chunk: Chunk, fill: ChunkFill
    ) -> None:
        """Read it from one origin.

        Its rank is how much the part matters, then what the fetch has had of the link: of two cold
        starts the later one, whose first parts are missing, does not hold up the other one's last.
        """
        recalled, lane = asyncio.Event(), self.lanes.of(origin)
        with lane.turns.of(self.reading) as turn:

            def rank() -> tuple[int, ...]:
                return (*self.rank(place[0]), turn.had_bytes, *place)

            async with lane.permit(fill.left_bytes, rank, recalled, turn) as progress:
                work = fill.begin(origin.name, progress, trusted=origin.trusted)
                try:
                    what = f"part {place[0]} of {self.model.name} from {origin.name}"
                    await self.reading.run(
                        what, lambda _: origin.read(place[0], chunk, work), progress, rank, recalled
                    )
                finally:
                    work.revoke()

    def _set_aside(self, origin: Origin, error: PilotlightError) -> None:
        if origin.name in self._aside:
            return
        self._aside[origin.name] = error
        lies = isinstance(error, CorruptChunk)
        if lies and not origin.trusted:
            self.distrusted.add(origin.name)
        if isinstance(error, SourceUnavailable):
            self.lanes.of(origin).broke()
        log.warning(
            "origin lies" if lies else "origin set aside",
            action="origin_lies" if lies else "origin_set_aside",
            model=self.model.name,
            kind=origin.kind,
            origin=origin.name,
            code=error.code,
            error=error.message,
        )
        self.observer.on_origin_failed(origin.kind, origin.name, error.code)

    def _failure(self, part: int) -> PilotlightError:
        if self.source.name in self._aside:
            return self._aside[self.source.name]
        if self._aside:
            return list(self._aside.values())[-1]
        return SourceUnavailable(f"nobody has part {part} of {self.model.name}")
