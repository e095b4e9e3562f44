"""The cache's books: what lies where by the last reports, what is granted but not there yet.

No I/O.

Reports are the truth of what is held; a grant counts until a report shows its stage. What a worker
has just given up is left out at once, before its next report says so, and so is its grant, which
its scheduler releases later.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.cache.grants import Grant, Grants
from pilotlight.cache.host_room import HostNeed, missing_bytes
from pilotlight.common.roster import News, Roster
from pilotlight.policy.arrivals import Access, ArrivalCount, ArrivalWindows, CounterLife
from pilotlight.policy.cluster import (
    RESIDENT,
    Copy,
    HeldStage,
    HeldState,
    Liveness,
    NodeFacts,
    Tier,
    WorkerFacts,
)
from pilotlight.policy.drain import copies_to_strike
from pilotlight.policy.estimates import differ_much
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.candidates import (
    CandidateFacts,
    MissFacts,
    Registered,
    in_pool,
    on_device,
)
from pilotlight.policy.eviction.thrash import Thrash, ThrashWatch
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import (
    Digest,
    Epoch,
    GrantId,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.liveness import DEAD_AFTER_S
from pilotlight.policy.plan import Estimate, Estimates
from pilotlight.policy.pool import ParameterPool


@dataclass(slots=True)
class Books:
    """Mutable view of the parameter pool; one writer, the cache's own loop."""

    roster: Roster = field(default_factory=Roster)
    models: Registered = field(default_factory=Registered)
    estimates: Estimates = field(default_factory=dict[ModelName, "tuple[Estimate, ...]"])
    arrivals: ArrivalWindows = field(default_factory=lambda: ArrivalWindows(0.0))
    policies: TierPolicies = field(default_factory=TierPolicies)
    """With what they have been told of accesses, and of what came and went."""
    pool: ParameterPool = field(default_factory=ParameterPool)
    thrash: ThrashWatch = field(default_factory=ThrashWatch)
    thrashing: list[Thrash] = field(default_factory=list[Thrash])
    """Found, and not told yet."""
    grants: Grants = field(default_factory=Grants)
    draining: frozenset[NodeId] = frozenset()
    """Nodes that an operator wants to be empty: nothing is granted there, and copies that are not
    needed are struck."""
    epoch: Epoch = field(default=Epoch(0))
    """The highest that is known, from the lease, from reports or from a leader's request."""
    listening_since_s: float = float("-inf")
    _given_up: set[tuple[WorkerId, InstanceId]] = field(
        default_factory=set[tuple[WorkerId, InstanceId]]
    )
    _dropped: set[tuple[NodeId, Digest]] = field(default_factory=set[tuple[NodeId, Digest]])
    _first_seen_s: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """By worker or node, then by instance (that had been loaded) or digest."""

    def listen(self, now_s: float) -> None:
        """Nothing was heard before now."""
        self.listening_since_s = now_s
        self.arrivals = ArrivalWindows(now_s)

    def hear_arrivals(
        self, life: CounterLife, counts: Iterable[ArrivalCount], now_s: float
    ) -> tuple[Access, ...]:
        """Take what a gateway tells of arrivals; those that are new."""
        accesses = self.arrivals.hear(life, counts, now_s, self.roster.listened_s(now_s))
        for access in accesses:
            self.policies.on_access(access)
        return accesses

    def hear_estimates(self, estimates: Estimates, now_s: float) -> None:
        """Take what was learned of cold starts. Where a usual model's differ much from before,
        policies are told of all copies anew: those that stay are compared with those that come.
        """
        before, self.estimates = self.estimates, estimates
        if not differ_much(before, estimates):
            return
        for worker_id in self.roster.workers:
            facts = self.worker(worker_id)
            if facts is not None:
                self.policies.cost_anew(Tier.DEVICE, self.on_device(facts, now_s), now_s)
        for node_id in self.roster.nodes:
            node = self.node(node_id)
            if node is not None:
                self.policies.cost_anew(Tier.HOST, self.in_pool(node, now_s), now_s)

    def hear_epoch(self, epoch: Epoch) -> None:
        """Take note of a leader."""
        self.epoch = max(self.epoch, epoch)

    def follow(self, news: News, now_s: float) -> None:
        """Take what the roster has heard."""
        for worker_id in news.workers:
            view = self.roster.worker(worker_id)
            stages = (
                [one for one in view.facts.held if one.state in RESIDENT]
                if view is not None
                else []
            )
            held = {one.instance_id for one in stages}
            # The minimum residency is for use: it begins when a stage can be used.
            loaded = [one for one in stages if one.state is not HeldState.LOADING]
            self._watch_loads(worker_id, loaded, now_s)
            self._see(worker_id, [one.instance_id for one in loaded], now_s)
            # A report that was under way when it gave a stage up may still show it; one that does
            # not was made after.
            self._given_up = {
                (owner, one) for owner, one in self._given_up if owner != worker_id or one in held
            }
            self._tell_of_worker(worker_id, now_s)
        for node_id in news.nodes:
            facts = self.roster.node(node_id)
            present = {copy.digest for copy in facts.copies} if facts is not None else set[Digest]()
            self._see(node_id, present, now_s)
            self._dropped = {
                (node, digest)
                for node, digest in self._dropped
                if node != node_id or digest in present
            }
            self._tell_of_node(node_id, now_s)

    def _watch_loads(self, worker_id: WorkerId, loaded: list[HeldStage], now_s: float) -> None:
        known = self._first_seen_s.get(worker_id, {})
        for one in loaded:
            found = None if one.instance_id in known else self.thrash.loaded(one.model, now_s)
            if found is not None:
                self.thrashing.append(found)

    def _tell_of_worker(self, worker_id: WorkerId, now_s: float) -> None:
        facts = self.worker(worker_id)
        self.pool.hear_worker(worker_id, facts)
        self.policies.hear_worker(
            worker_id,
            facts,
            lambda news: self.on_device(facts, now_s, news) if facts is not None else (),
            now_s,
        )

    def _tell_of_node(self, node_id: NodeId, now_s: float) -> None:
        facts = self.node(node_id)
        self.pool.hear_node(node_id, facts)
        self.policies.hear_node(
            node_id,
            facts,
            lambda news: self.in_pool(facts, now_s, news) if facts is not None else (),
            now_s,
        )

    def _see(self, owner: str, present: Collection[str], now_s: float) -> None:
        """Keep since when each thing has been with its owner."""
        seen = self._first_seen_s.pop(owner, {})
        if present:
            self._first_seen_s[owner] = {subject: seen.get(subject, now_s) for subject in present}

    def give_up(
        self, worker_id: WorkerId, instance_ids: tuple[InstanceId, ...]
    ) -> tuple[GrantId, ...]:
        """A worker confirmed that it unloaded these. Their grants are over with that; returns
        them.
        """
        self._given_up.update((worker_id, instance_id) for instance_id in instance_ids)
        over = tuple(
            grant.grant_id
            for grant in self.grants.of_worker(worker_id)
            if grant.instance_id in instance_ids
        )
        for grant_id in over:
            del self.grants[grant_id]
        return over

    def drop(self, node_id: NodeId, digests: tuple[Digest, ...]) -> None:
        """A loader confirmed that it freed these."""
        self._dropped.update((node_id, digest) for digest in digests)

    def worker(self, worker_id: WorkerId) -> WorkerFacts | None:
        """A worker that reports, or None."""
        view = self.roster.worker(worker_id)
        return None if view is None or view.facts.liveness is Liveness.DEAD else view.facts

    def node(self, node_id: NodeId) -> NodeFacts | None:
        """A node whose loader reports, or None."""
        facts = self.roster.node(node_id)
        return None if facts is None or facts.liveness is Liveness.DEAD else facts

    def grant_of(self, instance_id: InstanceId, worker_id: WorkerId) -> Grant | None:
        """The grant of a stage, if it has one."""
        for grant in self.grants.of_worker(worker_id):
            if grant.instance_id == instance_id:
                return grant
        return None

    def is_held(self, grant: Grant) -> bool:
        """Whether the last report shows the granted stage."""
        view = self.roster.worker(grant.worker_id)
        return view is not None and any(
            one.instance_id == grant.instance_id and one.state in RESIDENT
            for one in view.facts.held
        )

    def would_show(self, grant: Grant, now_s: float) -> bool:
        """Whether a granted stage that is held would be known: its worker has reported, or had the
        time to. A cache that has just been started has heard of nothing yet.
        """
        return (
            self.roster.worker(grant.worker_id) is not None
            or now_s - self.listening_since_s >= DEAD_AFTER_S
        )

    def device_free_bytes(self, worker: WorkerFacts) -> int:
        """Bytes of a device that are neither held nor promised."""
        held = {
            one.instance_id: one.device_bytes
            for one in worker.held
            if one.state in RESIDENT and (worker.worker_id, one.instance_id) not in self._given_up
        }
        for grant in self.grants.of_worker(worker.worker_id):
            held[grant.instance_id] = max(grant.device_bytes, held.get(grant.instance_id, 0))
        return worker.device.memory_bytes - sum(held.values())

    def host_free_bytes(self, node: NodeFacts) -> int:
        """Bytes of a host pool that are neither taken nor promised.

        A stage that is loaded needs none any more.
        """
        present = {copy.digest: copy for copy in self.copies(node)}
        dropped = sum(
            copy.size_bytes for copy in node.copies if (node.node_id, copy.digest) in self._dropped
        )
        wanted: dict[Digest, list[HostNeed]] = {}
        for grant in self.grants.of_node(node.node_id):
            if not self._is_loaded(grant):
                asked = HostNeed(grant.host_bytes, grant.host_parts)
                wanted.setdefault(grant.digest, []).append(asked)
        promised = sum(
            missing_bytes(node, present.get(digest), asked, self._part_bytes(digest))
            for digest, asked in wanted.items()
        )
        return node.pool_free_bytes + dropped - promised

    def _is_loaded(self, grant: Grant) -> bool:
        view = self.roster.worker(grant.worker_id)
        return view is not None and any(
            one.instance_id == grant.instance_id
            and one.state is not HeldState.LOADING
            and one.generation >= grant.generation
            for one in view.facts.held
        )

    def copies(self, node: NodeFacts) -> tuple[Copy, ...]:
        """Copies in a node's host pool."""
        return tuple(
            copy
            for copy in node.copies
            if copy.tier is Tier.HOST and (node.node_id, copy.digest) not in self._dropped
        )

    def on_device(
        self, worker: WorkerFacts, now_s: float, among: Collection[str] | None = None
    ) -> tuple[EvictionCandidate, ...]:
        """What could be given up on a device; ``among``: of some instances."""
        if among is not None:
            held = tuple(one for one in worker.held if one.instance_id in among)
            worker = replace(worker, held=held)
        given_up = [
            instance_id for owner, instance_id in self._given_up if owner == worker.worker_id
        ]
        view = self.roster.worker(worker.worker_id)
        # Ages in what is reported are of the time at which it was first said.
        aged_s = max(0.0, now_s - view.facts_s) if view is not None else 0.0
        node = self.node(worker.node_id)
        misses = MissFacts(
            estimates=self.estimates,
            arrivals=self.arrivals.recent(),
            again_bytes_per_s=self._again_bytes_per_s(node, worker.held) if node else {},
        )
        facts = self._facts(worker.worker_id, given_up, now_s, aged_s, misses)
        return on_device(worker, node, facts)

    def in_pool(
        self, node: NodeFacts, now_s: float, among: Collection[str] | None = None
    ) -> tuple[EvictionCandidate, ...]:
        """What could be dropped from a host pool; ``among``: of some models, by digest."""
        if among is not None:
            node = replace(node, copies=tuple(one for one in node.copies if one.digest in among))
        dropped = [digest for owner, digest in self._dropped if owner == node.node_id]
        facts_s = self.roster.node_facts_s(node.node_id)
        aged_s = max(0.0, now_s - facts_s) if facts_s is not None else 0.0
        misses = MissFacts(
            estimates=self.estimates,
            arrivals=self.arrivals.recent(),
            again_bytes_per_s=self._again_bytes_per_s(node, self.copies(node)),
        )
        return in_pool(node, self._facts(node.node_id, dropped, now_s, aged_s, misses))

    def _again_bytes_per_s(
        self, node: NodeFacts, held: Iterable[Copy | HeldStage]
    ) -> Mapping[Digest, float]:
        """By model of what is held there. What was dropped elsewhere a moment ago is no source any
        more: copies of one model are decided on one after the other.
        """
        found: dict[Digest, float] = {}
        for digest in {one.digest for one in held}:
            for model in self.models.by_digest.get(digest, ())[:1]:
                found[digest] = self.pool.again_bytes_per_s(
                    digest, model.spec, node, self.roster.nodes, self._dropped
                )
        return found

    def _facts(
        self,
        owner: str,
        given_up: Collection[str],
        now_s: float,
        aged_s: float,
        misses: MissFacts,
    ) -> CandidateFacts:
        return CandidateFacts(
            now_s=now_s,
            aged_s=aged_s,
            models=self.models,
            since_s=self._first_seen_s.get(owner, {}),
            given_up=given_up,
            misses=misses,
        )

    def strikable(self, node_id: NodeId, kept: Collection[Digest] = ()) -> tuple[Digest, ...]:
        """Host copies that a node that drains can give up now; ``kept`` are being moved."""
        node = self.node(node_id)
        if node is None:
            return ()
        granted = frozenset(grant.digest for grant in self.grants.of_node(node_id))
        return tuple(
            digest
            for digest in copies_to_strike(node, granted)
            if (node_id, digest) not in self._dropped and digest not in kept
        )

    @property
    def dropped(self) -> frozenset[tuple[NodeId, Digest]]:
        """Copies that loaders have freed, though reports still show them."""
        return frozenset(self._dropped)

    @property
    def awaited(self) -> frozenset[tuple[NodeId, Digest]]:
        """Copies in host pools that a start reads, or will."""
        return frozenset(
            (grant.node_id, grant.digest)
            for grant in self.grants.values()
            if not self._is_loaded(grant)
        )

    def missing_host_bytes(self, node: NodeFacts, digest: Digest, wanted: HostNeed) -> int:
        """What a fetch would still take of the pool."""
        copy = next((one for one in self.copies(node) if one.digest == digest), None)
        return missing_bytes(node, copy, (wanted,), self._part_bytes(digest))

    def _part_bytes(self, digest: Digest) -> tuple[int, ...]:
        known = self.models.by_digest.get(digest)
        return known[0].spec.part_bytes if known else ()
