"""Copies in host pools that go though no start asks for their room."""

import asyncio
from collections import defaultdict
from collections.abc import Collection

import structlog

from pilotlight.cache.books import Books
from pilotlight.cache.holders import HOLDER_DEADLINE_S
from pilotlight.cache.keeper import Keeper
from pilotlight.cache.repository import CacheRepository
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.errors import BusUnavailable, DeadlineExceeded
from pilotlight.common.messages.room import Drop, Dropped, drop_subject
from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import EvictionRules, RoomRequest, why_kept
from pilotlight.policy.ids import Digest, ModelName, NodeId

log = structlog.get_logger()

DRAINED = "its node is being drained"
SPARE = "it was one too many, and a model without any had no room"
EXPIRED = "it was not used for as long as the policy keeps it"


class Striker:
    """Asks loaders. Each time all that is to go is found anew; what a loader refuses is asked for
    again.

    1. on a node that drains: what no instance there needs, and is not being moved
    2. elsewhere: what is one too many, and in the way of a model without any (``host_copies``)
    3. and what was not used for as long as the policy keeps it (``EvictionPolicy.expired``), but
       where it would be fetched again
    """

    def __init__(
        self,
        books: Books,
        repository: CacheRepository,
        bus: Bus,
        clock: Clock,
        rules: EvictionRules,
        keeper: Keeper,
        locks: defaultdict[NodeId, asyncio.Lock],
    ) -> None:
        """Has asked nobody.

        Args:
            books: What lies where.
            repository: Records what has gone.
            bus: To loaders.
            clock: For ages.
            rules: What may stay whatever is said of it.
            keeper: Knows what is one too many, and what is being moved.
            locks: One for each node: nothing is granted there meanwhile.
        """
        self._books = books
        self._repository = repository
        self._bus = bus
        self._clock = clock
        self._rules = rules
        self._keeper = keeper
        self._locks = locks

    async def follow(self) -> None:
        """Have go what is to go now.

        Raises:
            DatabaseUnavailable: copies went that are not recorded.
        """
        spares = {
            (node_id, digest): self._is_elsewhere(node_id, digest)
            for node_id in self._books.roster.nodes
            for digest in self._keeper.gives_way(node_id)
        }
        for node_id in sorted(self._books.draining):  # 1
            async with self._locks[node_id]:
                digests = self._books.strikable(node_id, self._keeper.keeps(node_id))
                await self._strike(node_id, DRAINED, digests)
        now_s, old = self._clock.monotonic_s(), self._old()
        for node_id in sorted(self._books.roster.nodes.keys() - self._books.draining):
            spare = self._keeper.gives_way(node_id)
            if not spare and not old:
                continue
            async with self._locks[node_id]:
                # What was one of two may have become the last one while others were asked.
                spare = [
                    one
                    for one in spare
                    if not spares.get((node_id, one)) or self._is_elsewhere(node_id, one)
                ]
                await self._strike(node_id, SPARE, self._free_to_go(node_id, spare, now_s))  # 2
                idle = self._free_to_go(node_id, old, now_s)
                self._keeper.let_go(await self._strike(node_id, EXPIRED, idle))  # 3

    def _is_elsewhere(self, node_id: NodeId, digest: Digest) -> bool:
        """Whether another node that stays has all of a model in its pool."""
        known = self._books.models.by_digest.get(digest)
        if not known:
            return False
        others = self._books.pool.whole_on(digest, known[0].spec, (Tier.HOST,)) - {node_id}
        return any(
            one not in self._books.draining and (one, digest) not in self._books.dropped
            for one in others
        )

    def _old(self) -> Collection[str]:
        if self._keeper.misses_idle:
            return ()
        return frozenset(self._books.policies.of(Tier.HOST).expired(self._clock.monotonic_s()))

    def _free_to_go(
        self, node_id: NodeId, digests: Collection[str], now_s: float
    ) -> tuple[Digest, ...]:
        """Of some copies, those that nothing keeps there, and no start waits for."""
        node = self._books.node(node_id)
        if node is None or not digests:
            return ()
        awaited = {digest for owner, digest in self._books.awaited if owner == node_id}
        coming = {one.digest for one in node.transfers}
        asked = RoomRequest(
            need_bytes=0, free_bytes=0, now_s=now_s, protected=frozenset(awaited | coming)
        )
        return tuple(
            one.digest
            for one in self._books.in_pool(node, now_s)
            if one.subject in digests and why_kept(one, asked, self._rules) is None
        )

    async def _strike(
        self, node_id: NodeId, reason: str, digests: tuple[Digest, ...]
    ) -> tuple[Digest, ...]:
        """Those of some copies that have gone."""
        if not digests:
            return ()
        message = Drop(digests=digests)
        try:
            reply = await self._bus.request(
                drop_subject(node_id), message, Dropped, deadline_s=HOLDER_DEADLINE_S
            )
        except (BusUnavailable, DeadlineExceeded) as error:
            log.warning(
                "copies are struck later",
                action="strike_deferred",
                node_id=node_id,
                error=error.message,
            )
            return ()
        self._books.drop(node_id, reply.digests)
        if reply.digests:
            copies = len(reply.digests)
            log.info(
                "copies struck",
                action="copies_struck",
                node_id=node_id,
                copies=copies,
                reason=reason,
            )
            of = self._books.models.by_digest
            names = {one: of[one][0].name if one in of else ModelName("") for one in reply.digests}
            await self._repository.add_struck(node_id, reason, names)
        return reply.digests
