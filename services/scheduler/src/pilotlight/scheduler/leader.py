"""One term of leadership: wakes on what changes, reconciles, decides, applies, commands."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.clock import Clock
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.retention import PruneMetrics, Pruner
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, ModelNotFound, NotLeader
from pilotlight.common.ids import new_decision_id
from pilotlight.common.messages.demand import Evict, Evicting, Warm, Warming
from pilotlight.common.service import Context
from pilotlight.common.telemetry import current_traceparent
from pilotlight.common.waiting import Group, every, woken
from pilotlight.policy.drain import DrainRules, leaving, plan_drain, staying
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.instance import SERVING
from pilotlight.policy.parallelism import SchemeRules
from pilotlight.policy.placement import PlacementRules
from pilotlight.policy.scaling import Drain, ScalingRules, Start, plan_scaling
from pilotlight.policy.types import (
    Demand,
    Epoch,
    GrantId,
    Instance,
    InstanceId,
    InstanceState,
    Liveness,
    ModelName,
    Snapshot,
    WorkerId,
)
from pilotlight.scheduler.announcement import Announcer
from pilotlight.scheduler.applier import Applier, drain_of
from pilotlight.scheduler.asks import Asks
from pilotlight.scheduler.board import InstanceBoard
from pilotlight.scheduler.book import Book, Entry
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.commands import Dispatcher
from pilotlight.scheduler.lease import Fence
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.planner import Planner, StartOrder
from pilotlight.scheduler.reconcile import ReconcileRules, reconcile
from pilotlight.scheduler.records import Decision, trace_parent_of
from pilotlight.scheduler.repository import SchedulerRepository, retention
from pilotlight.scheduler.room import RoomClient
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.world import WorkerView, World

log = structlog.get_logger()

TICK_S = 0.25
LEARN_S = 1.0
"""Listened for this long, every live worker has reported several times; before that nothing is commanded."""
LEARNED_S = 0.3
"""How long a standby that has listened for that long waits for workers that are silent: longer than their reports are apart."""
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What outlives a term."""

    context: Context[SchedulerSettings]
    database: Database
    world: World
    wake: asyncio.Event
    """Set when a decision may come out differently."""
    bucket: Bucket
    """``instances``."""
    leader_bucket: Bucket
    metrics: SchedulerMetrics
    prune_metrics: PruneMetrics


