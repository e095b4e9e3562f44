"""What the cache does for devices: a policy that is told of arrivals and reports, as the service
tells it.
"""

from collections.abc import Iterable, Mapping
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
            views: Of workers whose reports have changed.
            nodes: All nodes.
            books: All instances.
            arrivals: As they are known now.
            now_s: On the clock of the arrivals.
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
    ) -> Iterable[EvictionCandidate]:
        records = ((one.instance_id, books.get(one.instance_id)) for one in worker.held)
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
        return on_device(worker, node, known)
