"""Making room: plan with the eviction policy, ask the holders, grant.

One request at a time for each node, so that two grants never count on the same bytes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

import structlog

from pilotlight.cache.books import Books
from pilotlight.cache.grant_rows import GrantRows
from pilotlight.cache.grants import Grant
from pilotlight.cache.holders import Evicted, Holders
from pilotlight.cache.host_room import parts_of
from pilotlight.cache.keeper import Keeper
from pilotlight.cache.lender import Lender
from pilotlight.cache.measures import CacheMeasures
from pilotlight.cache.registrations import Registrations
from pilotlight.cache.repository import Added, CacheRepository
from pilotlight.cache.striking import Striker
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.errors import (
    BusUnavailable,
    InternalError,
    NoRoom,
    PilotlightError,
    StaleCommand,
)
from pilotlight.common.ids import new_grant_id
from pilotlight.common.messages.room import (
    GRANT_SETTLED_SUBJECT,
    GrantSettled,
    Release,
    Released,
    Reserve,
    Reserved,
)
from pilotlight.common.service import Background
from pilotlight.common.waiting import Begun, pause
from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.ids import Digest, GrantId, InstanceId, NodeId

log = structlog.get_logger()

UNPLANNED_S = 10.0
"""From a grant to the row of its instance: a scheduler that has written none by then has died, or
has not heard of the grant."""


class RoomMaker:
    """Answers ``Reserve`` and ``Release``."""

    def __init__(
        self,
        books: Books,
        repository: CacheRepository,
        registrations: Registrations,
        bus: Bus,
        clock: Clock,
        background: Background,
        rules: EvictionRules,
        lender: Lender,
        keeper: Keeper,
        measures: CacheMeasures,
    ) -> None:
        self._books = books
        self._repository = repository
        self._bus = bus
        self._clock = clock
        self._background = background
        self._holders = Holders(books, registrations, bus, clock, rules, keeper, self._end)
        self._lender = lender
        self._keeper = keeper
        self._measures = measures
        self._rows = GrantRows(repository, background)
        self._locks: dict[NodeId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.striker = Striker(books, repository, bus, clock, rules, keeper, self._locks)
        self._writing: dict[GrantId, asyncio.Task[Exception | None]] = {}
        """Grants whose rows are under way."""
        self._over: set[GrantId] = set()
        """Grants that are in no book any more, and of which there may be rows."""

    async def reserve(self, request: Reserve) -> Reserved:
        """Grant room for a stage, or promise it: the books say that it is there, and whether its
        row is, ``GrantSettled`` tells later.

        Raises:
            NoWorker: the worker or its node does not report, or the device can never hold the
                stage.
            NoRoom: what is loaded may not go.
            HostPoolFull: the host pool has no room, or can never have it.
            StaleCommand: a newer leader is known.
        """
        if request.epoch:
            is_new = request.epoch > self._books.epoch
            self._books.hear_epoch(request.epoch)
            if request.epoch < self._books.epoch:
                raise StaleCommand(f"epoch {request.epoch} is older than {self._books.epoch}")
            if is_new:
                # What its predecessor was granted and did not come to use must not be in its way.
                await self.lapse()
        async with self._locks[request.node_id]:
            known = self._books.grant_of(request.instance_id, request.worker_id)
            if known is not None and not _grows(known, request):
                await self._written(known.grant_id)
                return Reserved(grant_id=known.grant_id)
            if request.node_id in self._books.draining:
                raise NoRoom(f"node {request.node_id} is being drained", retry_after_s=1.0)
            evicted = Evicted()
            await self._holders.make_device_room(
                request, evicted, known.device_bytes if known is not None else 0
            )
            host_bytes = await self._holders.make_host_room(request, evicted)
            self._note(evicted)
            grant = Grant(
                grant_id=new_grant_id(),
                instance_id=request.instance_id,
                digest=request.digest,
                worker_id=request.worker_id,
                node_id=request.node_id,
                device_bytes=request.device_bytes,
                host_bytes=host_bytes,
                expires_s=self._clock.monotonic_s() + request.lease_s,
                epoch=request.epoch,
                generation=request.generation,
                since_s=self._clock.monotonic_s(),
                host_parts=parts_of(request),
            )
            # In the books first: while the row is written, no other grant may count on these bytes.
            self._books.grants[grant.grant_id] = grant
            # A stage that has a grant keeps that until there is a row in the place of its own.
            promised = request.promise and known is None
            writing = self._background.spawn(
                f"write {grant.grant_id}", self._write(grant, request, evicted, promised=promised)
            )
            self._writing[grant.grant_id] = writing
            if not promised:
                await self._written(grant.grant_id)
            if known is not None:
                self._books.grants.pop(known.grant_id, None)
            return Reserved(
                grant_id=grant.grant_id,
                evicted_instances=tuple(InstanceId(victim.subject) for victim in evicted.instances),
                dropped_copies=tuple(Digest(victim.subject) for victim in evicted.copies),
                written=not promised,
            )

    def _note(self, evicted: Evicted) -> None:
        now_s = self._clock.monotonic_s()
        for victim in evicted.instances:
            self._books.thrash.evicted(victim.model, victim.size_bytes, now_s)
        self._measures.evicted(Tier.DEVICE, evicted.instances)
        self._measures.evicted(Tier.HOST, evicted.copies)

    async def release(self, request: Release) -> Released:
        """Forget a grant."""
        self._books.grants.pop(request.grant_id, None)
        await self._end([request.grant_id], may_wait=True)
        return Released()

    async def lapse(self) -> None:
        """Forget grants whose stage no report shows, when their lease is over, or their instance
        is.

        The word that gives a grant back may be lost, and a grant may be made whose requester never
        hears of it. What a leader has not written down when there is a newer one, it never will.

        Raises:
            DatabaseUnavailable: rows of such grants may be left; the next call deletes them.
        """
        if self._over:
            await self._end()
        now_s, epoch = self._clock.monotonic_s(), self._books.epoch
        if all(self._books.is_held(grant) for grant in self._books.grants.values()):
            return
        orphans = await self._repository.orphans()
        # Reports that have come while the rows were read count, too: the first of a worker may show
        # what was not known.
        unheld = [grant for grant in self._books.grants.values() if not self._books.is_held(grant)]
        over: list[GrantId] = [
            grant.grant_id
            for grant in unheld
            if (grant.expires_s < now_s and self._books.would_show(grant, now_s))
            or grant.grant_id in orphans.over
            or (
                grant.grant_id in orphans.unwritten
                and (0 < grant.epoch < epoch or now_s - grant.since_s >= UNPLANNED_S)
            )
        ]
        if not over:
            return
        for grant_id in over:
            del self._books.grants[grant_id]
        log.warning("grants lapsed", action="grants_lapsed", grants=len(over))
        await self._end(over)

    async def _write(
        self, grant: Grant, request: Reserve, evicted: Evicted, *, promised: bool
    ) -> Exception | None:
        """Write a grant's row, whatever becomes of its caller; why that failed.

        Args:
            grant: Which.
            request: That it was made for.
            evicted: What went for it.
            promised: Its caller is told of that.
        """
        victims = [("instance", victim) for victim in evicted.instances]
        victims += [("copy", victim) for victim in evicted.copies]
        added = Added(grant=grant, model=request.model, lease_s=request.lease_s, evicted=victims)
        failure = None
        try:
            adding = Begun(self._rows.add(added))
            # The statement is sent before anything else is done, ...
            await pause(0.0)
            # ... and the worker gives a newcomer room by itself; this way it has begun.
            with suppress(BusUnavailable):
                await self._lender.follow(grant.worker_id)
            await adding
        except Exception as error:  # noqa: BLE001 - raised to the caller
            self._books.grants.pop(grant.grant_id, None)
            failure = error
        finally:
            del self._writing[grant.grant_id]
        if grant.grant_id not in self._books.grants:
            # Given back meanwhile; or the break came during the commit.
            self._over.add(grant.grant_id)
        if promised:
            await self._tell(grant, failure)
        return failure

    async def _tell(self, grant: Grant, failure: Exception | None) -> None:
        """Say what became of a promise; where that is lost, its requester asks again."""
        error = failure
        if error is not None and not isinstance(error, PilotlightError):
            log.error("grant not written", action="grant_not_written", exc_info=error)
            error = InternalError("the cache could not write the grant; see its log")
        settled = GrantSettled(
            grant_id=grant.grant_id,
            instance_id=grant.instance_id,
            worker_id=grant.worker_id,
            code=error.code if error is not None else "",
            message=error.message if error is not None else "",
        )
        with suppress(BusUnavailable):
            await self._bus.publish(GRANT_SETTLED_SUBJECT, settled)
            self._bus.write_now()

    async def _written(self, grant_id: GrantId) -> None:
        """Return when a grant's row is there.

        The caller may give up meanwhile: the row would have no owner if its writing ended with
        that.

        Raises:
            Exception: it could not be written.
        """
        writing = self._writing.get(grant_id)
        if writing is not None and (error := await asyncio.shield(writing)) is not None:
            raise error

    async def _end(self, grant_ids: Iterable[GrantId] = (), *, may_wait: bool = False) -> None:
        """Delete the rows of grants that are over.

        What is still being written, or cannot be deleted now, the next call takes.
        """
        self._over.update(grant_ids)
        over = [grant_id for grant_id in self._over if grant_id not in self._writing]
        await self._rows.end(over, may_wait=may_wait)
        self._over.difference_update(over)


def _grows(known: Grant, request: Reserve) -> bool:
    """A later generation of the stages asks for more than was granted: a worker that had room for
    the whole model from the beginning needs its other parts in the host pool.
    """
    more = (
        request.device_bytes > known.device_bytes or sum(request.host_part_bytes) > known.host_bytes
    )
    return request.generation > known.generation and more
