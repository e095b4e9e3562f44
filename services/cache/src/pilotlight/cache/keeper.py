"""Keeps a copy of every model in some memory, and one where a model may soon start once more: tells
loaders what to fetch ahead.

Level-triggered: a loader is told all that it is to fetch ahead, again until reports show it. What a
cache before this one told goes on until then; a copy that was lost while no cache listened is known
from the bucket ``copies``.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import structlog

from pilotlight.cache.books import Books
from pilotlight.cache.forecasts import Forecasts
from pilotlight.cache.settings import HostCopies
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.messages.hold import Fetch, NodePrefetch, Peer, prefetch_subject
from pilotlight.policy.cluster import FetchPriority, NodeFacts, Tier
from pilotlight.policy.host_copies import (
    HostCopyFacts,
    HostCopyPlan,
    HostCopyRules,
    Prefetch,
    plan_host_copies,
)
from pilotlight.policy.ids import Digest, Generation, InstanceId, NodeId

log = structlog.get_logger()

INTERVAL_S = 2.0
REPEAT_S = 10.0
"""Until an order that reports do not show is told again."""
LEARN_S = 5.0
"""Listened for so long, every live node has reported: before, nothing is missing for sure."""
START_WITHIN_S = 30.0
"""An order that no report shows by then came to nothing there."""
REFUSED_S = 60.0
"""Until it may be tried there again."""
MOVE_WITHIN_S = 60.0
"""How long a node that drains waits for copies that are being fetched elsewhere."""


@dataclass(frozen=True, slots=True)
class _Order:
    prefetch: Prefetch
    attempt: int
    since_s: float
    """When it was told first, or its transfer shown last."""


@dataclass(frozen=True, slots=True)
class _Told:
    fetches: tuple[Fetch, ...]
    at_s: float


class Keeper:
    """Owns what is fetched ahead; ``Books`` has all that follows from."""

    def __init__(
        self,
        books: Books,
        bus: Bus,
        clock: Clock,
        incarnation: str,
        mode: HostCopies,
        forecasts: Forecasts,
    ) -> None:
        """Has told no loader anything.

        Args:
            books: reports, registrations, arrivals.
            bus: to loaders.
            clock: for repetitions.
            incarnation: of this process.
            mode: of which models a copy is kept.
            forecasts: which of them may soon need another.
        """
        self._books = books
        self._bus = bus
        self._clock = clock
        self._incarnation = incarnation
        self._mode = mode
        self._forecasts = forecasts
        self._rules = HostCopyRules()
        self._had: set[Digest] = set()
        """Checkpoints of which there was a copy in memory."""
        self._orders: dict[Digest, _Order] = {}
        self._attempts: dict[Digest, int] = {}
        self._refused_s: dict[tuple[NodeId, Digest], float] = {}
        """Until when."""
        self._draining_since_s: dict[NodeId, float] = {}
        self._told: dict[NodeId, _Told] = {}
        self._seq = 0
        self._next_s = 0.0
        self.plan = HostCopyPlan()
        """The last one."""

    def had(self, digest: Digest, tier: Tier) -> None:
        """Take note that there is, or was, a copy in memory."""
        if tier in (Tier.HOST, Tier.DEVICE):
            self._had.add(digest)

    def keeps(self, node_id: NodeId) -> Collection[Digest]:
        """Copies of a node that drains which are being fetched elsewhere: it keeps them for a
        while.
        """
        since_s = self._draining_since_s.get(node_id)
        if since_s is None or self._clock.monotonic_s() - since_s >= MOVE_WITHIN_S:
            return ()
        return {*self._orders, *self.plan.waiting}

    def let_go(self, digests: Iterable[Digest]) -> None:
        """Copies have gone because nobody asked for them for long: none is missed."""
        self._had.difference_update(digests)

    @property
    def misses_idle(self) -> bool:
        """Whether a copy that goes for its age alone would be fetched again."""
        return self._mode is HostCopies.ALL

    def gives_way(self, node_id: NodeId) -> Collection[Digest]:
        """Copies of a node that are one too many, and in the way of a model that has none."""
        return tuple(digest for where, digest in self.plan.giving_way if where == node_id)

    def soon(self) -> None:
        """A node has come or is dead: the next ``follow`` decides anew. A copy that was lost is on
        its way to a new node before any worker there is up.
        """
        self._next_s = 0.0

    async def follow(self) -> None:
        """Decide anew every ``INTERVAL_S``, when a node is to drain and after ``soon``; tell
        loaders what is another order than before.

        Raises:
            BusUnavailable: some loaders are told with the next call.
        """
        now_s = self._clock.monotonic_s()
        registered = self._books.models.by_digest
        self._had.update(self._books.pool.in_memory)
        self._had.intersection_update(registered)
        draining = self._books.draining
        is_early = now_s < self._next_s and draining == self._draining_since_s.keys()
        self._draining_since_s = {
            node_id: self._draining_since_s.get(node_id, now_s) for node_id in draining
        }
        if self._mode is HostCopies.OFF or now_s - self._books.listening_since_s < LEARN_S:
            return
        if is_early:
            # What was one too many then may be the last one by now.
            self.plan = replace(self.plan, giving_way=())
            return
        self._next_s = now_s + INTERVAL_S
        self._judge(now_s)
        self.plan = plan_host_copies(self._facts(now_s), self._books.pool, self._rules)
        before, self._orders = self._orders, {}
        for prefetch in self.plan.prefetches:
            digest = prefetch.model.digest
            known = before.get(digest)
            if known is not None and known.prefetch.node_id == prefetch.node_id:
                self._orders[digest] = known
                continue
            attempt = self._attempts[digest] = self._attempts.get(digest, 0) + 1
            self._orders[digest] = _Order(prefetch, attempt, now_s)
            log.info(
                "a copy is fetched ahead",
                action="copy_fetched_ahead",
                model=prefetch.model.name,
                node_id=prefetch.node_id,
            )
        nodes = {one.prefetch.node_id for one in self._orders.values()}
        for node_id in sorted(nodes | self._told.keys()):
            await self._tell(node_id, now_s)

    async def yield_room(self, node_id: NodeId) -> bool:
        """A start finds no room in a host pool: nothing is fetched ahead there for a while. Whether
        anything was.

        Raises:
            BusUnavailable: the loader is told with the next ``follow``.
        """
        now_s = self._clock.monotonic_s()
        here = [
            digest for digest, order in self._orders.items() if order.prefetch.node_id == node_id
        ]
        for digest in here:
            del self._orders[digest]
            self._refused_s[node_id, digest] = now_s + REFUSED_S
        if here:
            await self._tell(node_id, now_s)
        return bool(here)

    def _judge(self, now_s: float) -> None:
        """Give up orders that come to nothing where they are."""
        self._refused_s = {key: until for key, until in self._refused_s.items() if until > now_s}
        for digest, order in list(self._orders.items()):
            node = self._books.node(order.prefetch.node_id)
            if node is not None and any(one.digest == digest for one in node.transfers):
                self._orders[digest] = replace(order, since_s=now_s)
            elif now_s - order.since_s >= START_WITHIN_S:
                del self._orders[digest]
                self._refused_s[order.prefetch.node_id, digest] = now_s + REFUSED_S

    def _facts(self, now_s: float) -> HostCopyFacts:
        models = tuple(
            model
            for model in self._books.models.by_name.values()
            if model.keep_host_copy and (self._mode is HostCopies.ALL or model.digest in self._had)
        )
        return HostCopyFacts(
            now_s=now_s,
            models=models,
            nodes=self._nodes(),
            leaving=self._books.draining,
            going={digest: order.prefetch.node_id for digest, order in self._orders.items()},
            refused=frozenset(self._refused_s),
            arrivals=self._books.arrivals.recent(),
            next_on=self._forecasts.next_on(now_s),
            needed=self._needed(),
            gone=self._books.dropped,
        )

    def _needed(self) -> frozenset[tuple[NodeId, Digest]]:
        """Copies that give way to none: those that starts wait for, and pinned ones."""
        models = self._books.models
        pinned = {models.by_name[name].digest for name in models.pinned}
        return self._books.awaited | {
            (node.node_id, one.digest)
            for node in self._books.roster.nodes.values()
            for one in node.copies
            if one.digest in pinned
        }

    def _nodes(self) -> dict[NodeId, NodeFacts]:
        """Nodes with what is not promised to a start."""
        return {
            node_id: replace(node, pool_free_bytes=self._books.host_free_bytes(node))
            for node_id, node in self._books.roster.nodes.items()
        }

    async def _tell(self, node_id: NodeId, now_s: float) -> None:
        fetches = tuple(
            self._fetch(order)
            for order in self._orders.values()
            if order.prefetch.node_id == node_id
        )
        told = self._told.get(node_id)
        if told is not None and told.fetches == fetches and now_s - told.at_s < REPEAT_S:
            return
        if not fetches and (told is None or not told.fetches):
            self._told.pop(node_id, None)
            return
        self._seq += 1
        await self._bus.publish(
            prefetch_subject(node_id),
            NodePrefetch(node_id=node_id, cache=self._incarnation, fetches=fetches, seq=self._seq),
        )
        self._told[node_id] = _Told(fetches, now_s)

    def _fetch(self, order: _Order) -> Fetch:
        found = (self._books.node(one) for one in order.prefetch.upstreams)
        model = order.prefetch.model
        return Fetch(
            instance_id=InstanceId(""),
            generation=Generation(order.attempt),
            model=model,
            parts=tuple(range(len(model.spec.part_bytes))),
            priority=FetchPriority.PREFETCH,
            upstreams=tuple(
                Peer(node_id=one.node_id, host=one.dataplane_host, port=one.dataplane_port)
                for one in found
                if one is not None
            ),
        )
