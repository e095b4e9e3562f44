"""What this gateway knows of instances, workers and nodes: the bucket ``instances`` and the reports.

Nobody is asked and nothing is decided here: it is a view, as old as the last message, by this process's monotonic clock. When NATS
is gone the last view is kept, and nobody is taken for dead because nothing is heard.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import structlog

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.errors import PilotlightError, SourceChanged, WorkerLost
from pilotlight.common.messages.reports import (
    LOADER_REPORTS,
    WORKER_REPORTS,
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.newest import Newest
from pilotlight.common.service import Background
from pilotlight.common.waiting import every
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.liveness import DEAD_AFTER_S, FORGET_AFTER_S, LAST_WORDS_S, liveness_of
from pilotlight.policy.types import (
    Digest,
    HeldStage,
    Instance,
    InstanceId,
    InstanceState,
    Liveness,
    ModelName,
    NodeFacts,
    NodeId,
    WorkerFacts,
    WorkerId,
)

log = structlog.get_logger()

CHECK_INTERVAL_S = 0.1
FORGET_FAILURE_S = 600.0
"""A failed start explains nothing any more after this time: longer than requests wait."""
STALL_S = 0.5
"""A check that is later than this says that this process did not run: whatever was sent to it meanwhile lies unread."""


@dataclass(slots=True)
class _Worker:
    facts: WorkerFacts
    incarnation: str
    heard_s: float
    lost: bool = False
    declared_dead_s: float | None = None


@dataclass(slots=True)
class _Node:
    facts: NodeFacts
    heard_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """An instance, and since when this gateway has seen it serving (None while it does not)."""

    instance: Instance
    serving_since_s: float | None
    shown_s: float = 0.0
    """When the word was sent of which it was seen serving."""

    @property
    def serving(self) -> bool:
        """It was seen serving; otherwise it loads."""
        return self.serving_since_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """A start that came to nothing. ``reason`` is a code of the taxonomy and a sentence."""

    digest: Digest
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """How far a model's start has come: its phase's name, and the fetched share where it is known."""

    phase: str
    fetched: float | None = None


class Fleet:
    """The view, a component.

    ``on_change`` is called when an instance may have become usable, ``on_lost`` when a worker is gone, ``on_source_changed`` when a
    model cannot be started any more as it is registered.
    """

    def __init__(self, bus: Bus, clock: Clock, background: Background) -> None:
        self._bus = bus
        self._clock = clock
        self._background = background
        self._instances: dict[InstanceId, Seen] = {}
        self._of_model: dict[ModelName, set[InstanceId]] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._nodes: dict[NodeId, _Node] = {}
        self._changed: list[Callable[[ModelName], None]] = []
        self._lost: list[Callable[[WorkerId, PilotlightError], None]] = []
        self._source_changed: list[Callable[[ModelName, Digest, PilotlightError], None]] = []
        self._failed: dict[ModelName, FailedStart] = {}
        self._gone: list[Callable[[InstanceId], None]] = []
        self._subscriptions: list[Subscription] = []
        self._newest = Newest()

    def on_change(self, callback: Callable[[ModelName], None]) -> None:
        """Call with a model whose instances, or their workers, have changed."""
        self._changed.append(callback)

    def on_lost(self, callback: Callable[[WorkerId, PilotlightError], None]) -> None:
        """Call with a worker whose requests are lost, once for each death."""
        self._lost.append(callback)

    def on_gone(self, callback: Callable[[InstanceId], None]) -> None:
        """Call with an instance that has ended and is known no longer."""
        self._gone.append(callback)

    def on_source_changed(self, callback: Callable[[ModelName, Digest, PilotlightError], None]) -> None:
        """Call with a model whose start failed because its files are not those that were registered."""
        self._source_changed.append(callback)

    async def start(self) -> None:
        """Listen; what is there already arrives within a moment.

        Raises:
            BusUnavailable: the bucket cannot be opened.
        """
        if self._subscriptions:
            return
        bucket = await self._bus.bucket(INSTANCES)
        self._subscriptions.append(await self._bus.subscribe(WORKER_REPORTS, WorkerReport, self._on_worker_report))
        self._subscriptions.append(await self._bus.subscribe(LOADER_REPORTS, LoaderReport, self._on_loader_report))
        self._background.spawn("watch instances", bucket.watch(Instance, self._on_instance))
        self._background.spawn("check liveness", self._check_for_ever())

    async def stop(self) -> None:
        """Listen no more."""
        for subscription in self._subscriptions:
            await subscription.end()
        self._subscriptions.clear()

    # What others ask.

    def instances(self, model: ModelName | None = None) -> tuple[Seen, ...]:
        """Instances of one model, or all."""
        if model is None:
            return tuple(self._instances.values())
        return tuple(self._instances[instance_id] for instance_id in sorted(self._of_model.get(model, ())))

    def knows(self, instance_id: InstanceId) -> bool:
        """Whether the instance lives, or has ended a moment ago."""
        return instance_id in self._instances

    def failed_start(self, model: ModelName, digest: Digest) -> FailedStart | None:
        """The last start of a model, when it failed and none succeeded since."""
        failed = self._failed.get(model)
        return failed if failed is not None and failed.digest == digest else None

    def serving(self, model: ModelName) -> tuple[Seen, ...]:
        """Instances of a model that take requests."""
        return tuple(seen for seen in self.instances(model) if seen.instance.state in SERVING)

    def open(self, model: ModelName) -> tuple[Seen, ...]:
        """Instances of a model that are still loading and take requests already."""
        starting = (seen for seen in self.instances(model) if seen.instance.state in STARTING)
        return tuple(seen for seen in starting if (held := self._held(seen.instance)) is not None and held.open)

    def serves(self, instance_id: InstanceId) -> bool:
        """Whether an instance takes requests and has every part in place."""
        seen = self._instances.get(instance_id)
        return seen is not None and seen.serving

    def worker(self, worker_id: WorkerId) -> WorkerFacts | None:
        """The last report of a worker, with its liveness by this gateway's clock."""
        worker = self._workers.get(worker_id)
        return self._judged(worker) if worker is not None else None

    def workers(self) -> tuple[WorkerFacts, ...]:
        """The last report of every worker."""
        return tuple(self._judged(worker) for worker in self._workers.values())

    def nodes(self) -> tuple[NodeFacts, ...]:
        """The last report of every loader, with its liveness by this gateway's clock."""
        now_s = self._clock.monotonic_s()
        return tuple(replace(node.facts, liveness=liveness_of(now_s - node.heard_s)) for node in self._nodes.values())

    def liveness(self, worker_id: WorkerId) -> Liveness:
        """May it get work? A worker that was never heard is suspect."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return Liveness.SUSPECT
        return self._liveness(worker)

    def kv_capacity_tokens(self, instance: Instance) -> int:
        """Tokens for which an instance's KV has room, as its lead reports it; 0 when that is not known."""
        held = self._held(instance)
        return held.kv_capacity_tokens if held is not None else 0

    def progress(self, model: ModelName, digest: Digest) -> StartProgress:
        """What a held request's client is told."""
        starting = [seen.instance for seen in self.instances(model) if seen.instance.state in STARTING]
        if not starting:
            return StartProgress(phase="queue")
        instance = max(starting, key=lambda each: list(InstanceState).index(each.state))
        phase = {InstanceState.PLANNED: "schedule", InstanceState.FETCHING: "fetch"}.get(instance.state, "load")
        nodes = {placement.node_id for placement in instance.placements}
        return StartProgress(phase=phase, fetched=self._fetched(nodes, digest))

    # What arrives.

    async def _on_instance(self, key: str, instance: Instance | None) -> None:
        before = self._instances.get(InstanceId(key))
        if instance is None:
            if before is not None:
                del self._instances[InstanceId(key)]
                self._of_model[before.instance.model].discard(InstanceId(key))
                for callback in self._gone:
                    callback(InstanceId(key))
                self._tell(before.instance.model)
            return
        if before is not None and instance.epoch < before.instance.epoch:
            # Written late by a leader that has been replaced; its successor shows the instance again.
            return
        if instance.state not in SERVING:
            seen = Seen(instance, None)
        elif before is not None and before.serving_since_s is not None:
            seen = replace(before, instance=instance)
        else:
            now = moment_of(self._clock)
            seen = Seen(instance, now.at_s, departed_s(instance.shown, now))
        self._instances[instance.instance_id] = seen
        self._of_model.setdefault(instance.model, set()).add(instance.instance_id)
        if instance.state in SERVING:
            self._failed.pop(instance.model, None)
        elif instance.state is InstanceState.FAILED and not instance.served and (before is None or before.instance != instance):
            self._take_failure(instance)
        self._tell(instance.model)

    def _take_failure(self, instance: Instance) -> None:
        failed = FailedStart(digest=instance.digest, reason=instance.reason, at_s=self._clock.monotonic_s())
        self._failed[instance.model] = failed
        code, _, sentence = instance.reason.partition(": ")
        if code == SourceChanged.code:
            for callback in self._source_changed:
                callback(instance.model, instance.digest, SourceChanged(f"{instance.model} cannot be loaded: {sentence}"))

    async def _on_worker_report(self, report: WorkerReport) -> None:
        now_s = self._clock.monotonic_s()
        worker_id = report.facts.worker_id
        if not self._newest.is_news(worker_report_subject(worker_id), report.incarnation, report.seq):
            return
        worker = self._workers.get(worker_id)
        if worker is None:
            self._workers[worker_id] = _Worker(report.facts, report.incarnation, now_s)
        elif worker.incarnation != report.incarnation:
            self._lose(worker, "the worker was started anew")
            self._workers[worker_id] = _Worker(report.facts, report.incarnation, now_s)
        elif worker.declared_dead_s is not None and now_s - worker.declared_dead_s < LAST_WORDS_S:
            return
        else:
            worker.facts, worker.heard_s, worker.lost, worker.declared_dead_s = report.facts, now_s, False, None
        for model in {held.model for held in report.facts.held}:
            self._tell(model)

    async def _on_loader_report(self, report: LoaderReport) -> None:
        now_s = self._clock.monotonic_s()
        if not self._newest.is_news(loader_report_subject(report.facts.node_id), report.incarnation, report.seq):
            return
        self._nodes[report.facts.node_id] = _Node(report.facts, now_s)
        for worker_id in report.dead_workers:
            worker = self._workers.get(worker_id)
            if worker is not None and worker.declared_dead_s is None and not worker.lost:
                worker.declared_dead_s = now_s
                worker.heard_s = now_s - DEAD_AFTER_S
                self._lose(worker, "its node's loader saw it end")

    # Liveness.

    async def _check_for_ever(self) -> None:
        checked_s = self._clock.monotonic_s()
        async for _ in every(CHECK_INTERVAL_S):
            late_s = self._clock.monotonic_s() - checked_s - CHECK_INTERVAL_S
            if late_s > STALL_S:
                self.was_away(late_s)
            checked_s = self._clock.monotonic_s()
            self.check()

    def was_away(self, seconds: float) -> None:
        """This process did not run for so long: silence in that time says nothing about others."""
        log.warning("this process did not run for a while", action="gateway_stalled", seconds=round(seconds, 3))
        for worker in self._workers.values():
            if not worker.lost:
                worker.heard_s += seconds
        for node in self._nodes.values():
            node.heard_s += seconds

    def check(self) -> None:
        """Find out who has been silent for too long."""
        now_s = self._clock.monotonic_s()
        if not self._bus.connected:
            # Silence says nothing about them while nothing can be heard.
            for worker in self._workers.values():
                if not worker.lost:
                    worker.heard_s = now_s
            for node in self._nodes.values():
                if liveness_of(now_s - node.heard_s) is not Liveness.DEAD:
                    node.heard_s = now_s
            return
        for worker_id, worker in list(self._workers.items()):
            if not worker.lost and self._liveness(worker) is Liveness.DEAD:
                self._lose(worker, f"it has been silent for {now_s - worker.heard_s:.1f} s")
            if now_s - worker.heard_s > FORGET_AFTER_S:
                del self._workers[worker_id]
        self._failed = {model: one for model, one in self._failed.items() if now_s - one.at_s <= FORGET_FAILURE_S}
        for node_id, node in list(self._nodes.items()):
            if now_s - node.heard_s > FORGET_AFTER_S:
                del self._nodes[node_id]

    def _lose(self, worker: _Worker, why: str) -> None:
        if worker.lost:
            return
        worker.lost = True
        worker_id = worker.facts.worker_id
        log.warning("worker lost", action="worker_lost", worker_id=worker_id, why=why)
        for callback in self._lost:
            callback(worker_id, WorkerLost(f"worker {worker_id} is gone: {why}"))

    def _liveness(self, worker: _Worker) -> Liveness:
        return liveness_of(self._clock.monotonic_s() - worker.heard_s)

    def _held(self, instance: Instance) -> HeldStage | None:
        """What an instance's lead says of it."""
        worker = self._workers.get(instance.lead)
        held = worker.facts.held if worker is not None else ()
        return next((stage for stage in held if stage.instance_id == instance.instance_id), None)

    def _judged(self, worker: _Worker) -> WorkerFacts:
        return replace(worker.facts, liveness=self._liveness(worker))

    def _fetched(self, nodes: Iterable[NodeId], digest: Digest) -> float | None:
        done = total = 0
        for node_id in nodes:
            node = self._nodes.get(node_id)
            for transfer in node.facts.transfers if node is not None else ():
                if transfer.digest == digest:
                    done += transfer.done_bytes
                    total += transfer.total_bytes
        return done / total if total else None

    def _tell(self, model: ModelName) -> None:
        for callback in self._changed:
            callback(model)
