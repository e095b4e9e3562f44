"""What this gateway knows of instances, workers and nodes: the bucket ``instances`` and the
reports.

Nothing is asked and nothing is decided here: it is a view, as old as the last message. Workers and
nodes are the roster's (``common.roster``): when NATS is gone the last view is kept, and silence is
no death.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import structlog

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import PilotlightError, SourceChanged, WorkerLost
from pilotlight.common.roster import News, Roster
from pilotlight.common.roster_feed import RosterFeed
from pilotlight.common.service import Background
from pilotlight.policy.cluster import HeldStage, Liveness, NodeFacts, WorkerFacts
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.plan import Instance, InstanceState

log = structlog.get_logger()

FORGET_FAILURE_S = 600.0
"""A failed start explains nothing any more after this time: longer than requests wait."""


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
    """How far a model's start has come: its phase's name, and the fetched share where it is
    known.
    """

    phase: str
    fetched: float | None = None


class Fleet:
    """The view, a component.

    ``on_change`` is called when an instance may have become usable, ``on_lost`` when a worker is
    gone, ``on_source_changed`` when a model cannot be started any more as it is registered.
    """

    def __init__(self, bus: Bus, clock: Clock, background: Background) -> None:
        self._bus = bus
        self._clock = clock
        self._background = background
        self.reports = RosterFeed(bus, clock, background, Roster())
        self.reports.on_news(self._on_news)
        self._roster = self.reports.roster
        self._instances: dict[InstanceId, Seen] = {}
        self._of_model: dict[ModelName, set[InstanceId]] = {}
        self._serving: dict[ModelName, tuple[Seen, ...]] = {}
        """As ``serving`` said last, until an instance of the model changes."""
        self._changed: list[Callable[[ModelName], None]] = []
        self._lost: list[Callable[[WorkerId, PilotlightError], None]] = []
        self._source_changed: list[Callable[[ModelName, Digest, PilotlightError], None]] = []
        self._failed: dict[ModelName, FailedStart] = {}
        self._gone: list[Callable[[InstanceId], None]] = []
        self._started = False

    def on_change(self, callback: Callable[[ModelName], None]) -> None:
        """Call with a model whose instances, or their workers, have changed."""
        self._changed.append(callback)

    def on_lost(self, callback: Callable[[WorkerId, PilotlightError], None]) -> None:
        """Call with a worker whose requests are lost, once for each death."""
        self._lost.append(callback)

    def on_gone(self, callback: Callable[[InstanceId], None]) -> None:
        """Call with an instance that has ended and is known no longer."""
        self._gone.append(callback)

    def on_source_changed(
        self, callback: Callable[[ModelName, Digest, PilotlightError], None]
    ) -> None:
        """Call with a model whose start failed because its files are not those that were
        registered.
        """
        self._source_changed.append(callback)

    async def start(self) -> None:
        """Listen; what is there already arrives within a moment.

        Raises:
            BusUnavailable: the bucket cannot be opened.
        """
        if self._started:
            return
        bucket = await self._bus.bucket(INSTANCES)
        await self.reports.start()
        self._background.spawn("watch instances", bucket.watch(Timed[Instance], self._on_instance))
        self._started = True

    async def stop(self) -> None:
        """Listen no more."""
        await self.reports.stop()

    # What others ask.

    def instances(self, model: ModelName | None = None) -> tuple[Seen, ...]:
        """Instances of one model, or all."""
        if model is None:
            return tuple(self._instances.values())
        return tuple(
            self._instances[instance_id] for instance_id in sorted(self._of_model.get(model, ()))
        )

    def knows(self, instance_id: InstanceId) -> bool:
        """Whether the instance lives, or has ended a moment ago."""
        return instance_id in self._instances

    def failed_start(self, model: ModelName, digest: Digest) -> FailedStart | None:
        """The last start of a model, when it failed and none succeeded since."""
        failed = self._failed.get(model)
        if (
            failed is None
            or failed.digest != digest
            or self._clock.monotonic_s() - failed.at_s > FORGET_FAILURE_S
        ):
            return None
        return failed

    def serving(self, model: ModelName) -> tuple[Seen, ...]:
        """Instances of a model that take requests."""
        known = self._serving.get(model)
        if known is None:
            known = tuple(seen for seen in self.instances(model) if seen.instance.state in SERVING)
            if known:
                self._serving[model] = known
        return known

    def open(self, model: ModelName) -> tuple[Seen, ...]:
        """Instances of a model that are still loading and take requests already."""
        starting = (seen for seen in self.instances(model) if seen.instance.state in STARTING)
        return tuple(
            seen
            for seen in starting
            if (held := self._held(seen.instance)) is not None and held.open
        )

    def lead_of(self, instance_id: InstanceId) -> WorkerId | None:
        """The worker that speaks for an instance at this moment; None when the instance is not
        known.

        It may move while requests run.
        """
        seen = self._instances.get(instance_id)
        return seen.instance.lead if seen is not None else None

    def serves(self, instance_id: InstanceId) -> bool:
        """Whether an instance takes requests and has every part in place."""
        seen = self._instances.get(instance_id)
        return seen is not None and seen.serving

    def worker(self, worker_id: WorkerId) -> WorkerFacts | None:
        """The last report of a worker, with its liveness."""
        view = self._roster.worker(worker_id)
        return view.facts if view is not None else None

    def workers(self) -> tuple[WorkerFacts, ...]:
        """The last report of every worker."""
        return tuple(view.facts for view in self._roster.workers.values())

    def workers_now(self) -> tuple[WorkerFacts, ...]:
        """As ``workers``, with ages as of now."""
        now_s = self._clock.monotonic_s()
        return tuple(view.facts_at(now_s) for view in self._roster.workers.values())

    def nodes(self) -> tuple[NodeFacts, ...]:
        """The last report of every loader, with its liveness."""
        return tuple(self._roster.nodes.values())

    def liveness(self, worker_id: WorkerId) -> Liveness:
        """May it get work? A worker that was never heard is suspect."""
        view = self._roster.worker(worker_id)
        return view.facts.liveness if view is not None else Liveness.SUSPECT

    def kv_capacity_tokens(self, instance: Instance) -> int:
        """Tokens for which an instance's KV has room, or will have when requests want it, as its
        lead reports it; 0 when that is not known.
        """
        held = self._held(instance)
        return held.kv_reach_tokens if held is not None else 0

    def progress(self, model: ModelName, digest: Digest) -> StartProgress:
        """What a held request's client is told."""
        starting = [
            seen.instance for seen in self.instances(model) if seen.instance.state in STARTING
        ]
        if not starting:
            return StartProgress(phase="queue")
        instance = max(starting, key=lambda each: list(InstanceState).index(each.state))
        phase = {InstanceState.PLANNED: "schedule", InstanceState.FETCHING: "fetch"}.get(
            instance.state, "load"
        )
        nodes = {placement.node_id for placement in instance.placements}
        return StartProgress(phase=phase, fetched=self._fetched(nodes, digest))

    # What arrives.

    async def _on_instance(self, key: str, shown: Timed[Instance] | None) -> None:
        before = self._instances.get(InstanceId(key))
        if shown is None:
            if before is not None:
                self._serving.pop(before.instance.model, None)
                del self._instances[InstanceId(key)]
                self._of_model[before.instance.model].discard(InstanceId(key))
                for callback in self._gone:
                    callback(InstanceId(key))
                self._tell(before.instance.model)
            return
        instance = shown.message
        if before is not None and instance.epoch < before.instance.epoch:
            # Written late by a leader that has been replaced; its successor shows the instance
            # again.
            return
        if instance.state not in SERVING:
            seen = Seen(instance, None)
        elif before is not None and before.serving_since_s is not None:
            seen = replace(before, instance=instance)
        else:
            seen = Seen(instance, self._clock.monotonic_s(), shown.sent_s(self._clock))
        self._serving.pop(instance.model, None)
        self._instances[instance.instance_id] = seen
        self._of_model.setdefault(instance.model, set()).add(instance.instance_id)
        if instance.state in SERVING:
            self._failed.pop(instance.model, None)
        elif (
            instance.state is InstanceState.FAILED
            and not instance.served
            and (before is None or before.instance != instance)
        ):
            self._take_failure(instance)
        self._tell(instance.model)

    def _take_failure(self, instance: Instance) -> None:
        now_s = self._clock.monotonic_s()
        self._failed = {
            model: one
            for model, one in self._failed.items()
            if now_s - one.at_s <= FORGET_FAILURE_S
        }
        failed = FailedStart(digest=instance.digest, reason=instance.reason, at_s=now_s)
        self._failed[instance.model] = failed
        code, _, sentence = instance.reason.partition(": ")
        if code == SourceChanged.code:
            for callback in self._source_changed:
                callback(
                    instance.model,
                    instance.digest,
                    SourceChanged(f"{instance.model} cannot be loaded: {sentence}"),
                )

    def _on_news(self, news: News) -> None:
        for loss in news.losses:
            for callback in self._lost:
                callback(loss.worker_id, WorkerLost(f"worker {loss.worker_id} is gone: {loss.why}"))
        views = (self._roster.worker(worker_id) for worker_id in news.workers)
        for model in {held.model for view in views if view is not None for held in view.facts.held}:
            self._tell(model)

    # Within.

    def _held(self, instance: Instance) -> HeldStage | None:
        """What an instance's lead says of it."""
        lead = self._roster.worker(instance.lead)
        held = lead.facts.held if lead is not None else ()
        for stage in held:
            if stage.instance_id == instance.instance_id:
                return stage
        return None

    def _fetched(self, nodes: Iterable[NodeId], digest: Digest) -> float | None:
        done = total = 0
        for node_id in nodes:
            node = self._roster.node(node_id)
            for transfer in node.transfers if node is not None else ():
                if transfer.digest == digest:
                    done += transfer.done_bytes
                    total += transfer.total_bytes
        return done / total if total else None

    def _tell(self, model: ModelName) -> None:
        for callback in self._changed:
            callback(model)
