"""One cache, one policy, one workload: what waits for loads.

A request for a model that is not there loads it, which costs its load time; the copy must then be
resident while the request is served (no bypass). A model that is larger than the cache is loaded
for each of its requests, beside the cache. Loads take no time on the simulated clock: what is
compared is the cost, as in mCache's section 4.3.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
from pilotlight.sim.cache.workload import CatalogueEntry, Workload

NODE = NodeId("node")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """What one policy made of one workload."""

    policy: str
    requests: int
    hits: int
    first_loads: int
    """Loads that no policy avoids."""
    reloads: int
    load_s: float
    first_load_s: float
    evictions: int
    load_s_sorted: Sequence[float]
    """Of each request, ascending; 0 for a hit."""

    @property
    def hit_ratio(self) -> float:
        """Requests whose model was there."""
        return self.hits / self.requests

    @property
    def load_s_per_request(self) -> float:
        """Seconds that a request waits for a load, in mean."""
        return self.load_s / self.requests

    @property
    def reload_s_per_request(self) -> float:
        """The same without first loads."""
        return (self.load_s - self.first_load_s) / self.requests

    def quantile_s(self, share: float) -> float:
        """Seconds of load that a share of the requests does not exceed."""
        place = math.ceil(share * self.requests) - 1
        return self.load_s_sorted[max(0, min(self.requests - 1, place))]


def simulate(
    policy: EvictionPolicy,
    workload: Workload,
    capacity_bytes: int,
    rules: EvictionRules | None = None,
) -> CacheResult:
    """Run a workload through a cache.

    Args:
        policy: Fresh: it has been told of nothing.
        workload: Requests in order of time.
        capacity_bytes: Of the cache.
        rules: What may stay; by default there is no minimum residency.
    """
    rules = EvictionRules(min_residency_s=0.0) if rules is None else rules
    resident: dict[str, EvictionCandidate] = {}
    free_bytes = capacity_bytes
    seen: set[ModelName] = set()
    hits = evictions = first_loads = 0
    first_load_s = 0.0
    loads_s: list[float] = []
    for request in workload.requests:
        model, now_s = request.model, request.time_s
        entry = workload.catalogue[model]
        policy.on_access(Access(model=model, count=1, at_s=now_s))
        for subject in policy.expired(now_s):
            if subject != model:
                free_bytes += resident.pop(subject).size_bytes
                policy.on_evict(subject, now_s)
                evictions += 1
        if model in resident:
            hits += 1
            loads_s.append(0.0)
            continue
        if entry.size_bytes <= capacity_bytes:
            room = RoomRequest(need_bytes=entry.size_bytes, free_bytes=free_bytes, now_s=now_s)
            plan = plan_resident(policy, room, resident, rules)
            for victim in plan.victims:
                free_bytes += resident.pop(victim.subject).size_bytes
                policy.on_evict(victim.subject, now_s)
            evictions += len(plan.victims)
            if plan.enough:
                free_bytes -= entry.size_bytes
                resident[model] = candidate = copy_of(entry, now_s)
                policy.on_insert(candidate, now_s)
        loads_s.append(entry.load_s)
        if model not in seen:
            seen.add(model)
            first_loads += 1
            first_load_s += entry.load_s
    return CacheResult(
        policy=policy.name,
        requests=len(loads_s),
        hits=hits,
        first_loads=first_loads,
        reloads=len(loads_s) - hits - first_loads,
        load_s=math.fsum(loads_s),
        first_load_s=first_load_s,
        evictions=evictions,
        load_s_sorted=sorted(loads_s),
    )


def copy_of(entry: CatalogueEntry, now_s: float) -> EvictionCandidate:
    """A model's copy that has just come; its name is its subject."""
    return EvictionCandidate(
        subject=entry.model,
        model=entry.model,
        digest=Digest(entry.model),
        tier=Tier.HOST,
        node_id=NODE,
        size_bytes=entry.size_bytes,
        resident_since_s=now_s,
        last_used_s=now_s,
        penalty_s=entry.load_s,
    )
