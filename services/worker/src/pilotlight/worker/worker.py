"""One worker: its engine's life, and what the engine says."""

from collections.abc import Sequence
from dataclasses import replace

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import (
    DeviceFailed,
    InternalError,
    NotLoaded,
    PilotlightError,
    WorkerLost,
)
from pilotlight.common.messages.engine import (
    EngineFault,
    EngineUp,
    Prefilled,
    RoomLeft,
    SpareReady,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageRefused,
    StageResized,
    StageUnloaded,
    StepDone,
)
from pilotlight.common.messages.graphs import StageGraphs, StageKernels
from pilotlight.common.messages.pipelines import (
    DoorOpened,
    PipelineLeft,
    RingUnformed,
    StageConnected,
    StageGrown,
    StageRenamed,
)
from pilotlight.common.waiting import every
from pilotlight.policy.cluster import (
    Device,
    DeviceHealth,
    DeviceKind,
    HealthState,
    Liveness,
    WorkerFacts,
)
from pilotlight.policy.devices import together
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.lending import LendingRules
from pilotlight.worker.artifacts import Artifacts
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.delivery import TokenDelivery, source_of
from pilotlight.worker.device_watch import DeviceWatch
from pilotlight.worker.engine_starts import EngineStarts
from pilotlight.worker.engines.client import EngineDied, EngineEvent
from pilotlight.worker.groups import Groups
from pilotlight.worker.handlers import Handlers
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.reporting import Reporter
from pilotlight.worker.stages import Stages
from pilotlight.worker.tracing import PrefillSpans

log = structlog.get_logger()

UPKEEP_S = 1.0
HANG_S = 300.0
"""An engine that has requests and says nothing for this long has lost them. One that hangs its own
watch finds much earlier."""
HANG_TOLD_S = 600.0
"""How long a worker's health says that its engine has hung."""


