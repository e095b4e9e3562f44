"""The node's part in control: what the scheduler wants to be fetched here, and what the cache wants
to be fetched ahead or dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import BadRequest, StaleCommand
from pilotlight.common.messages.hold import Fetch, NodeHold, NodePrefetch, Peer
from pilotlight.common.messages.room import Drop, Dropped
from pilotlight.common.newest import Newest
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.link.peers import Peers
from pilotlight.dataplane.model_fetch import PartsClaim
from pilotlight.dataplane.pool import HostPool
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import Digest, Generation, InstanceId, NodeId

log = structlog.get_logger()

OrderKey = tuple[InstanceId, Generation, tuple[int, ...]]
"""An order is carried out once: one that failed is not begun again by its repetition, only by a
newer generation."""
AheadKey = tuple[Digest, Generation]
"""So is an order of the cache."""


@dataclass(slots=True, kw_only=True)
class Agent:
    """Carries out the node's commands. Level-triggered: each one is everything that is wanted."""

    node_id: NodeId
    pool: HostPool
    copies: HostCopies
    metrics: LoaderMetrics
    clock: Clock
    peers: Peers | None = None
    """Other nodes; None: this one has no links to any."""
    prefetch: bool = True
    """Orders for starts are begun as they come; else a worker's lease begins the fetch."""
    _orders: dict[OrderKey, PartsClaim] = field(default_factory=dict[OrderKey, PartsClaim])
    _ahead: dict[AheadKey, PartsClaim] = field(default_factory=dict[AheadKey, PartsClaim])
    _newest: Newest = field(default_factory=Newest)
    _newest_ahead: Newest = field(default_factory=Newest)

    async def on_hold(self, told: Timed[NodeHold]) -> None:
        """Fetch what is ordered and not here; stop fetching what no order wants any more.

        Raises:
            StaleCommand: a higher epoch has been seen, perhaps by an earlier run of this loader.
        """
        hold = told.message
        if hold.node_id != self.node_id:
            raise BadRequest(f"a command for {hold.node_id} came to {self.node_id}")
        try:
            self.pool.raise_epoch(hold.epoch)
        except StaleCommand:
            self.metrics.stale_commands.inc()
            raise
        if not self._newest.is_news(hold.node_id, str(hold.epoch), hold.seq):
            return
        wanted = {_key(fetch): fetch for fetch in hold.fetches}
        for key in [key for key in self._orders if key not in wanted]:
            self.copies.release(self._orders.pop(key))
        self._follow(hold.fetches)
        for key, fetch in wanted.items():
            if key in self._orders:
                self._orders[key].priority = fetch.priority
            elif self.prefetch or fetch.priority is not FetchPriority.COLD_START:
                self._begin(key, fetch, told.sent_s(self.clock))

    async def on_prefetch(self, told: Timed[NodePrefetch]) -> None:
        """Fetch ahead what is ordered and not here; stop what is not ordered any more, unless a
        hold wants it.
        """
        wanted = told.message
        if not self._newest_ahead.is_news(wanted.node_id, wanted.cache, wanted.seq):
            return
        orders = {(one.model.digest, one.generation): one for one in wanted.fetches}
        for key in [key for key in self._ahead if key not in orders]:
            self.copies.release(self._ahead.pop(key))
        held = {claim.model.digest for claim in self._orders.values()}
        self._follow([one for one in wanted.fetches if one.model.digest not in held])
        for key, fetch in orders.items():
            if key not in self._ahead:
                claim = self._claim(fetch, told.sent_s(self.clock))
                if claim is not None:
                    self._ahead[key] = claim

    def _follow(self, fetches: Sequence[Fetch]) -> None:
        """Ask the nodes that the orders name; those of several orders for one model one after the
        other, what matters more first.
        """
        upstreams: dict[Digest, dict[NodeId, Peer]] = {}
        for fetch in sorted(
            fetches, key=lambda fetch: fetch.priority is not FetchPriority.COLD_START
        ):
            for peer in (*upstreams.setdefault(fetch.model.digest, {}).values(), *fetch.upstreams):
                upstreams[fetch.model.digest].setdefault(peer.node_id, peer)
        if self.peers is not None:
            for digest, peers in upstreams.items():
                self.peers.follow(digest, tuple(peers.values()))

    async def on_drop(self, drop: Drop) -> Dropped:
        """Free copies, but for those that a worker may be reading and those on their way; say
        whether there is room now.
        """
        dropped = self.copies.drop(drop.digests)
        wanted = drop.wanted
        fits = wanted is None or self.pool.fits(
            wanted.digest, dict(zip(wanted.parts, wanted.part_bytes, strict=False))
        )
        if drop.digests:
            log.info(
                "copies dropped",
                action="copies_dropped",
                asked=len(drop.digests),
                dropped=len(dropped),
                fits=fits,
            )
        return Dropped(digests=dropped, fits=fits)

    def _begin(self, key: OrderKey, fetch: Fetch, since_s: float) -> None:
        claim = self._claim(fetch, since_s)
        if claim is not None:
            self._orders[key] = claim

    def _claim(self, fetch: Fetch, since_s: float) -> PartsClaim | None:
        try:
            claim = self.copies.claim(
                fetch.model,
                fetch.parts,
                fetch.instance_id,
                leased=False,
                trace_parent=fetch.trace_parent,
                since_s=since_s,
                priority=fetch.priority,
            )
        except BadRequest as error:
            log.error(
                "order refused",
                action="order_refused",
                instance_id=fetch.instance_id,
                error=error.message,
            )
            return None
        log.info(
            "order taken",
            action="order_taken",
            instance_id=fetch.instance_id,
            model=fetch.model.name,
            priority=fetch.priority.value,
            parts=len(claim.parts),
            missing=len(claim.missing),
        )
        return claim


def _key(fetch: Fetch) -> OrderKey:
    return fetch.instance_id, fetch.generation, fetch.parts
