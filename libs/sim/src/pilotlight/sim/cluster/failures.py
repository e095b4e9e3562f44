"""Deaths: a worker's process, or a whole node.

::

    worker    its requests go on elsewhere at once; a new process reports that it holds nothing
    node      its pool, fetches and workers are gone; nobody hears of it before it has been silent
              for long enough, and then its requests go on elsewhere

Until something is back its last report grows old, as the service's roster has it
(``policy.liveness``).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotlight.policy.ids import NodeId
from pilotlight.policy.liveness import DEAD_AFTER_S, SUSPECT_AFTER_S
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.parts import Parts
from pilotlight.sim.cluster.scenario import BadScenario, Failure
from pilotlight.sim.cluster.workers import Worker


@dataclass(slots=True)
class Failures:
    """What a scenario has die."""

    parts: Parts
    duration_s: float
    rng: random.Random
    deaths: int = 0
    _dead_nodes: set[NodeId] = field(default_factory=set[NodeId])

    def plan(self, failures: Sequence[Failure]) -> None:
        """Have everything die in its time.

        Raises:
            BadScenario: a failure names what is not there.
        """
        for one in failures:
            names = self.parts.workers if one.kind == "worker" else self.parts.hosts
            if one.name and one.name not in names:
                raise BadScenario(f"failures: there is no {one.kind} {one.name!r}")
            at_s = one.at_s
            while at_s < self.duration_s:
                self.parts.events.at(at_s, lambda one=one: self._strike(one))
                if one.every_s <= 0:
                    break
                at_s += one.every_s

    def _strike(self, failure: Failure) -> None:
        parts = self.parts
        if failure.kind == "worker":
            living = [key for key, one in parts.workers.items() if not one.is_dead]
        else:
            living = [key for key in parts.hosts if key not in self._dead_nodes]
        if failure.name:
            living = [key for key in living if key == failure.name]
        if not living:
            return
        name = self.rng.choice(living)
        self.deaths += 1
        if failure.kind == "worker":
            self._kill_worker(next(one for key, one in parts.workers.items() if key == name))
            revive = next(one for key, one in parts.workers.items() if key == name).revive
            parts.events.after(failure.for_s, revive)
        else:
            self._kill_node(NodeId(name), failure.for_s)

    def _kill_worker(self, worker: Worker) -> None:
        self.parts.again(self._lose(worker))

    def _kill_node(self, node_id: NodeId, for_s: float) -> None:
        parts = self.parts
        self._dead_nodes.add(node_id)
        host = parts.hosts[node_id]
        for other in parts.hosts.values():
            if other is not host:
                other.lose_source(host)
        host.die()
        for delay_s in (SUSPECT_AFTER_S, DEAD_AFTER_S):
            parts.events.after(delay_s, lambda: host.changed(node_id))
        here = [one for one in parts.workers.values() if one.host is host and not one.is_dead]
        left = [request for worker in here for request in self._lose(worker)]
        parts.events.after(DEAD_AFTER_S, lambda: parts.again(left))

        def revive() -> None:
            self._dead_nodes.discard(node_id)
            host.revive()
            for worker in here:
                worker.revive()

        parts.events.after(for_s, revive)

    def _lose(self, worker: Worker) -> list[Request]:
        """A worker's process ends; the requests of all instances that had a stage there."""
        left = [request for instance_id in worker.die() for request in self.parts.lose(instance_id)]
        for delay_s in (SUSPECT_AFTER_S, DEAD_AFTER_S):
            self.parts.events.after(delay_s, lambda: worker.changed(worker.worker_id))
        return left
