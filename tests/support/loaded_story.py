"""The cluster of ``cluster_story``, in which instances come and go by load."""

from dataclasses import dataclass, field, replace

from cluster_story import EPOCH, GRAIN_S, START_S, Cluster

from pilotlight.policy.arrivals import ArrivalCount, ArrivalWindows, CounterLife
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.plan import ControlFacts
from pilotlight.policy.ids import GatewayId, ModelName
from pilotlight.policy.testing import instance


@dataclass
class LoadedCluster(Cluster):
    """Models have several instances, with much or little to do, and gateways tell of requests."""

    windows: ArrivalWindows = field(default_factory=lambda: ArrivalWindows(START_S))
    totals: dict[ModelName, int] = field(default_factory=dict[ModelName, int])
    """Requests since the beginning."""

    def happen(self) -> None:
        """Let some time pass, and something happen; to loads, too."""
        super().happen()
        self._arrive()
        self._serve()

    def facts(self) -> ControlFacts:
        """What is known now, and what changed since the last call."""
        return replace(super().facts(), arrivals=self.windows.recent())

    def _arrive(self) -> None:
        name = self.rng.choice(list(self.models))
        self.totals[name] = self.totals.get(name, 0) + self.rng.choice((1, 5, 100))
        counts = [ArrivalCount(model=name, total=self.totals[name], idle_s=0.0)]
        life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
        self.windows.hear(life, counts, self.now_s, self.now_s)

    def _serve(self) -> None:
        """A model has had one more instance for a while."""
        rng = self.rng
        worker_id, of = rng.choice(sorted(self.workers)), rng.choice(list(self.models.values()))
        view = self.workers[worker_id]
        self.count += 1
        since_s = self.now_s - 80 * GRAIN_S
        one = instance(
            of.name, f"s{self.count:04}", worker_id=worker_id, since_s=since_s, digest=of.digest
        )
        placement = replace(one.placements[0], node_id=view.facts.node_id)
        record = Record(instance=replace(one, placements=(placement,), epoch=EPOCH), model=of)
        self.books = self.books.put(record)
        kept = [held for held in view.facts.held if held.state is HeldState.READY]
        stage = replace(
            self._stage(record, 100), state=HeldState.READY, in_flight=rng.choice((0, 1, 12))
        )
        self.report_worker(worker_id, (*kept, stage))
