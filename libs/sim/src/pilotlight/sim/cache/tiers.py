"""Two tiers of one node, a policy for each: what is on the device is served at once, what is in the
host's memory comes from there, all else from storage.

A load goes through the host's memory and leaves a copy there. A copy that the device lets go falls
to the host if it is not there already and there is room without evicting; else it is gone. The
penalties of a model's two copies are coupled (design.md 6.6): a copy on the device costs a fetch
from the host while the host has one, and a load from storage otherwise. A time to live is not
applied: what is told of as expired stays until its room is needed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionPolicy,
    EvictionRules,
    RoomRequest,
    plan_resident,
)
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.run import copy_of
from pilotlight.sim.cache.workload import CatalogueEntry, Workload

HOST_START_S = 0.2
"""Of a load from the host's memory, whatever the size."""
HOST_BYTES_PER_S = 50e9
"""Of pinned memory to a device; design.md, section 12, has 55.6 measured."""
RULES = EvictionRules(min_residency_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersResult:
    """What two policies made of one workload."""

    requests: int
    device_hits: int
    host_hits: int
    load_s: float
    first_load_s: float

    @property
    def reload_s_per_request(self) -> float:
        """Seconds that a request waits, in mean, without each model's first load."""
        return (self.load_s - self.first_load_s) / self.requests


class _Tier:
    """Copies in one tier, under one policy."""

    def __init__(self, policy: EvictionPolicy, capacity_bytes: int) -> None:
        self.policy, self.capacity_bytes = policy, capacity_bytes
        self.free_bytes = capacity_bytes
        self.resident: dict[str, EvictionCandidate] = {}

    def put(self, copy: EvictionCandidate, now_s: float) -> tuple[str, ...] | None:
        """Hold a copy in place of others, which are returned; None where it never fits."""
        room = RoomRequest(need_bytes=copy.size_bytes, free_bytes=self.free_bytes, now_s=now_s)
        plan = plan_resident(self.policy, room, self.resident, RULES)
        if not plan.enough:
            return None
        for victim in plan.victims:
            self.free_bytes += self.resident.pop(victim.subject).size_bytes
            self.policy.on_evict(victim.subject, now_s)
        self.free_bytes -= copy.size_bytes
        self.renew(copy, now_s)
        return tuple(victim.subject for victim in plan.victims)

    def renew(self, copy: EvictionCandidate, now_s: float) -> None:
        """A resident copy has other figures than before."""
        self.resident[copy.subject] = copy
        self.policy.on_insert(copy, now_s)


class _Node:
    """A device and its host."""

    def __init__(self, device: _Tier, host: _Tier, workload: Workload) -> None:
        self.device, self.host, self.catalogue = device, host, workload.catalogue

    def ask(self, model: ModelName, now_s: float) -> float:
        """Seconds that a request waits for its model."""
        for tier in (self.device, self.host):
            tier.policy.on_access(Access(model=model, count=1, at_s=now_s))
        if model in self.device.resident:
            return 0.0
        entry = self.catalogue[model]
        wait_s = from_host_s(entry)
        if model not in self.host.resident:
            wait_s += entry.load_s
            self._put_on_host(entry, now_s)
        for victim in self.device.put(self._on_device(entry, now_s), now_s) or ():
            fallen = self.catalogue[ModelName(victim)]
            if victim not in self.host.resident and fallen.size_bytes <= self.host.free_bytes:
                self._put_on_host(fallen, now_s)
        return wait_s

    def _put_on_host(self, entry: CatalogueEntry, now_s: float) -> None:
        gone = self.host.put(copy_of(entry, now_s), now_s)
        for subject in () if gone is None else (*gone, entry.model):
            if subject in self.device.resident:
                held = self.device.resident[subject]
                self.device.renew(
                    replace(held, penalty_s=self._penalty_s(ModelName(subject))), now_s
                )

    def _on_device(self, entry: CatalogueEntry, now_s: float) -> EvictionCandidate:
        return replace(copy_of(entry, now_s), penalty_s=self._penalty_s(entry.model))

    def _penalty_s(self, model: ModelName) -> float:
        entry = self.catalogue[model]
        return from_host_s(entry) + (0.0 if model in self.host.resident else entry.load_s)


def from_host_s(entry: CatalogueEntry) -> float:
    """Seconds from the host's memory to the device."""
    return HOST_START_S + entry.size_bytes / HOST_BYTES_PER_S


def simulate_tiers(
    make: Callable[[int], EvictionPolicy],
    workload: Workload,
    device_bytes: int,
    host_bytes: int,
) -> TiersResult:
    """Run a workload through a device and its host.

    Args:
        make: A fresh policy for a tier of some bytes.
        workload: Requests in order of time.
        device_bytes: Of the device. A model that is larger is served beside it.
        host_bytes: Of the host's memory.
    """
    device, host = (_Tier(make(size), size) for size in (device_bytes, host_bytes))
    node = _Node(device, host, workload)
    seen: set[ModelName] = set()
    device_hits = host_hits = 0
    waits_s: list[float] = []
    first_s: list[float] = []
    for request in workload.requests:
        device_hits += request.model in device.resident
        host_hits += request.model in host.resident and request.model not in device.resident
        waits_s.append(node.ask(request.model, request.time_s))
        if request.model not in seen:
            seen.add(request.model)
            first_s.append(waits_s[-1])
    return TiersResult(
        requests=len(waits_s),
        device_hits=device_hits,
        host_hits=host_hits,
        load_s=math.fsum(waits_s),
        first_load_s=math.fsum(first_s),
    )
