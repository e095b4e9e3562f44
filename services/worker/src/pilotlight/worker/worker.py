"""One worker: its engine's life, and what the engine says."""

import random
from dataclasses import replace

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import (
    DeviceFailed,
    EngineFailed,
    InternalError,
    NotLoaded,
    PilotlightError,
    WorkerLost,
)
from pilotlight.common.messages.engine import (
    DoorOpened,
    EngineFault,
    EngineUp,
    KvExported,
    PipelineLeft,
    Prefilled,
    Produced,
    RequestReleased,
    SpareReady,
    StageConnected,
    StageFailed,
    StageGrown,
    StageLoaded,
    StageOpened,
    StageRefused,
    StageResized,
    StageUnloaded,
    StepDone,
)
from pilotlight.common.waiting import Backoff, every, pause
from pilotlight.policy.cluster import (
    Device,
    DeviceHealth,
    DeviceKind,
    HealthState,
    Liveness,
    WorkerFacts,
    together,
)
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import RequestKey
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.device_watch import DeviceWatch
from pilotlight.worker.engines.client import EngineDied, EngineEvent
from pilotlight.worker.groups import Groups
from pilotlight.worker.handlers import Handlers
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.publisher import TokenPublisher
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
RESTARTS = 8
"""Attempts to start an engine that ends at its start, before the worker ends itself."""
SETTLED_S = 30.0
"""An engine that has lived for this long starts anew at once when it dies."""

