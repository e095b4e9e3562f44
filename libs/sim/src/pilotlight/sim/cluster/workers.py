"""Workers: the stages that they hold, as they would report them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import (
    Device,
    HeldStage,
    HeldState,
    Liveness,
    WorkerFacts,
    WorkerView,
)
from pilotlight.policy.control.holds import StageHold
from pilotlight.policy.cost import transfer_s
from pilotlight.policy.ids import Epoch, Generation, InstanceId, NodeId, WorkerId
from pilotlight.policy.liveness import liveness_of
from pilotlight.policy.model import Model, Stage
from pilotlight.sim.cluster.events import Events
from pilotlight.sim.cluster.hosts import Host
from pilotlight.sim.cluster.scenario import Contender, StartUp

EPOCH = Epoch(1)


@dataclass(slots=True, eq=False)
class Held:
    """One stage on one worker."""

    instance_id: InstanceId
    model: Model
    generation: Generation
    stage: Stage
    state: HeldState
    device_bytes: int
    in_flight: int = 0
    idle_since_s: float = 0.0
    reason: str = ""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker and its device."""

    worker_id: WorkerId
    device: Device
    host: Host
    events: Events
    start_up: StartUp
    contender: Contender
    changed: Callable[[WorkerId], None]
    """Its report is another one: what it holds, or how that is."""
    counted: Callable[[WorkerId], None]
    """Counts in its report are others: they are told with the next one."""
    in_flight: Callable[[InstanceId], int]
    """Requests of an instance."""
    held: dict[InstanceId, Held] = field(default_factory=dict[InstanceId, Held])
    granted: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])
    """Device bytes of instances, from when they were promised."""
    device_s: float = 0.0
    """Seconds in which it was held, by the share of its memory."""
    incarnation: int = 1
    _since_s: float = 0.0
    _last: WorkerView | None = None
    """What it said last, while it is dead."""

    @property
    def is_dead(self) -> bool:
        """Whether its process is gone."""
        return self._last is not None

    def die(self) -> tuple[InstanceId, ...]:
        """Lose everything; the instances of which it held a stage."""
        self._last = self.view(self.host.node_id)
        lost = tuple(self.held)
        self.held.clear()
        return lost

    def revive(self) -> None:
        """Be a new process, which holds nothing."""
        self._last = None
        self.incarnation += 1
        self.changed(self.worker_id)

    @property
    def free_bytes(self) -> int:
        """Neither held nor promised."""
        return self.device.memory_bytes - sum(self.granted.values())

    def grant(self, instance_id: InstanceId, device_bytes: int) -> None:
        """Promise room."""
        self.count()
        self.granted[instance_id] = device_bytes

    def release(self, instance_id: InstanceId) -> None:
        """Take room back."""
        self.count()
        self.granted.pop(instance_id, None)

    def count(self) -> None:
        """Bring ``device_s`` up to now."""
        share = sum(self.granted.values()) / self.device.memory_bytes
        self.device_s += share * (self.events.now_s - self._since_s)
        self._since_s = self.events.now_s

    def obey(self, told: Iterable[StageHold]) -> None:
        """Hold what is told, and nothing else.

        1. a stage that is new is loaded; or a stage of a group, which has grown, is that
        2. one that is to drain takes no new requests, and goes with the last one
        3. one with a longer range grows
        4. what is not told is let go
        """
        if self.is_dead:
            return
        wanted = {one.instance_id: one for one in told}
        for hold in wanted.values():
            held = self.held.get(hold.instance_id)
            if held is None:
                if not hold.draining and not self._rename(hold, wanted):
                    self._load(hold)  # 1
            elif hold.draining:
                self._drain(held)  # 2
            elif hold.generation > held.generation:
                self._grow(held, hold)  # 3
        for instance_id in [one for one in self.held if one not in wanted]:
            self.let_go(instance_id)  # 4

    def let_go(self, instance_id: InstanceId) -> None:
        """Forget a stage."""
        if self.held.pop(instance_id, None) is not None:
            self.release(instance_id)
            self.changed(self.worker_id)

    def evict(self, instance_id: InstanceId) -> None:
        """Give a stage up for room; control has yet to take it back."""
        held = self.held[instance_id]
        held.state, held.reason = HeldState.EVICTED, "evicted for room"
        self.release(instance_id)
        self.changed(self.worker_id)

    def used(self, instance_id: InstanceId, now_s: float) -> None:
        """A request of an instance came or ended."""
        held = self.held.get(instance_id)
        if held is None:
            return
        before, held.in_flight = held.in_flight, self.in_flight(instance_id)
        held.idle_since_s = now_s
        if held.state is HeldState.DRAINING and held.in_flight == 0:
            self.let_go(instance_id)
        elif (before > 0) != (held.in_flight > 0):
            self.counted(self.worker_id)

    def _drain(self, held: Held) -> None:
        if held.state in (HeldState.LOADING, HeldState.READY):
            held.in_flight = self.in_flight(held.instance_id)
            if held.state is HeldState.LOADING or held.in_flight == 0:
                self.let_go(held.instance_id)
                return
            held.state = HeldState.DRAINING
            self.changed(self.worker_id)

    def _rename(self, hold: StageHold, wanted: Mapping[InstanceId, StageHold]) -> bool:
        """Whether a stage that is held is this one from now on."""
        was = hold.grown_from
        held = self.held.get(was) if was is not None and was not in wanted else None
        if held is None or held.state is not HeldState.READY or held.stage != hold.stage:
            return False
        del self.held[held.instance_id]
        self.release(held.instance_id)
        held.instance_id, held.generation = hold.instance_id, hold.generation
        held.idle_since_s = self.events.now_s
        self.held[hold.instance_id] = held
        self.grant(hold.instance_id, held.device_bytes)
        self.changed(self.worker_id)
        return True

    def _load(self, hold: StageHold) -> None:
        now_s = self.events.now_s
        held = Held(
            instance_id=hold.instance_id,
            model=hold.model,
            generation=hold.generation,
            stage=hold.stage,
            state=HeldState.LOADING,
            device_bytes=hold.device_bytes,
            idle_since_s=now_s,
        )
        self.held[hold.instance_id] = held
        self.changed(self.worker_id)
        load_s = transfer_s(hold.model.device_bytes(hold.stage), self.device.load_bytes_per_s)
        times = self.start_up
        before_s = now_s + times.create_s + times.context_s

        def there() -> None:
            """Parameters are in the host pool; loads have run beside the fetch, or begin now."""
            came_s = self.events.now_s
            if self.contender.overlapped:
                ready_s = before_s + max(load_s, times.libraries_s)
            elif self.contender.streamed:
                ready_s = max(before_s + times.libraries_s + load_s, came_s)
            else:
                ready_s = max(before_s + times.libraries_s, came_s) + load_s
            self.events.at(max(ready_s, came_s), lambda: self._loaded(held))

        self.host.when_there(hold.model, hold.model.spec.parts_of(hold.stage), there)

    def _loaded(self, held: Held) -> None:
        if self.held.get(held.instance_id) is held and held.state is HeldState.LOADING:
            held.state = HeldState.READY
            self.changed(self.worker_id)

    def _grow(self, held: Held, hold: StageHold) -> None:
        if hold.stage == held.stage:
            held.generation = hold.generation
            self.changed(self.worker_id)
            return
        more = hold.model.device_bytes(hold.stage) - hold.model.device_bytes(held.stage)
        load_s = transfer_s(more, self.device.load_bytes_per_s)
        began_s, generation, stage = self.events.now_s, hold.generation, hold.stage

        def grown() -> None:
            if self.held.get(held.instance_id) is held and held.generation < generation:
                held.generation, held.stage = generation, stage
                held.device_bytes = max(held.device_bytes, hold.device_bytes)
                self.changed(self.worker_id)

        spec = hold.model.spec
        self.host.when_there(
            hold.model,
            set(spec.parts_of(stage)).difference(spec.parts_of(held.stage)),
            lambda: self.events.at(began_s + load_s, grown),
        )

    def view(self, node_id: NodeId) -> WorkerView:
        """What it reports; of one that is dead its last report, as old as that is."""
        now_s = self.events.now_s
        if self._last is not None:
            liveness = liveness_of(now_s - self._last.heard_s)
            return replace(self._last, facts=replace(self._last.facts, liveness=liveness))
        stages = tuple(
            HeldStage(
                instance_id=one.instance_id,
                generation=one.generation,
                model=one.model.name,
                digest=one.model.digest,
                stage=one.stage,
                state=one.state,
                device_bytes=one.device_bytes,
                in_flight=one.in_flight,
                idle_s=0.0 if one.in_flight else now_s - one.idle_since_s,
                reason=one.reason,
                open=one.state is HeldState.READY and one.stage != one.model.spec.whole,
            )
            for one in self.held.values()
        )
        facts = WorkerFacts(
            worker_id=self.worker_id,
            node_id=node_id,
            device=self.device,
            liveness=Liveness.ALIVE,
            held=stages,
        )
        return WorkerView(
            facts=facts, heard_s=now_s, incarnation=f"{self.incarnation}", epoch_seen=EPOCH
        )
