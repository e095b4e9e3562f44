"""Everything of a cluster but its leader: nodes, workers, engines, gateways."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pilotlight.policy.coldstart.contention import LinkName, disk, incoming, outgoing
from pilotlight.policy.coldstart.servers import stage_share
from pilotlight.policy.control.plan import NodeTold, WorkerTold
from pilotlight.policy.ids import InstanceId, NodeId, WorkerId
from pilotlight.policy.instance import ENDED
from pilotlight.policy.plan import Instance
from pilotlight.sim.cluster.build import Catalogue, nodes_of, start_up_of, workers_of
from pilotlight.sim.cluster.disks import Disk
from pilotlight.sim.cluster.engine import Engine, Pace, Request
from pilotlight.sim.cluster.events import Events
from pilotlight.sim.cluster.gateway import Gateway
from pilotlight.sim.cluster.hosts import Host
from pilotlight.sim.cluster.network import Network
from pilotlight.sim.cluster.scenario import GIB, Contender, Scenario
from pilotlight.sim.cluster.workers import Worker

COMMAND_S = 0.01
"""From a decision to what obeys it."""
HOP_S = 0.001
REPORT_S = 0.2
"""Between two reports of a node on bytes that are on their way."""


@dataclass(slots=True, eq=False)
class Parts:
    """Built from a scenario for one contender."""

    scenario: Scenario
    contender: Contender
    catalogue: Catalogue
    events: Events
    wake: Callable[[], None]
    """Something happened about which control may decide otherwise."""
    first: Callable[[Request], None]
    ended: Callable[[Request], None]
    network: Network = field(init=False)
    gateway: Gateway = field(init=False)
    hosts: dict[NodeId, Host] = field(default_factory=dict[NodeId, Host])
    workers: dict[WorkerId, Worker] = field(default_factory=dict[WorkerId, Worker])
    _engines: dict[InstanceId, Engine] = field(default_factory=dict[InstanceId, Engine])
    _served: dict[InstanceId, Instance] = field(default_factory=dict[InstanceId, Instance])
    _changed_workers: set[WorkerId] = field(default_factory=set[WorkerId])
    _changed_nodes: set[NodeId] = field(default_factory=set[NodeId])

    _fetching: set[NodeId] = field(default_factory=set[NodeId])
    _reported_s: float = 0.0

    def __post_init__(self) -> None:
        capacities: dict[LinkName, float] = {}
        self.network = Network(self.events, capacities)
        times = start_up_of(self.scenario, self.contender)
        delay_s = times.create_s + times.context_s + times.libraries_s
        for kind, node_id in nodes_of(self.scenario):
            rate = kind.network_gbit_per_s * 1e9 / 8
            capacities[incoming(node_id)] = capacities[outgoing(node_id)] = rate
            disk_rate = kind.disk_gib_per_s * GIB
            has_disk = self.contender.cache and kind.disk_gib > 0 and disk_rate > 0
            if has_disk:
                capacities[disk(node_id)] = disk_rate
            host = Host(
                node_id=node_id,
                nic_bytes_per_s=rate,
                pool_bytes=int(kind.memory_gib * GIB),
                network=self.network,
                changed=self._node_changed,
                caches=self.contender.cache,
                peers=self.contender.peers,
                disk=Disk(int(kind.disk_gib * GIB), disk_rate) if has_disk else None,
                delay_s=0.0 if self.contender.overlapped else delay_s,
            )
            self.hosts[node_id] = host
            self._node_changed(node_id)
            for worker_id, device in workers_of(kind, node_id):
                self.workers[worker_id] = Worker(
                    worker_id=worker_id,
                    device=device,
                    host=host,
                    events=self.events,
                    start_up=times,
                    contender=self.contender,
                    changed=self._worker_changed,
                    counted=self._changed_workers.add,
                    in_flight=self.in_flight,
                )
                self._changed_workers.add(worker_id)
        self.gateway = Gateway(
            models=self.catalogue.models,
            max_batch=self.scenario.max_batch,
            came=self._used,
            waits=self.wake,
        )

    # Reports.

    def take_changed(self) -> tuple[frozenset[WorkerId], frozenset[NodeId]]:
        """Whose reports are others than at the last call, and some of nodes that fetch."""
        now_s = self.events.now_s
        if now_s >= self._reported_s + REPORT_S:
            self._reported_s = now_s
            self._changed_nodes |= self._fetching
        workers, nodes = frozenset(self._changed_workers), frozenset(self._changed_nodes)
        self._changed_workers.clear()
        self._changed_nodes.clear()
        for node_id in nodes:
            if self.hosts[node_id].is_fetching:
                self._fetching.add(node_id)
            else:
                self._fetching.discard(node_id)
        return workers, nodes

    def _worker_changed(self, worker_id: WorkerId) -> None:
        self._changed_workers.add(worker_id)
        self.wake()

    def _node_changed(self, node_id: NodeId) -> None:
        self._changed_nodes.add(node_id)
        self.wake()

    # Commands.

    def tell_node(self, told: NodeTold, source_of: Callable[[InstanceId, NodeId], str]) -> None:
        """Send a node what it is to fetch."""
        host = self.hosts[told.node_id]
        self.events.after(
            COMMAND_S,
            lambda: host.obey(told.fetches, lambda one: source_of(one, host.node_id), self.hosts),
        )

    def tell_worker(self, told: WorkerTold) -> None:
        """Send a worker what it is to hold."""
        worker = self.workers[told.worker_id]
        self.events.after(COMMAND_S, lambda: worker.obey(told.holds))

    def evict(self, instance_id: InstanceId) -> None:
        """Have an idle instance give its room up."""
        places = self._served[instance_id].placements
        self._stop(instance_id)
        for placement in places:
            if instance_id in self.workers[placement.worker_id].held:
                self.workers[placement.worker_id].evict(instance_id)

    # Instances.

    def in_flight(self, instance_id: InstanceId) -> int:
        """Requests that an instance has."""
        engine = self._engines.get(instance_id)
        return engine.in_flight if engine is not None else 0

    def is_idle(self, instance_id: InstanceId) -> bool:
        """Whether an instance serves, and has no requests."""
        engine = self._engines.get(instance_id)
        return engine is not None and engine.in_flight == 0

    def serve(self, instance: Instance) -> None:
        """An instance takes requests, or has other stages than before."""
        instance_id = instance.instance_id
        anew = instance_id not in self._engines
        if anew and instance_id in self._served:
            return  # It was evicted, and control has yet to hear of it.
        self._served[instance_id] = instance
        pace = self._pace(instance)
        if not anew:
            self._engines[instance_id].change(pace)
            return
        engine = self._engines[instance_id] = Engine(
            events=self.events,
            pace=pace,
            first=self.first,
            ended=lambda request: self._ended(instance_id, request),
        )
        self.gateway.serve(instance.model, instance_id, engine)

    def leave(self, after: Instance) -> None:
        """An instance takes no new requests; what outlasts its drain goes on elsewhere."""
        instance_id = after.instance_id
        self.gateway.leave(after.model, instance_id)
        if after.state in ENDED:
            self._stop(instance_id)
            self._served.pop(instance_id, None)
        elif after.drain_within_s is not None:
            self.events.after(after.drain_within_s, lambda: self._stop(instance_id))

    def lose(self, instance_id: InstanceId) -> list[Request]:
        """An instance serves no more; the requests that it had."""
        engine = self._engines.pop(instance_id, None)
        if engine is None:
            return []
        left = engine.stop()
        self.gateway.leave(self._served[instance_id].model, instance_id)
        self._used(instance_id)
        return left

    def again(self, requests: Iterable[Request]) -> None:
        """Requests whose instance is gone go on elsewhere."""
        self.gateway.again(requests, self.events.now_s)

    def _stop(self, instance_id: InstanceId) -> None:
        self.again(self.lose(instance_id))

    def _used(self, instance_id: InstanceId) -> None:
        for placement in self._served[instance_id].placements:
            self.workers[placement.worker_id].used(instance_id, self.events.now_s)

    def _ended(self, instance_id: InstanceId, request: Request) -> None:
        self.ended(request)
        self._used(instance_id)
        self.gateway.drain(request.model)

    def _pace(self, instance: Instance) -> Pace:
        """Stages compute one after the other, each its share of the layers; where a worker's share
        of its device is that of the memory, a stage of a low-memory worker takes as long as the
        whole model (ParaServe, equation 2).
        """
        whole = self.catalogue.paces[instance.model]
        places = instance.placements
        model = self.catalogue.models[instance.model]
        if len(places) == 1 or places[0].held == model.spec.whole:
            return whole
        factor = 1.0
        if self.scenario.proportional_shares:
            full_bytes = model.device_bytes(model.spec.whole)
            factor = sum(
                stage_share(model, one.held or one.stage) if one.device_bytes >= full_bytes else 1.0
                for one in places
            )
        return replace(whole, factor=factor, hops_s=HOP_S * len(places))