_Sampled = tuple[Produced, Moment | None]
"""What the engine gave a request, and when."""


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
    ) -> None:
        self.core = core
        self._groups = groups or Groups(core, "", None)
        self._watch = watch
        self.stages = Stages(core, loader, self._on_settled)
        self._kind = kind
        self._spans = PrefillSpans(core.background)
        self._handlers = Handlers(core, self.stages, self._spans)
        self._publisher = TokenPublisher(core.bus, core.background, core.worker_id)
        self._reporter = Reporter(core, bucket, incarnation, self.facts, lambda: self.stages.epoch)
        self._up: EngineUp | None = None
        self._step: StepDone | None = None
        """The engine's last."""
        self._unproven: dict[InstanceId, list[_Sampled]] = {}
        """What came of stages of which it is still to be found that their parts were whole."""
        self._heard_s = 0.0
        """When the engine last said something, or got work after having none."""
        self._started_s = 0.0
        self._hung: tuple[float, str] | None = None
        """When an engine was last found hanging, and why."""
        self._failures = 0
        self._running = False
        self._restarting = False
        """An engine is being started, or it is found out whether one may be."""
        self._rng = random.Random()

    async def start(self) -> None:
        """Start the engine, listen, report.

        On a device that has failed no engine is started, until it is well again.

        Raises:
            EngineFailed: the engine does not start.
        """
        if self._running:
            return
        self._running = self._restarting = True
        background = self.core.background
        if self._watch is not None:
            await self._watch.start(self._on_health)
        try:
            if self._usable:
                await self._start_engine()
        except EngineFailed:
            if self._usable:
                raise
        self._restarting = False
        self.core.engine.follow(self._on_event)
        background.spawn(f"upkeep of {self.core.worker_id}", self._keep_up())
        await self._handlers.start()
        self._reporter.start()

    async def stop(self) -> None:
        """Refuse new requests, tell the gateways of the others, end the engine."""
        if not self._running:
            return
        self._running = False
        await self._handlers.stop()
        self.stages.stop()
        self._fail_requests(WorkerLost.code, "the worker ends")
        await self._publisher.drain()
        await self.core.engine.stop()
        if self._watch is not None:
            await self._watch.stop()

    def not_ready(self) -> str | None:
        """Why it can load nothing at the moment."""
        if not self._usable:
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
                replace(one, port=self._groups.port)
                for one in self.stages.facts(core.clock.monotonic_s())
            ),
            queue_requests=waiting,
            running_requests=core.table.running - waiting,
            kv_free_tokens=last.kv_free_tokens
            if last is not None and last.running
            else self.stages.kv_capacity_tokens,
            step_time_s=last.step_time_s if last is not None else 0.0,
            engine_up=core.engine.alive and self._usable,
            health=self._health,
        )

    def _devices(self, up: EngineUp | None) -> tuple[Device, ...]:
        """Those that the engine computes on: it has one."""
        by_driver = self._watch.names if self._watch is not None else ()
        only = Device(
            kind=self._kind,
            name=up.device_name if up else next(iter(by_driver), ""),
            memory_bytes=self.core.device_bytes,
            load_bytes_per_s=up.load_bytes_per_s if up else 0.0,
            granule_bytes=up.granule_bytes if up else 1,
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

    @property
    def _usable(self) -> bool:
        return self._watch is None or self._watch.usable

    def _on_health(self, health: DeviceHealth) -> None:
        """The device is another than it was.

        What runs on one that has failed ends; nothing is started there before it is well.
        """
        core = self.core
        core.metrics.device_health(health.state)
        core.changed.set()
        if not self._running:
            return
        if health.state is HealthState.FAILED:
            core.background.spawn(
                f"end engine of {core.worker_id}",
                core.engine.kill(health.reason, DeviceFailed.code),
            )
        elif not core.engine.alive and not self._restarting:
            self._failures = 0
            self._restart()

    async def _start_engine(self) -> None:
        self._up = up = await self.core.engine.start()
        self.core.device_bytes = up.device_bytes or self.core.device_bytes
        if self._watch is not None:
            self._watch.promise(self.core.device_bytes)
        self._step = None
        self._started_s = self._heard_s = self.core.clock.monotonic_s()
        if not self._usable:
            # It has failed since it was looked at, and what was killed then may have been none.
            await self.core.engine.kill(self._health.reason, DeviceFailed.code)

    async def _on_event(self, told: Timed[EngineEvent]) -> None:
        self._heard_s = self.core.clock.monotonic_s()
        try:
            self._on(told.message, told.sent)
        except InternalError as error:
            await self._distrust(error, self._source_of(told.message))

    def _source_of(self, event: EngineEvent) -> InstanceId | None:
        """An instance of the engine that took a step, if it is known: a step is one engine's."""
        produced = event.produced if isinstance(event, StepDone) else ()
        instances = (
            self.core.table.instance_of(RequestKey(one.request_id, one.attempt)) for one in produced
        )
        return next((one for one in instances if one is not None), None)

    async def _distrust(self, error: InternalError, having: InstanceId | None) -> None:
        """An engine's books are wrong, for one request or for more: its tokens cannot be trusted.

        Args:
            error: what is wrong.
            having: an instance that the engine has; None: it is not known which engine it is, and
                all of them end.
        """
        log.error("engine talks nonsense", action="engine_incoherent", error=error.message)
        await self.core.engine.kill(error.message, having=having)

    def _on(self, event: EngineEvent, sent: Moment | None) -> None:
        match event:
            case StepDone():
                self._on_step(event, sent)
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
                self._groups.on_refused(event)
            case PipelineLeft():
                self._groups.on_left(event)
                self.stages.on_pipeline_left(event)
            case DoorOpened():
                self._groups.on_door(event.port)
            case StageUnloaded():
                self.stages.on_unloaded(event.instance_id)
            case Prefilled():
                self.core.phases.add(event.instance_id, *event.earlier, event.phase)
            case EngineDied():
                self._on_death(event)
            case (
                EngineUp()
                | SpareReady()
                | EngineFault()
                | StageConnected()
                | StageResized()
                | KvExported()
                | RequestReleased()
            ):
                pass

    def _on_step(self, step: StepDone, sampled: Moment | None) -> None:
        self._step = step
        self.core.metrics.stepped(step)
        now: list[_Sampled] = []
        for produced in step.produced:
            instance_id = self.core.table.instance_of(
                RequestKey(produced.request_id, produced.attempt)
            )
            if instance_id is not None and self.stages.unproven(instance_id):
                self._unproven.setdefault(instance_id, []).append((produced, sampled))
            else:
                now.append((produced, sampled))
        self._hand_out(now)

    def _hand_out(self, produced: list[_Sampled]) -> None:
        for one, sampled in produced:
            self._on_produced(one, sampled)
        self._publisher.flush()
        if any(one.finish is not None for one, _ in produced):
            self.core.metrics.running.set(self.core.table.running)
            self.stages.on_requests_ended()

    def _on_settled(self, instance_id: InstanceId, error: PilotlightError | None) -> None:
        """A load has ended: its tokens may leave, or its requests have to go on elsewhere."""
        self._groups.follow(self.stages.held)
        produced = self._unproven.pop(instance_id, [])
        if error is not None:
            self._fail_requests(error.code, error.message, instance_id)
            return
        try:
            self._hand_out(produced)
        except InternalError as nonsense:
            self.core.background.spawn(
                f"distrust the engine of {self.core.worker_id}",
                self._distrust(nonsense, instance_id),
            )

    def _on_produced(self, produced: Produced, sampled: Moment | None) -> None:
        self._spans.end(RequestKey(produced.request_id, produced.attempt))
        self.core.metrics.tokens.inc(len(produced.token_ids))
        if produced.finish is not None:
            self.core.metrics.finished.labels(finish=produced.finish.value).inc()
        outgoing = self.core.table.produced(produced, self.core.clock.monotonic_s())
        if outgoing is not None:
            self._publisher.add(outgoing, sampled)

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
        message = f"the engine ended: {died.reason}"
        if died.instances is None:
            self._unproven.clear()
            self._fail_requests(died.code, message)
        for instance_id in died.instances or ():
            self._unproven.pop(instance_id, None)
            self._fail_requests(died.code, message, instance_id)
        self._groups.on_engine_died(died.instances)
        self.stages.on_engine_died(died.reason, died.code, died.instances)
        self.stages.on_requests_ended()
        # The main engine alone: another one is started for the next stage of its kind.
        if self._running and not self._restarting and not self.core.engine.alive:
            self._restart()

    def _restart(self) -> None:
        # Not in the task: in the turn of the loop before it begins another event may want the same.
        self._restarting = True
        self.core.background.spawn(
            f"restart engine of {self.core.worker_id}", self._restart_engine()
        )

    async def _restart_engine(self) -> None:
        """Start the next one, unless the device has failed; raises, which ends the worker, when
        that fails time and again.
        """
        try:
            await self._start_again()
        finally:
            self._restarting = False
        self.core.changed.set()
        self.stages.reconcile()

    async def _start_again(self) -> None:
        if self.core.clock.monotonic_s() - self._started_s >= SETTLED_S:
            self._failures = 0
        backoff = Backoff(first_s=0.2, limit_s=10.0)
        while self._running:
            if self._failures > 0:
                await pause(backoff.delay_s(self._failures - 1, self._rng))
            if self._watch is not None:
                await self._watch.fresh()
            if not self._usable:
                log.error(
                    "no engine on a device that has failed",
                    action="device_left_alone",
                    reason=self._health.reason,
                )
                return
            self._failures += 1
            try:
                await self._start_engine()
                break
            except EngineFailed as error:
                if self._failures >= RESTARTS and self._usable:
                    raise
                log.error(
                    "engine does not start",
                    action="engine_start_failed",
                    attempt=self._failures,
                    error=error.message,
                )

    def _fail_requests(
        self, code: str, message: str, instance_id: InstanceId | None = None
    ) -> None:
        """Those of one instance, or all."""
        for outgoing in self.core.table.fail(
            code, message, self.core.clock.monotonic_s(), instance_id
        ):
            self._spans.end(RequestKey(outgoing.entry.request_id, outgoing.entry.attempt))
            self._publisher.add(outgoing)
        self._publisher.flush()

    async def _keep_up(self) -> None:
        async for _ in every(UPKEEP_S):
            await self._handlers.expire()
            self._groups.follow(self.stages.held)
            now_s = self.core.clock.monotonic_s()
            if not self.stages.busy:
                self._heard_s = now_s
            elif self.core.engine.alive and now_s - self._heard_s > HANG_S:
                await self.core.engine.kill(f"it said nothing for {HANG_S:g} s")
            for instance_id in self.stages.overdue(now_s):
                # Unloading it, which is next, ends them in the engine.
                self._fail_requests(
                    NotLoaded.code,
                    "its instance makes room for others: it goes on elsewhere",
                    instance_id,
                )
            self.stages.on_requests_ended()
