"""What other policies would have hit: caches without copies, fed with what one service hears.

Models are sampled by their names (spatial sampling: Waldspurger and others, FAST 2015): a model is
in every shadow or in none, and a shadow has the capacity's share of the models that are in it. So
the cost is bounded by ``SAMPLED`` and ``QUIET_S``, however many models and requests there are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionPolicy,
    EvictionRules,
    RoomRequest,
    plan_resident,
)
from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.policy.eviction.sized import Sized
from pilotlight.policy.ids import ModelName

SAMPLED = 128
"""Models that shadows follow at most, about."""
QUIET_S = 1.0
RIVALS = tuple(POLICIES)
_BUCKETS = 1 << 16
_RULES = EvictionRules(min_residency_s=0.0)


@dataclass(slots=True)
class ShadowCount:
    """What one shadow has counted since it began."""

    requests: int = 0
    hits: int = 0
    loads: int = 0
    load_s: float = 0.0
    """What its loads would have taken."""


class Shadow:
    """One policy's cache, without copies."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        """``name``: of the policy; ``capacity_bytes``: what it may hold."""
        self.count = ShadowCount()
        self._policy: EvictionPolicy = make_policy(name, capacity_bytes)
        self._resident: dict[str, EvictionCandidate] = {}
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What it holds; never above its capacity, but until the next load after it shrank."""
        return self._used_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Have another capacity from the next load on."""
        if capacity_bytes == self._capacity_bytes:
            return
        self._capacity_bytes = capacity_bytes
        if isinstance(self._policy, Sized):
            self._policy.resize(capacity_bytes)

    def ask(self, access: Access, candidate: EvictionCandidate) -> None:
        """A model is asked for; what is not there is loaded in place of what is worth the least.

        Requests that came together with one that loads wait for the same load: one miss, and the
        others hit what it brings.
        """
        self._policy.on_access(access)
        for subject in self._policy.expired(access.at_s):
            if subject != candidate.subject:
                self._drop(subject, access.at_s)
        self.count.requests += access.count
        if candidate.subject in self._resident:
            self.count.hits += access.count
            return
        self.count.hits += access.count - 1
        self.count.loads += 1
        self.count.load_s += candidate.penalty_s
        if candidate.size_bytes > self._capacity_bytes:
            return
        request = RoomRequest(
            need_bytes=candidate.size_bytes,
            free_bytes=self._capacity_bytes - self._used_bytes,
            now_s=access.at_s,
        )
        plan = plan_resident(self._policy, request, self._resident, _RULES)
        for victim in plan.victims:
            self._drop(victim.subject, access.at_s)
        if plan.enough:
            self._resident[candidate.subject] = candidate
            self._used_bytes += candidate.size_bytes
            self._policy.on_insert(candidate, access.at_s)

    def _drop(self, subject: str, now_s: float) -> None:
        self._used_bytes -= self._resident.pop(subject).size_bytes
        self._policy.on_evict(subject, now_s)


class Shadows:
    """A shadow of each rival, for one tier."""

    def __init__(self, names: Iterable[str] = RIVALS) -> None:
        """``names``: of policies."""
        self.of = {name: Shadow(name, 0) for name in names}
        self._models = 0
        self._asked_s: dict[ModelName, float] = {}
        self._sampled = _BUCKETS

    def resize(self, capacity_bytes: int, models: int) -> None:
        """Take the tier's capacity, and how many models there are.

        Models are sampled anew only where their number is another by a factor of two, so that the
        same ones are followed for long.
        """
        if not self._models / 2 <= models <= self._models * 2:
            self._models = models
            self._sampled = min(_BUCKETS, _BUCKETS * SAMPLED // max(1, models))
        for shadow in self.of.values():
            shadow.resize(capacity_bytes * self._sampled // _BUCKETS)

    def samples(self, model: str) -> bool:
        """Whether shadows follow a model."""
        return crc32(model.encode()) % _BUCKETS < self._sampled

    def ask(self, access: Access, candidate: EvictionCandidate) -> None:
        """A model that is sampled is asked for, with a copy as it would be.

        Shadows hear of a model once in ``QUIET_S``; what comes between counts as hits, since each
        would have the model from the time before.
        """
        quiet = access.at_s - self._asked_s.get(access.model, float("-inf")) < QUIET_S
        if not quiet:
            self._asked_s.pop(access.model, None)
            self._asked_s[access.model] = access.at_s
            if len(self._asked_s) > _BUCKETS:
                del self._asked_s[next(iter(self._asked_s))]
        for shadow in self.of.values():
            if quiet:
                shadow.count.requests += access.count
                shadow.count.hits += access.count
            else:
                shadow.ask(access, candidate)