class Worker:
    """A component: speaks for one device."""

    def __init__(
        self,
        core: WorkerCore,
        kind: DeviceKind,
        loader: StageLoader,
        bucket: Bucket,
        incarnation: str,
        watch: DeviceWatch | None = None,
        groups: Groups | None = None,
        lending: LendingRules | None = None,
        artifacts: Artifacts | None = None,
    ) -> None:
        self.core = core
        self.artifacts = artifacts
        self._groups = groups or Groups(core, "", None)
        loader.begun = self._on_begun
        loader.renewed = self._on_renewed
        self._watch = watch
        self.stages = Stages(
            core,
            loader,
            self._on_settled,
            quiet=kind is not DeviceKind.CPU,
            rules=lending,
        )
        self._kind = kind
        self._spans = PrefillSpans()
        self._handlers = Handlers(core, self.stages, self._groups, self._spans)
        self._delivery = TokenDelivery(core, self._spans)
        self.reporter = Reporter(core, bucket, incarnation, self.facts, lambda: self.stages.epoch)
        self._up: EngineUp | None = None
        self._step: StepDone | None = None
        """The engine's last."""
        self._heard_s = 0.0
        """When the engine last said something, or got work after having none."""
        self._hung: tuple[float, str] | None = None
        """When an engine was last found hanging, and why."""
        self._starts = EngineStarts(core, watch, self._on_up, self._on_back)

    async def start(self) -> None:
        """Start the engine, listen, report.

        On a device that has failed no engine is started, until it is well again.

        Raises:
            EngineFailed: the engine does not start.
        """
        if self._starts.running:
            return
        core = self.core
        await self._starts.first(self._on_health)
        core.engine.follow(self._on_event, self._on_steps)
        core.background.spawn(f"upkeep of {core.worker_id}", self._keep_up())
        self.stages.lending.start()
        await self._handlers.start()
        self.reporter.start()

    async def stop(self) -> None:
        """Refuse new requests, tell the gateways of the others, end the engine."""
        if not self._starts.running:
            return
        self._starts.running = False
        await self._handlers.stop()
        self.stages.stop()
        self._delivery.fail(WorkerLost.code, "the worker ends")
        await self._delivery.drain()
        await self.core.engine.stop()
        if self.artifacts is not None:
            self.artifacts.close()
        if self._watch is not None:
            await self._watch.stop()

    def not_ready(self) -> str | None:
        """Why it can load nothing at the moment."""
        if not self._starts.usable:
            return f"the device of {self.core.worker_id} has failed: {self._health.reason}"
        return (
            None
            if self.core.engine.alive
            else f"the engine of {self.core.worker_id} is not running"
        )

    def facts(self) -> WorkerFacts:
        """What is reported."""
        core, up, last = self.core, self._up, self._step
        waiting = min(last.waiting, core.table.running) if last is not None else 0
        devices = self._devices(up)
        return WorkerFacts(
            worker_id=core.worker_id,
            node_id=core.node_id,
            device=together(devices),
            devices=devices,
            liveness=Liveness.ALIVE,
            held=tuple(
                replace(
                    one,
                    port=self._groups.port,
                    loan=self.stages.lending.fact(one.instance_id),
                )
                for one in self.stages.held.facts(core.clock.monotonic_s())
            ),
            queue_requests=waiting,
            running_requests=core.table.running - waiting,
            kv_free_tokens=self._kv_free_tokens,
            step_time_s=last.step_time_s if last is not None else 0.0,
            engine_up=core.engine.alive and self._starts.usable,
            health=self._health,
            engine_start=up.start if up is not None else None,
            build=self.stages.lending.build.fact,
        )

    @property
    def _kv_free_tokens(self) -> int:
        """Room for tokens that no request has, with what stages may still be lent."""
        last, stages = self._step, self.stages
        free_tokens = (
            last.kv_free_tokens
            if last is not None and last.running
            else stages.held.kv_capacity_tokens
        )
        return free_tokens + stages.lending.more_tokens

    def _devices(self, up: EngineUp | None) -> tuple[Device, ...]:
        """Those that the engine computes on: it has one."""
        by_driver = self._watch.names if self._watch is not None else ()
        only = Device(
            kind=self._kind,
            name=up.device_name if up else next(iter(by_driver), ""),
            memory_bytes=self.core.device_bytes,
            load_bytes_per_s=up.load_bytes_per_s if up else 0.0,
            granule_bytes=up.granule_bytes if up else 1,
            memory_bytes_per_s=up.memory_bytes_per_s if up else 0.0,
        )
        return (only,)

    @property
    def _health(self) -> DeviceHealth:
        health = self._watch.health if self._watch is not None else DeviceHealth()
        if (
            health.reason
            or self._hung is None
            or self.core.clock.monotonic_s() - self._hung[0] >= HANG_TOLD_S
        ):
            return health
        return replace(health, reason=f"hung: {self._hung[1]}")

    def _on_health(self, health: DeviceHealth) -> None:
        """The device is another than it was.

        What runs on one that has failed ends; nothing is started there before it is well.
        """
        core = self.core
        core.metrics.device_health(health.state)
        core.changed.set()
        if not self._starts.running:
            return
        if health.state is HealthState.FAILED:
            core.background.spawn(
                f"end engine of {core.worker_id}",
                core.engine.kill(health.reason, DeviceFailed.code),
            )
        elif not core.engine.alive and not self._starts.busy:
            self._starts.forget_failures()
            self._starts.again()

    def _on_up(self, up: EngineUp) -> None:
        self._up, self._step = up, None
        self.core.environment = up.environment
        self.stages.lending.build.beside_bytes = up.beside_bytes
        self._heard_s = self.core.clock.monotonic_s()

    def _on_back(self) -> None:
        self.core.changed.set()
        self.stages.reconcile()

    async def _on_event(self, told: Timed[EngineEvent]) -> None:
        self._heard_s = self.core.clock.monotonic_s()
        try:
            self._on(told.message)
        except InternalError as error:
            await self._distrust(error, None)

    async def _on_steps(self, steps: Sequence[Timed[StepDone]]) -> None:
        """Of one engine: what they gave leaves together."""
        self._heard_s = self.core.clock.monotonic_s()
        taken = [told.message for told in steps]
        self.core.metrics.stepped(*taken)
        self.stages.held.stepped(*taken)
        last = self._step = taken[-1]
        if last.waiting and self.stages.lending.more_tokens:
            self.stages.lending.press()
        try:
            if self._delivery.take(steps, self.stages.held.unproven):
                self.stages.on_requests_ended()
        except InternalError as error:
            await self._distrust(error, source_of(self.core.table, steps))

    async def _distrust(self, error: InternalError, having: InstanceId | None) -> None:
        """An engine's books are wrong, for one request or for more: its tokens cannot be trusted.

        Args:
            error: what is wrong.
            having: an instance that the engine has; None: it is not known which engine it is, and
                all of them end.
        """
        log.error("engine talks nonsense", action="engine_incoherent", error=error.message)
        await self.core.engine.kill(error.message, having=having)

    def _on(self, event: EngineEvent) -> None:
        match event:
            case StageOpened():
                self.stages.on_opened(event)
            case StageLoaded():
                self.stages.on_loaded(event)
            case StageFailed():
                self.stages.on_load_failed(event)
            case StageGrown():
                self.stages.on_growth(event)
            case StageRefused():
                self.stages.on_growth(event)
                self.stages.renames.on_refused(event)
                self.stages.lending.on_refused(event)
                self._groups.on_refused(event)
            case StageRenamed():
                self.stages.renames.on_renamed(event)
                if self.artifacts is not None:
                    self.artifacts.on_renamed(event.old_id, event.instance_id)
            case StageResized():
                self.stages.lending.on_resized(event)
            case RoomLeft():
                self.stages.lending.build.on_left(event)
            case StageConnected():
                self.stages.on_joined(event)
            case PipelineLeft():
                self._groups.on_left(event, self.stages.held.get(event.instance_id))
                self.stages.on_pipeline_left(event)
            case RingUnformed():
                self._groups.on_unformed(event.instance_id)
            case DoorOpened():
                self._groups.on_door(event.port)
            case StageUnloaded():
                self.stages.on_unloaded(event.instance_id)
            case Prefilled():
                self.core.phases.add(event.instance_id, *event.earlier, event.phase)
                self.stages.lending.on_prefilled(event.instance_id)
            case StageGraphs() | StageKernels():
                if self.artifacts is not None:
                    self.artifacts.on_restored(event)
            case EngineDied():
                self._on_death(event)
            case EngineUp() | StepDone() | SpareReady() | EngineFault():
                pass

    def _on_begun(self, instance_id: InstanceId) -> None:
        """The stages of a group are joined while their parts come."""
        self._groups.on_begun(instance_id, self.stages.held)

    def _on_renewed(self) -> None:
        """Another process is the engine, and listens nowhere yet."""
        self._groups.on_engine_died()
        self._groups.follow(self.stages.held)

    def _on_settled(self, instance_id: InstanceId, error: PilotlightError | None) -> None:
        """A load has ended: its tokens may leave, or its requests have to go on elsewhere."""
        self._groups.follow(self.stages.held)
        if error is not None:
            self._delivery.discard(instance_id)
            self._delivery.fail(error.code, error.message, instance_id)
            return
        try:
            if self._delivery.release(instance_id):
                self.stages.on_requests_ended()
        except InternalError as nonsense:
            self.core.background.spawn(
                f"distrust the engine of {self.core.worker_id}",
                self._distrust(nonsense, instance_id),
            )

    def _on_death(self, died: EngineDied) -> None:
        self.core.metrics.engine_died(hung=died.hung)
        if died.hung:
            self._hung = (self.core.clock.monotonic_s(), died.reason)
        log.error(
            "engine died",
            action="engine_lost",
            worker_id=self.core.worker_id,
            reason=died.reason,
            code=died.code,
        )
        self._step = None
        self.core.make_way()  # The next one finds out what its device has free.
        if self.artifacts is not None:
            self.artifacts.on_engine_died(died.code)
        message = f"the engine ended: {died.reason}"
        if died.instances is None:
            self._delivery.discard_all()
            self._delivery.fail(died.code, message)
        for instance_id in died.instances or ():
            self._delivery.discard(instance_id)
            self._delivery.fail(died.code, message, instance_id)
        self._groups.on_engine_died(died.instances)
        self.stages.on_engine_died(died.reason, died.code, died.instances)
        self.stages.on_requests_ended()
        # The main engine alone: another one is started for the next stage of its kind.
        if not self.core.engine.alive:
            self._starts.again()

    async def _keep_up(self) -> None:
        async for _ in every(UPKEEP_S):
            await self._handlers.expire()
            self._groups.follow(self.stages.held)
            now_s = self.core.clock.monotonic_s()
            if not self.stages.held.busy:
                self._heard_s = now_s
            elif self.core.engine.alive and now_s - self._heard_s > HANG_S:
                await self.core.engine.kill(f"it said nothing for {HANG_S:g} s")
            for instance_id in self.stages.held.overdue(now_s):
                # Unloading it, which is next, ends them in the engine.
                why = "its instance makes room for others: it goes on elsewhere"
                self._delivery.fail(NotLoaded.code, why, instance_id)
            self.stages.on_requests_ended()
