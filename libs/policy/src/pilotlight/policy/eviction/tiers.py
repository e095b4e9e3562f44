"""The eviction policies of a service: one for each tier, whose copies on all nodes are one cache.

A service hears of arrivals and of what holders report. From both it tells each tier's policy what
the simulator tells it: accesses, insertions, evictions. Equal reports give equal orders.

A model has one copy in a tier for a policy, wherever it lies and however many there are: it comes
with the first one and goes with the last. Copies of several nodes that are asked about are ordered
by their own sizes and penalties.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import HeldState, NodeFacts, Tier, WorkerFacts
from pilotlight.policy.eviction.base import EvictionCandidate, EvictionPolicy
from pilotlight.policy.eviction.choice import make_policy
from pilotlight.policy.eviction.sized import Sized

DEFAULT = "pilotlight"
"""No worse than ``iam`` where both were compared, and better in sessions (decision 81)."""
LOADED = frozenset({HeldState.READY, HeldState.DRAINING})

Candidates = Callable[[Collection[str]], Iterable[EvictionCandidate]]
"""From subjects; what comes beside them is left out."""


class _Tier:
    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.capacity_bytes = 0
        self.places: dict[str, tuple[int, Mapping[str, int]]] = {}
        """By owner: its capacity, and the sizes of what it holds by subject."""
        self.copies: dict[str, int] = {}
        """How many places hold a subject."""


class TierPolicies:
    """One owner; no clock."""

    def __init__(
        self,
        name: str = DEFAULT,
        tiers: Iterable[Tier] = (Tier.DEVICE, Tier.HOST),
        make: Callable[[str, int], EvictionPolicy] = make_policy,
    ) -> None:
        """``name``: one of ``choice.POLICIES``; ``tiers``: those that it is asked about; ``make``:
        from the name, and the capacity so far.

        Raises:
            KeyError: there is no such policy.
        """
        self.name = name
        self._tiers = {tier: _Tier(make(name, 0)) for tier in tiers}

    def of(self, tier: Tier) -> EvictionPolicy:
        """The policy of a tier."""
        return self._tiers[tier].policy

    @property
    def each(self) -> Mapping[Tier, EvictionPolicy]:
        """The policies, by tier."""
        return {tier: of.policy for tier, of in self._tiers.items()}

    def on_access(self, access: Access) -> None:
        """A model was asked for."""
        for each in self._tiers.values():
            each.policy.on_access(access)

    def hear_worker(
        self, owner: str, worker: WorkerFacts | None, candidates: Candidates, now_s: float
    ) -> None:
        """Take what a worker's device holds now.

        Args:
            owner: The worker's id.
            worker: As it reports; None: it is lost.
            candidates: Of what its device holds. Called for what is there anew.
            now_s: On the clock of the accesses.
        """
        if worker is None:
            self._follow(Tier.DEVICE, owner, 0, {}, candidates, now_s)
            return
        sizes: dict[str, int] = {
            one.instance_id: one.device_bytes for one in worker.held if one.state in LOADED
        }
        capacity_bytes = worker.device.memory_bytes
        self._follow(Tier.DEVICE, owner, capacity_bytes, sizes, candidates, now_s)

    def hear_node(
        self, owner: str, node: NodeFacts | None, candidates: Candidates, now_s: float
    ) -> None:
        """Take what a node's host pool holds now; copies on their way there are not there yet.

        Args:
            owner: The node's id.
            node: As it reports; None: it is lost.
            candidates: Of what its pool holds. Called for what is there anew.
            now_s: On the clock of the accesses.
        """
        if node is None:
            self._follow(Tier.HOST, owner, 0, {}, candidates, now_s)
            return
        coming = {one.digest for one in node.transfers}
        sizes: dict[str, int] = {
            one.digest: one.size_bytes
            for one in node.copies
            if one.tier is Tier.HOST and one.digest not in coming
        }
        self._follow(Tier.HOST, owner, node.pool_bytes, sizes, candidates, now_s)

    def cost_anew(self, tier: Tier, copies: Iterable[EvictionCandidate], now_s: float) -> None:
        """What it costs to bring copies back is known better than when they came.

        Args:
            tier: Of the copies.
            copies: Those that were not reported before are left out.
            now_s: On the clock of the accesses.
        """
        of = self._tiers[tier]
        for candidate in copies:
            if candidate.subject in of.copies:
                of.policy.on_insert(candidate, now_s)

    def _follow(
        self,
        tier: Tier,
        owner: str,
        capacity_bytes: int,
        sizes: Mapping[str, int],
        candidates: Candidates,
        now_s: float,
    ) -> None:
        """Tell a tier's policy what has changed in one place.

        1. the capacity of all places together
        2. what is in no place any more has gone
        3. what is in this place for the first time, or with another size, is there now
        """
        of = self._tiers[tier]
        before_bytes, before = of.places.get(owner, (0, {}))
        if before_bytes == capacity_bytes and before == sizes:
            return
        if capacity_bytes or sizes:
            of.places[owner] = (capacity_bytes, dict(sizes))
        else:
            of.places.pop(owner, None)
        if capacity_bytes != before_bytes:  # 1
            of.capacity_bytes += capacity_bytes - before_bytes
            if isinstance(of.policy, Sized):
                of.policy.resize(of.capacity_bytes)
        for subject in sorted(before.keys() - sizes.keys()):  # 2
            of.copies[subject] -= 1
            if not of.copies[subject]:
                del of.copies[subject]
                of.policy.on_evict(subject, now_s)
        for subject in sorted(sizes.keys() - before.keys()):
            of.copies[subject] = of.copies.get(subject, 0) + 1
        news = {subject for subject, size in sizes.items() if before.get(subject) != size}
        if news:  # 3
            for candidate in sorted(candidates(news), key=lambda one: one.subject):
                if candidate.subject in news:
                    of.policy.on_insert(candidate, now_s)
