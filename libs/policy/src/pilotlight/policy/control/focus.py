"""What a tick has to look at: what changed, and what falls due by time alone.

Everything else is at rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pilotlight.policy.control.ordered import Ordered
from pilotlight.policy.control.table import Table
from pilotlight.policy.ids import InstanceId, ModelName, NodeId, WorkerId

Key = TypeVar("Key", bound=str)

EARLY_S = 0.001
"""Times are looked at this much before they are due: a sum and a difference of floats may round
differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """Names of objects whose facts changed."""

    models: frozenset[ModelName] = frozenset()
    instances: frozenset[InstanceId] = frozenset()
    workers: frozenset[WorkerId] = frozenset()
    nodes: frozenset[NodeId] = frozenset()

    def __or__(self, other: "Focus") -> "Focus":
        """Both together."""
        return Focus(
            models=self.models | other.models,
            instances=self.instances | other.instances,
            workers=self.workers | other.workers,
            nodes=self.nodes | other.nodes,
        )


NOTHING = Focus()


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited:
    """How many objects a tick looked at: what it cost, on any machine."""

    models: int = 0
    instances: int = 0
    workers: int = 0
    """Whose holds were made."""
    nodes: int = 0
    places: int = 0
    """Workers that were compared for turns."""
    candidates: int = 0
    """Workers that were compared for starts."""


@dataclass(frozen=True)
class Dues(Generic[Key]):
    """When each of some objects falls due.

    Immutable; the soonest is found without a look at the others.
    """

    at_s: Table[Key, float] = field(default_factory=Table["Key", float])
    queue: Ordered[tuple[float, Key]] = field(default_factory=lambda: Ordered[tuple[float, Key]]())

    def until(self, now_s: float, limit: int | None = None) -> list[Key]:
        """What is due at ``now_s``, the longest due first; no more than ``limit``."""
        found: list[Key] = []
        for at_s, key in self.queue:
            if at_s > now_s or len(found) == limit:
                break
            found.append(key)
        return found

    def put(self, updates: Mapping[Key, float]) -> "Dues[Key]":
        """With new times for some; infinite: it does not fall due."""
        news = {key: at_s for key, at_s in updates.items() if self._at_s(key) != at_s}
        if not news:
            return self
        gone = [key for key, at_s in news.items() if at_s == math.inf]
        come = {key: at_s for key, at_s in news.items() if at_s != math.inf}
        before = ((self.at_s.find(key), key) for key in news)
        queue = self.queue.changed(
            [(at_s, key) for at_s, key in before if at_s is not None],
            [(at_s, key) for key, at_s in come.items()],
        )
        return Dues(self.at_s.put(come, gone), queue)

    def _at_s(self, key: Key) -> float:
        known_s = self.at_s.find(key)
        return math.inf if known_s is None else known_s
