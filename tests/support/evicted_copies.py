"""Copies, accesses and a small cache for tests of eviction policies."""

from typing import Generic, TypeVar

from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionPolicy,
    EvictionRules,
    RoomRequest,
    plan_resident,
)
from pilotlight.policy.ids import Digest, ModelName, NodeId

RULES = EvictionRules(min_residency_s=0.0)
P = TypeVar("P", bound=EvictionPolicy)


def copy(
    name: str, size_bytes: int = 1, penalty_s: float = 1.0, now_s: float = 0.0
) -> EvictionCandidate:
    """A copy that came now and is free to go; its model's name is its subject."""
    return EvictionCandidate(
        subject=name,
        model=ModelName(name),
        digest=Digest(name),
        tier=Tier.HOST,
        node_id=NodeId("n"),
        size_bytes=size_bytes,
        resident_since_s=now_s,
        last_used_s=now_s,
        penalty_s=penalty_s,
    )


def access(name: str, at_s: float = 0.0, count: int = 1) -> Access:
    """A model was asked for."""
    return Access(model=ModelName(name), count=count, at_s=at_s)


class SmallCache(Generic[P]):
    """A cache under a policy; each question takes a second."""

    def __init__(self, policy: P, capacity_bytes: int) -> None:
        self.policy, self.free_bytes = policy, capacity_bytes
        self.resident: dict[str, EvictionCandidate] = {}
        self.now_s = 0.0
        self.misses = 0

    def ask(self, name: str, size_bytes: int = 1, penalty_s: float = 1.0) -> bool:
        """Ask for a model, and load it if it is not there. Whether it was."""
        self.now_s += 1.0
        self.policy.on_access(access(name, self.now_s))
        if name in self.resident:
            return True
        self.misses += 1
        wanted = RoomRequest(need_bytes=size_bytes, free_bytes=self.free_bytes, now_s=self.now_s)
        for victim in plan_resident(self.policy, wanted, self.resident, RULES).victims:
            self.free_bytes += self.resident.pop(victim.subject).size_bytes
            self.policy.on_evict(victim.subject, self.now_s)
        self.free_bytes -= size_bytes
        assert self.free_bytes >= 0
        self.resident[name] = copy(name, size_bytes, penalty_s, self.now_s)
        self.policy.on_insert(self.resident[name], self.now_s)
        return False
