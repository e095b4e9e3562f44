"""What this node can give to others: chunks that are in its host pool, and those that are on their
way there.
"""

import os
from dataclasses import dataclass, field

import structlog

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest_of, unit_digests
from pilotlight.common.clock import Clock
from pilotlight.common.messages.link import Ask
from pilotlight.common.waiting import Signal
from pilotlight.dataplane.chunk_fill import VerifiedPrefix
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.held import HeldChunk
from pilotlight.dataplane.origin import NotHere
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.ids import Digest

log = structlog.get_logger()

GRACE_S = 1.0
"""How long after the first request for a model this node may yet be told to fetch it: the receiver
may have heard of it first."""
ASKED_ANEW_S = 30.0
"""After so long without a question, the next one is a first again."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A chunk that is being given. Its bytes stay where they are until its ticket is let go of."""

    held: HeldChunk
    descriptor: int
    file_offset: int
    digest: Digest
    """The chunk's, as the receiver knows it."""

    @property
    def size_bytes(self) -> int:
        """Of the whole chunk."""
        return self.held.size_bytes

    @property
    def needs_units(self) -> bool:
        """Whether ``learn_units`` must run first."""
        return self.held.fill is None and self.held.index not in self.held.image.units

    def learn_units(self) -> None:
        """Compute the digests of the chunk's units; blocks for some milliseconds.

        Raises:
            NotHere: the bytes are not what was recorded: memory of this host fails, and no other
                node should have them.
        """
        units: list[bytes] = []
        for start in range(0, self.size_bytes, UNIT_BYTES):
            size_bytes = min(UNIT_BYTES, self.size_bytes - start)
            units.extend(
                unit_digests(os.pread(self.descriptor, size_bytes, self.file_offset + start))
            )
        if chunk_digest_of(units) != self.digest:
            image = self.held.image
            log.error(
                "chunk in the pool is damaged",
                action="pool_chunk_damaged",
                digest=image.digest,
                part=image.part,
            )
            raise NotHere
        self.held.image.units[self.held.index] = tuple(units)

    def prefix(self) -> VerifiedPrefix:
        """What of it may be sent at this moment; any thread."""
        fill = self.held.fill
        prefix = (
            fill.prefix
            if fill is not None
            else VerifiedPrefix(self.held.image.units.get(self.held.index), self.size_bytes)
        )
        if prefix.units is None:
            # A receiver of bytes without their digests could neither verify nor pass on anything
            # before the end.
            return VerifiedPrefix(None, 0, prefix.is_lost)
        if (
            fill is not None
            and fill.digest != self.digest
            and chunk_digest_of(prefix.units) != self.digest
        ):
            return VerifiedPrefix(None, 0, is_lost=True)
        return prefix


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's claim on a chunk. Only the event loop of the pool touches it."""

    offer: Offer | None = None
    is_over: bool = False


@dataclass(slots=True, kw_only=True)
class Offers:
    """Finds chunks for others. For the event loop of the pool alone."""

    pool: HostPool
    copies: HostCopies
    moved: Signal
    clock: Clock
    _asked_s: dict[Digest, tuple[float, float]] = field(
        default_factory=dict[Digest, tuple[float, float]]
    )
    """When each model that is not here was asked for, first and last."""

    async def find(self, ask: Ask, ticket: Ticket) -> Offer:
        """The chunk, as soon as it has begun to come.

        It is pinned until ``let_go`` is called with the ticket.

        Raises:
            NotHere: it is not here, and not expected.
        """
        if ask.digest is None:
            raise ValueError("nothing can be offered without a digest")
        while not ticket.is_over:
            held = self.copies.held(ask.model, ask.part, ask.chunk)
            if held is not None:
                if (
                    held.digest not in (None, ask.digest)
                    or not 0 <= ask.from_byte <= held.size_bytes
                ):
                    raise NotHere
                self.pool.pin(held.image)
                file_offset = self.pool.file_offset(held.image) + held.image_offset
                ticket.offer = Offer(held, self.pool.descriptor, file_offset, ask.digest)
                return ticket.offer
            await self._until_moved(ask)
        raise NotHere

    async def until_whole(self, ask: Ask, ticket: Ticket) -> None:
        """Return when all of the part is here.

        Raises:
            NotHere: it is not here, and not expected.
        """
        while not ticket.is_over:
            if self.copies.is_whole(ask.model, ask.part):
                return
            await self._until_moved(ask)

    def let_go(self, ticket: Ticket) -> None:
        """The request is over."""
        if not ticket.is_over and ticket.offer is not None:
            self.pool.unpin(ticket.offer.held.image)
        ticket.is_over = True

    async def _until_moved(self, ask: Ask) -> None:
        if self.copies.is_expected(ask.model, ask.part):
            self._asked_s.pop(ask.model, None)
            await self.moved.wait()
            return
        left_s = self._grace_left_s(ask.model)
        if left_s <= 0:
            raise NotHere
        await self.moved.wait(left_s)

    def _grace_left_s(self, model: Digest) -> float:
        now_s = self.clock.monotonic_s()
        self._asked_s = {
            one: asked for one, asked in self._asked_s.items() if now_s - asked[1] < ASKED_ANEW_S
        }
        first_s, _ = self._asked_s.get(model, (now_s, now_s))
        self._asked_s[model] = first_s, now_s
        return first_s + GRACE_S - now_s