class Term:
    """Leads under one epoch, until the lease is lost."""

    def __init__(self, standing: Standing, fence: Fence, check: Callable[[], None]) -> None:
        """``check`` raises ``NotLeader`` once the lease may have run out; asked before anything is said to others."""
        context, world, metrics = standing.context, standing.world, standing.metrics
        settings = context.settings
        self._clock: Clock = context.clock
        self._world = world
        self._wake = standing.wake
        self._background = context.background
        self._metrics = metrics
        self._epoch: Epoch = fence.epoch
        self._started_s = self._clock.monotonic_s()
        self._scaling_rules = ScalingRules(instance_requests=settings.instance_requests)
        self._reconcile_rules = ReconcileRules(term_started_s=self._started_s, hold_deadline_s=settings.hold_deadline_s)
        self._group = Group()
        self._starting: set[ModelName] = set()
        self._check = check
        self._announcer = Announcer(standing.leader_bucket, self._epoch, check)
        self._announced = False
        """Nothing is commanded before: who was away must be able to learn whom to obey."""
        self._shown_after = standing.world.reconnects
        self._asks = Asks()
        self._wanted: dict[ModelName, str] = {}
        """Models that are to serve elsewhere before they leave a node that drains, and why."""
        self._room = RoomClient(context.bus, self._epoch, check)
        self.book = Book()
        self._repository = SchedulerRepository(standing.database, fence, self._clock)
        rules, counts, every_s = retention(settings), standing.prune_metrics, settings.prune_interval_s
        fenced = fence.unit_of_work
        self._pruner = Pruner(rules, standing.database, self._clock, counts, interval_s=every_s, unit_of_work=fenced)
        self.cold_starts = ColdStarts(self._repository, self.book, self._clock, context.service, metrics)
        self._board = InstanceBoard(standing.bucket, self._clock, self._shown, check)
        self._dispatcher = Dispatcher(context.bus, self._epoch, check, self._clock)
        self._applier = Applier(
            epoch=self._epoch,
            clock=self._clock,
            book=self.book,
            repository=self._repository,
            board=self._board,
            cold_starts=self.cold_starts,
            release=self._release,
            is_awaited=self._is_awaited,
        )
        placement = PlacementRules(eviction=EvictionRules(min_residency_s=settings.min_residency_s))
        self._drain_rules = DrainRules(replace_within_s=settings.drain_replace_s, placement=placement)
        self._planner = Planner(
            snapshot=self._snapshot,
            book=self.book,
            repository=self._repository,
            room=self._room,
            dispatcher=self._dispatcher,
            board=self._board,
            cold_starts=self.cold_starts,
            metrics=metrics,
            clock=self._clock,
            rules=SchemeRules(placement=placement),
            release=self._release,
            world_version=lambda: world.version,
        )

    async def load(self) -> None:
        """Read the rows: what the last leader intended.

        Raises:
            NotLeader: the database does not answer.
        """
        try:
            stored = await self._repository.load()
        except DatabaseUnavailable as error:
            raise NotLeader(f"the term did not begin: {error.message}") from error
        parents = {record.instance_id: trace_parent_of(record) for record in stored.cold_starts}
        for one in stored.instances:
            trace_parent = parents.get(one.instance.instance_id, "")
            self.book.add(Entry(instance=one.instance, model=one.model, trace_parent=trace_parent))
            self._board.show(one.instance)
        for record in stored.cold_starts:
            self.cold_starts.open(record)
        self.cold_starts.estimates = dict(stored.estimates)
        log.info("rows read", action="term_loaded", epoch=self._epoch, instances=len(self.book.rows()))

    async def lead(self) -> None:
        """Lead until cancelled.

        Raises:
            NotLeader: the lease is lost, or the database does not answer: whatever was being written may be there or not, and the
                next term reads it anew.
        """
        try:
            async with self._group as group:
                self._metrics.leading(self._epoch)
                group.create_task(self._announcer.run(self._known), name="announcement")
                group.create_task(self._board.run(), name="instances bucket")
                group.create_task(self._board.sweep(), name="instances bucket sweep")
                group.create_task(self._settle_for_ever(), name="cold starts")
                group.create_task(self._pruner.prune_for_ever(), name="old rows")
                await self._decide_for_ever()
        except* (NotLeader, DatabaseUnavailable) as errors:
            reasons = [str(error) for error in errors.exceptions]
            raise NotLeader(f"the term is over: {'; '.join(reasons)}") from None
        finally:
            self._metrics.leading(0)
            self._asks.close(NotLeader("the term is over"))

    def _known(self, newest: Epoch) -> None:
        self._world.hear_epoch(newest)
        self._announced = newest == self._epoch
        self._wake.set()

    # What operators ask.

    async def warm(self, ask: Warm) -> Warming:
        """Serve ``WARM_SUBJECT``.

        Raises:
            ModelNotFound: no model of that name is registered.
            NoRoom: it cannot be started now.
        """
        model = self._world.models.get(ask.model)
        if model is None:
            raise ModelNotFound(f"no model is named {ask.model}")
        now_s = self._clock.monotonic_s()
        leaving_ids = {one.instance_id for one in leaving(self._snapshot())}
        known = [
            entry.instance
            for entry in self.book.of_model(ask.model)
            if entry.instance.digest == model.digest and entry.instance.instance_id not in leaving_ids
        ]
        serving = [instance for instance in known if instance.state in SERVING]
        if serving:
            return Warming(instance_id=serving[0].instance_id)
        self._asks.warm(ask.model, ask.trace_parent or current_traceparent(), now_s)
        if known:
            return Warming(instance_id=known[0].instance_id)
        planned = self._asks.planned(ask.model)
        self._wake.set()
        return Warming(instance_id=await planned)

    async def evict(self, ask: Evict) -> Evicting:
        """Serve ``EVICT_SUBJECT``.

        Raises:
            ModelNotFound: no model of that name is registered, and no instance of it is left.
        """
        left = any(entry.instance.model == ask.model for entry in self.book.rows())
        if ask.model not in self._world.models and not left:
            raise ModelNotFound(f"no model is named {ask.model}")
        evicted = self._asks.evict(ask.model)
        self._wake.set()
        return Evicting(instance_ids=await evicted)

    # The loop.

    async def _decide_for_ever(self) -> None:
        while True:
            self._wake.clear()
            await self._decide()
            await woken(self._wake, TICK_S)

    async def _decide(self) -> None:
        """One pass: reports first, for they may free what decisions need; commands last, for they say what was decided.

        While NATS is lost nothing is decided: the last view is kept, and absence is not taken for deletion.
        """
        self._show_anew()
        now_s = self._clock.monotonic_s()
        workers = self._world.workers(now_s)
        demand = self._demand(now_s)
        waited_for = {one.model for one in demand}
        self.book.refresh(workers.values(), waited_for, now_s)
        for change in reconcile(self.book.tracked(), workers, now_s, self._reconcile_rules):
            after = await self._applier.apply(change)
            if after is not None and after.state in SERVING:
                self._asks.warmed(after.model)
        if self._world.deaf_since_s is not None or not self._announced or not self._has_learned(workers, now_s):
            return
        await self._evict_asked()
        await self._empty_nodes()
        plan = plan_scaling(staying(self._snapshot()), self._scaling_rules)
        for drain in plan.drains:
            await self._drain(drain)
        self._begin(plan.starts, demand)
        self._planner.forget(waited_for | {start.model for start in plan.starts})
        now_s = self._clock.monotonic_s()
        await self._dispatcher.publish(self.book.rows(), workers, self._world.nodes(now_s), now_s)
        self._metrics.instances(self.book.instances())

    def _show_anew(self) -> None:
        """After a reconnect the buckets may be empty: a gateway that starts then would not know of what serves."""
        if self._shown_after != self._world.reconnects:
            self._shown_after = self._world.reconnects
            for entry in self.book.rows():
                self._board.show(entry.instance)
            self._announcer.again()

    def _has_learned(self, workers: dict[WorkerId, WorkerView], now_s: float) -> bool:
        """Whether enough was heard to command: a worker must not be told to drop what its leader has merely not heard of."""
        if now_s - self._world.listening_since_s < LEARN_S:
            return False
        placed = {placement.worker_id for entry in self.book.rows() for placement in entry.instance.placements}
        # A standby has listened all along: what it knows is as new as what a leader knows.
        stood_by = self._started_s - self._world.listening_since_s >= LEARN_S
        if stood_by:
            heard = all(worker_id in workers and workers[worker_id].facts.liveness is Liveness.ALIVE for worker_id in placed)
        else:
            heard = all(worker_id in workers and workers[worker_id].heard_s >= self._started_s for worker_id in placed)
        return heard or now_s - self._started_s >= (LEARNED_S if stood_by else LEARN_S)

    async def _evict_asked(self) -> None:
        for model in self._asks.evictions():
            drained: list[InstanceId] = []
            for entry in self.book.rows():
                if entry.instance.model != model:
                    continue
                if entry.instance.state is not InstanceState.DRAINING:
                    drain = Drain(instance_id=entry.instance.instance_id, model=model, reason="an operator evicts the model")
                    await self._drain(drain)
                drained.append(entry.instance.instance_id)
            self._asks.settle_evicted(model, tuple(drained))

    async def _empty_nodes(self) -> None:
        """What is on nodes that drain leaves; what is still needed is wanted elsewhere, as if somebody waited for it."""
        now_s = self._clock.monotonic_s()
        asked = self._asks.demand(self._world.demand(now_s), now_s)
        plan = plan_drain(replace(self._snapshot(), demand=asked), self._drain_rules)
        self._wanted = {one.model: one.reason for one in plan.wanted}
        for drain in plan.drains:
            await self._drain(drain)

    async def _drain(self, drain: Drain) -> None:
        entry = self.book.get(drain.instance_id)
        if entry is None or entry.tentative:
            return
        decision = Decision(
            decision_id=new_decision_id(),
            kind="drain",
            model=drain.model,
            instance_id=drain.instance_id,
            epoch=self._epoch,
            inputs={"instance": to_row_json(entry.instance), "now_s": self._clock.monotonic_s()},
            outcome={"drained": drain.instance_id},
            reasons=(drain.reason,),
        )
        await self._applier.apply(drain_of(drain.instance_id, drain.reason), decision)
        self._metrics.decided("drain", "drained")

    def _begin(self, starts: tuple[Start, ...], demand: tuple[Demand, ...]) -> None:
        """Start in the background: asking for room takes a while, and nothing else must wait for it."""
        traces = {one.model: one.trace_parent for one in demand}
        now_s = self._clock.monotonic_s()
        counts = Counter(start.model for start in starts)
        for start in {start.model: start for start in starts}.values():
            model = self._world.models.get(start.model)
            if model is None or model.name in self._starting or not self._planner.may_try(model.name, now_s):
                continue
            seen_s = self._world.waiting_since_s(model.name) or self._asks.since_s(model.name) or now_s
            reason = start.reason if self._is_awaited(model.name) else self._wanted.get(model.name, start.reason)
            order = StartOrder(model=model, reason=reason, demand_seen_s=seen_s, trace_parent=traces.get(model.name, ""))
            self._starting.add(model.name)
            self._group.create_task(self._start(order, counts[model.name]), name=f"start {model.name}")

    async def _start(self, order: StartOrder, count: int) -> None:
        name = order.model.name
        try:
            for _ in range(count):
                outcome = await self._planner.start(order)
                self._asks.settle_planned(name, outcome.instance_id, outcome.error)
                if outcome.error is not None:
                    self._asks.warmed(name)
                    return
        finally:
            self._starting.discard(name)
            self._wake.set()

    async def _settle_for_ever(self) -> None:
        async for _ in every(SETTLE_S):
            kinds = {key: one.facts.device.kind for key, one in self._world.workers(self._clock.monotonic_s()).items()}
            await self.cold_starts.settle(kinds)

    # What the parts ask of one another.

    def _snapshot(self) -> Snapshot:
        now_s = self._clock.monotonic_s()
        return Snapshot(
            now_s=now_s,
            epoch=self._epoch,
            models=tuple(self._world.models.values()),
            nodes=tuple(self._world.nodes(now_s).values()),
            workers=tuple(worker.facts for worker in self._world.workers(now_s).values()),
            instances=self.book.instances(),
            demand=self._demand(now_s),
            estimates=tuple(self.cold_starts.estimates.values()),
            drains=self._world.drains(now_s),
        )

    def _demand(self, now_s: float) -> tuple[Demand, ...]:
        asked = self._asks.demand(self._world.demand(now_s), now_s)
        waited_for = {one.model for one in asked}
        wanted = (
            Demand(model=model, waiting=1, oldest_age_s=0.0, deadline_in_s=self._drain_rules.replace_within_s)
            for model in self._wanted
            if model not in waited_for
        )
        return (*asked, *wanted)

    def _shown(self, instance_id: InstanceId) -> Instance | None:
        entry = self.book.get(instance_id)
        return entry.instance if entry is not None else None

    def _is_awaited(self, model: ModelName) -> bool:
        return any(one.model == model and one.waiting > 0 for one in self._world.demand(self._clock.monotonic_s()))

    def _release(self, grant_id: GrantId) -> None:
        # Not of the term: what its last act leaves reserved is given back all the same.
        self._background.spawn("release a grant", self._room.release(grant_id))
