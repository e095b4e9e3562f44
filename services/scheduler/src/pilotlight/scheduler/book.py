"""The leader's instances in memory: the rows, what they were started from, and starts that are not yet rows.

One writer: the leader's own tasks, on one event loop. A row changes here only after its transaction has committed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pilotlight.policy.instance import ENDED, SERVING, STARTING
from pilotlight.policy.types import Instance, InstanceId, Model, ModelName, WorkerId
from pilotlight.scheduler.reconcile import Tracked
from pilotlight.scheduler.world import WorkerView

REMEMBER_ENDED_S = 60.0
"""Ended instances are kept so long: failures slow the next start down, late phases still find their cold start."""


@dataclass(slots=True)
class Entry:
    """One instance."""

    instance: Instance
    model: Model
    """As it was when the instance was planned: the row of the model may change or go."""
    trace_parent: str = ""
    tentative: bool = False
    """Room is being asked for: it takes part in decisions, but there is no row and no command yet."""
    seen_on: set[WorkerId] = field(default_factory=set[WorkerId])


@dataclass(slots=True)
class Book:
    """Every instance that lives or has just ended."""

    entries: dict[InstanceId, Entry] = field(default_factory=dict[InstanceId, Entry])

    def add(self, entry: Entry) -> None:
        """Take an instance in."""
        self.entries[entry.instance.instance_id] = entry

    def remove(self, instance_id: InstanceId) -> None:
        """Forget a start that came to nothing."""
        self.entries.pop(instance_id, None)

    def get(self, instance_id: InstanceId) -> Entry | None:
        """One entry."""
        return self.entries.get(instance_id)

    def rows(self) -> tuple[Entry, ...]:
        """Entries that are rows and have not ended."""
        return tuple(one for one in self.entries.values() if not one.tentative and one.instance.state not in ENDED)

    def of_model(self, model: ModelName) -> tuple[Entry, ...]:
        """Rows of one model that start or serve."""
        return tuple(one for one in self.rows() if one.instance.model == model and one.instance.state in STARTING | SERVING)

    def instances(self) -> tuple[Instance, ...]:
        """What decisions look at: rows, starts under way, and what has just ended."""
        return tuple(one.instance for one in self.entries.values())

    def tracked(self) -> tuple[Tracked, ...]:
        """What reconciliation looks at."""
        return tuple(Tracked(instance=one.instance, seen_on=frozenset(one.seen_on)) for one in self.rows())

    def refresh(self, workers: Iterable[WorkerView], waited_for: Iterable[ModelName], now_s: float) -> None:
        """Bring what reports say of use into the instances, and forget what ended long ago.

        ``last_used_s`` of an instance that serves is the end of its last request, of one that starts the last moment at which
        somebody waited for it.
        """
        wanted = set(waited_for)
        for worker in workers:
            for held in worker.facts.held:
                entry = self.entries.get(held.instance_id)
                if entry is None or entry.instance.state in ENDED:
                    continue
                entry.seen_on.add(worker.facts.worker_id)
                if entry.instance.state in SERVING and worker.facts.worker_id == entry.instance.lead:
                    used_s = max(entry.instance.state_since_s, worker.heard_s - held.idle_s)
                    used_s = now_s if held.in_flight > 0 else used_s
                    entry.instance = replace(entry.instance, in_flight=held.in_flight, last_used_s=used_s)
        for entry in self.entries.values():
            if entry.instance.state in STARTING and entry.instance.model in wanted:
                entry.instance = replace(entry.instance, last_used_s=now_s)
        self.entries = {
            key: one
            for key, one in self.entries.items()
            if one.instance.state not in ENDED or now_s - one.instance.state_since_s < REMEMBER_ENDED_S
        }
