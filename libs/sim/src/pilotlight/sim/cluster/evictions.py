"""What the cache does for devices: a policy that is told of arrivals and reports, as the service
tells it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from pilotlight.policy.arrivals import Access, RecentArrivals
from pilotlight.policy.cluster import NodeFacts, Tier, WorkerFacts, WorkerView
from pilotlight.policy.control.books import Books
from pilotlight.policy.eviction.base import EvictionCandidate, EvictionPolicy
from pilotlight.policy.eviction.candidates import CandidateFacts, MissFacts, on_device, registered
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model


class Evictions:
    """One owner; no clock."""

    def __init__(self, policy: str, models: Mapping[ModelName, Model]) -> None:
        """``policy``: by its name in ``eviction.choice``; ``models``: that are registered.

        Raises:
            KeyError: there is no such policy.
        """
        self._policies = TierPolicies(policy, tiers=(Tier.DEVICE,))
        self._models = registered(models.values())

    @property
    def policy(self) -> EvictionPolicy:
        """Of devices."""
        return self._policies.of(Tier.DEVICE)

    def hear_arrivals(self, accesses: Iterable[Access]) -> None:
        """Models were asked for."""
        for access in accesses:
            self._policies.on_access(access)

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
