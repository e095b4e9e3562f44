"""What the cache does for devices and host pools: policies that are told of arrivals and reports,
as the service tells them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from pilotlight.policy.arrivals import Access, RecentArrivals
from pilotlight.policy.cluster import NodeFacts, Tier, WorkerFacts, WorkerView
from pilotlight.policy.control.books import Books
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionPolicy,
    EvictionRules,
    RoomRequest,
    why_kept,
)
from pilotlight.policy.eviction.candidates import (
    CandidateFacts,
    MissFacts,
    in_pool,
    on_device,
    registered,
)
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import Digest, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model

POOL_RULES = EvictionRules(min_residency_s=0.0)
"""What has just come is under a lease while something needs it."""


class Evictions:
    """One owner; no clock."""

    def __init__(self, policy: str, pools: str, models: Mapping[ModelName, Model]) -> None:
        """``policy``: of devices, by its name in ``eviction.choice``; ``pools``: of host pools, or
        nothing; ``models``: that are registered.

        Raises:
            KeyError: there is no such policy.
        """
        self._policies = TierPolicies(policy, tiers=(Tier.DEVICE,))
        self._pools = TierPolicies(pools, tiers=(Tier.HOST,)) if pools else None
        self._models = registered(models.values())

    @property
    def policy(self) -> EvictionPolicy:
        """Of devices."""
        return self._policies.of(Tier.DEVICE)

    def hear_arrivals(self, accesses: Iterable[Access]) -> None:
        """Models were asked for."""
        for access in accesses:
            self._policies.on_access(access)
            if self._pools is not None:
                self._pools.on_access(access)

    def hear_workers(
        self,
        views: Mapping[WorkerId, WorkerView],
        nodes: Mapping[NodeId, NodeFacts],
        books: Books,
        arrivals: RecentArrivals,
        now_s: float,
    ) -> None:
        """Take what some workers report.

        Args:
            views: those workers.
            nodes: all nodes; a worker's may be unknown.
            books: the instances there are.
            arrivals: when models were asked for.
            now_s: the cluster's time.
        """
        for worker_id, view in views.items():
            facts = view.facts
            self._policies.hear_worker(
                worker_id,
                facts,
                partial(self._candidates, facts, nodes.get(facts.node_id), books, arrivals, now_s),
                now_s,
            )

    @property
    def orders_pools(self) -> bool:
        """Whether host pools have a policy."""
        return self._pools is not None

    def hear_nodes(
        self, nodes: Mapping[NodeId, NodeFacts], arrivals: RecentArrivals, now_s: float
    ) -> None:
        """Take what some nodes report of their host pools.

        Args:
            nodes: those nodes.
            arrivals: when models were asked for.
            now_s: the cluster's time.
        """
        if self._pools is not None:
            for node_id, node in nodes.items():
                copies = partial(self._in_pool, node, arrivals, now_s)
                self._pools.hear_node(node_id, node, copies, now_s)

    def pool_order(
        self, node: NodeFacts, arrivals: RecentArrivals, now_s: float
    ) -> tuple[Digest, ...]:
        """Copies in a node's host pool that may go, the least worth first.

        Args:
            node: as it is now.
            arrivals: when models were asked for.
            now_s: the cluster's time.
        """
        assert self._pools is not None, "nothing orders host pools"
        request = RoomRequest(need_bytes=node.pool_bytes, free_bytes=0, now_s=now_s)
        may_go = [
            one
            for one in self._in_pool(node, arrivals, now_s)
            if why_kept(one, request, POOL_RULES) is None
        ]
        return tuple(one.digest for one in self._pools.of(Tier.HOST).ordered(may_go, now_s))

    def _in_pool(
        self,
        node: NodeFacts,
        arrivals: RecentArrivals,
        now_s: float,
        among: Collection[str] | None = None,
    ) -> tuple[EvictionCandidate, ...]:
        """Copies of a node; ``among``: of these subjects, if only they are asked for."""
        if among is not None:
            copies = tuple(one for one in node.copies if one.digest in among)
            node = replace(node, copies=copies)
        misses = MissFacts(arrivals=arrivals)
        return in_pool(node, CandidateFacts(now_s=now_s, models=self._models, misses=misses))

    def _candidates(
        self,
        worker: WorkerFacts,
        node: NodeFacts | None,
        books: Books,
        arrivals: RecentArrivals,
        now_s: float,
        among: Collection[str],
    ) -> Iterable[EvictionCandidate]:
        held = tuple(one for one in worker.held if one.instance_id in among)
        records = ((one.instance_id, books.get(one.instance_id)) for one in held)
        known = CandidateFacts(
            now_s=now_s,
            models=self._models,
            since_s={
                instance_id: record.instance.state_since_s
                for instance_id, record in records
                if record is not None
            },
            misses=MissFacts(arrivals=arrivals),
        )
        return on_device(replace(worker, held=held), node, known)
