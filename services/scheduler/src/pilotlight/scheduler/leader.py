"""One term of leadership: gathers what is known, has control decide, carries it out."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import compress
from operator import not_

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.db.retention import Pruner
from pilotlight.common.errors import BusUnavailable, DatabaseUnavailable, NotLeader, error_of
from pilotlight.common.waiting import Group, every, pause, woken
from pilotlight.policy.cluster import NodeFacts, WorkerView
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.line import next_try_s, shortened
from pilotlight.policy.control.plan import ControlFacts, Memory, Plan, Refusal, StartOrder
from pilotlight.policy.control.plan import Term as TermFacts
from pilotlight.policy.control.waiters import Waiters
from pilotlight.policy.ids import Epoch, GrantId, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import SERVING
from pilotlight.policy.placement import owed_service
from pilotlight.policy.plan import Instance
from pilotlight.scheduler.announcement import Announcer
from pilotlight.scheduler.applier import Applier
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.decision_log import DecisionLog
from pilotlight.scheduler.garbage import Garbage, between_turns
from pilotlight.scheduler.grower import Grower
from pilotlight.scheduler.lease import Fence
from pilotlight.scheduler.operator_requests import OperatorRequests
from pilotlight.scheduler.operators import Operators
from pilotlight.scheduler.pacing import Pacing
from pilotlight.scheduler.publisher import InstancePublisher
from pilotlight.scheduler.records import trace_parent_of
from pilotlight.scheduler.repository import SchedulerRepository, retention
from pilotlight.scheduler.room import RoomClient
from pilotlight.scheduler.rules import rules_of
from pilotlight.scheduler.starter import Starter
from pilotlight.scheduler.teller import Teller
from pilotlight.scheduler.term_context import TermContext

log = structlog.get_logger()

TICK_S = 0.25
SETTLE_S = 0.5
ANNOUNCED_S = 0.25
"""A term waits so long at most for its announcement before it looks at everything: until then it
commands nothing, and would look in vain."""


class Term:
    """Leads under one epoch, until the lease is lost."""

    def __init__(self, term_context: TermContext, fence: Fence, check: Callable[[], None]) -> None:
        """``check`` raises ``NotLeader`` once the lease may have run out; asked before anything is
        said to others.
        """
        context, world, metrics = term_context.context, term_context.world, term_context.metrics
        settings = context.settings
        self._clock: Clock = context.clock
        self._world = world
        self._wake = term_context.wake
        self._background = context.background
        self._metrics = metrics
        self._epoch: Epoch = fence.epoch
        self._started_s = self._clock.monotonic_s()
        self._rules = rules_of(settings, self._started_s)
        self._memory = Memory()
        self._pacing = Pacing(self._clock, self._rules)
        self._waiters: Waiters | None = None
        self._log = DecisionLog(
            folder=settings.decision_log_dir,
            file_bytes=settings.decision_log_file_bytes,
            keep_bytes=settings.decision_log_bytes,
            epoch=self._epoch,
            rules=self._rules,
            clock=self._clock,
        )
        self._refusals: list[Refusal] = []
        self._got_room: list[ModelName] = []
        self._group = Group()
        self._lease_holds = check
        self._announcer = Announcer(term_context.leader_bucket, self._epoch, check)
        self._announced = False
        """Nothing is commanded before: a loader that was away must learn the newest epoch first."""
        self._turned = False
        """A turn has ended: mostly one that told everybody what to hold."""
        self._heard_of = asyncio.Event()
        """Some term is announced."""
        self._shown_after = term_context.world.reconnects
        self._requests = OperatorRequests()
        self.room = RoomClient(context.bus, self._epoch, self, self._owed)
        self.book = Book()
        self.operators = Operators(
            requests=self._requests, book=self.book, world=world, clock=self._clock, wake=self._wake
        )
        self._repository = SchedulerRepository(term_context.database, fence, self._clock)
        self._pruner = Pruner(
            retention(settings),
            term_context.database,
            self._clock,
            term_context.prune_metrics,
            interval_s=settings.prune_interval_s,
            unit_of_work=fence.unit_of_work,
        )
        self.cold_starts = ColdStarts(
            self._repository, self.book, self._clock, context.service, metrics
        )
        self._publisher = InstancePublisher(term_context.bucket, self._clock, self)
        self._teller = Teller(context.bus, self._epoch, self, self._clock)
        self._applier = Applier(
            epoch=self._epoch,
            clock=self._clock,
            book=self.book,
            repository=self._repository,
            publisher=self._publisher,
            cold_starts=self.cold_starts,
            effects=self,
        )
        self._starter = Starter(
            book=self.book,
            repository=self._repository,
            applier=self._applier,
            room=self.room,
            teller=self._teller,
            publisher=self._publisher,
            cold_starts=self.cold_starts,
            metrics=metrics,
            clock=self._clock,
            effects=self,
        )
        self._grower = Grower(
            book=self.book,
            room=self.room,
            effects=self,
            clock=self._clock,
            spawn=lambda work, name: self._group.create_task(work, name=name),
            wake=term_context.wake.set,
        )

    def _owed(self, worker_id: WorkerId) -> tuple[InstanceId, ...]:
        return owed_service(
            [record.instance for record in self.book.books.on_worker(worker_id)],
            self._rules.drain.placement.service,
            self._clock.monotonic_s(),
        )

    async def load(self) -> None:
        """Read the rows: what the last leader intended.

        Raises:
            NotLeader: the database does not answer.
        """
        try:
            stored = await self._repository.load()
            parents = {record.instance_id: trace_parent_of(record) for record in stored.cold_starts}
            records = [
                Record(
                    instance=one.instance,
                    model=one.model,
                    trace_parent=parents.get(one.instance.instance_id, ""),
                )
                for one in stored.instances
            ]
            have_room = [one.has_room for one in stored.instances]
            self.book.put(*compress(records, have_room))
            for record in compress(records, map(not_, have_room)):
                await self._applier.fail(record, "its room was promised, and never granted")
        except DatabaseUnavailable as error:
            raise NotLeader(f"the term did not begin: {error.message}") from error
        for record in self.book.rows():
            # Where others are shown as they were, ``sweep`` sees.
            self._publisher.publish(record.instance)
        for record in stored.cold_starts:
            self.cold_starts.open(record)
        self.cold_starts.know(stored.estimates, stored.timings)
        self._metrics.taken_over("rows", self._clock.monotonic_s() - self._started_s)
        log.info(
            "rows read", action="term_loaded", epoch=self._epoch, instances=len(self.book.rows())
        )

    async def lead(self) -> None:
        """Lead until cancelled.

        Raises:
            NotLeader: the lease is lost, or the database or NATS do not answer: whatever was being
                written may be there or not, and the next term reads it anew.
        """
        try:
            async with self._group as group:
                self._metrics.leading(self._epoch)
                group.create_task(self._announcer.run(self._known), name="announcement")
                group.create_task(self._log.run(), name="decision log")
                with between_turns(self._clock.monotonic_s()) as garbage:
                    await self._decide_for_ever(garbage)
        except* (NotLeader, DatabaseUnavailable, BusUnavailable) as errors:
            reasons = [str(error) for error in errors.exceptions]
            raise NotLeader(f"the term is over: {'; '.join(reasons)}") from None
        finally:
            self._metrics.leading(0)
            self._requests.close(NotLeader("the term is over"))

    def _known(self, newest: Epoch) -> None:
        self._world.hear_epoch(newest)
        if newest == self._epoch and not self._announced:
            self._metrics.taken_over("announced", self._clock.monotonic_s() - self._started_s)
        self._announced = newest == self._epoch
        self._heard_of.set()
        self._wake.set()

    # The loop.

    async def _decide_for_ever(self, garbage: Garbage) -> None:
        await woken(self._heard_of, ANNOUNCED_S)
        while True:
            self._wake.clear()
            began_s = self._clock.monotonic_s()
            self._show_anew()
            if self._log.begins:
                # A reader of the file knows nothing from before it.
                self.book.books = self.book.books.settled()
                self._memory = replace(self._memory, index=None)
            facts = self._gather()
            plan = self._pacing.tick(facts, self._memory)
            self._log.note(facts, self._memory, plan)
            await self._apply(plan)
            await self._command(plan, facts.nodes, facts.workers)
            ended_s = self._clock.monotonic_s()
            self._metrics.turned(self._pacing.tick_s, ended_s - began_s)
            if not self._turned:
                self._turned = True
                self._metrics.taken_over("commands", ended_s - self._started_s)
                self._begin_others()
            self._log.squeeze()
            garbage.look(ended_s)
            await self._pacing.rest(self._starter.pressing)
            due_s = next_try_s(facts, self._memory, self._rules) - self._clock.monotonic_s()
            await woken(self._wake, min(TICK_S, max(0.0, due_s)))

    def _begin_others(self) -> None:
        """What waits until a new leader has commanded: it takes as much of the processor."""
        begin = self._group.create_task
        begin(self._publisher.run(), name="instances bucket")
        begin(self._publisher.sweep(), name="instances bucket sweep")
        begin(self._settle_for_ever(), name="cold starts")
        begin(self._pruner.prune_for_ever(), name="old rows")
        begin(self._repository.connect_ahead(), name="connect ahead")

    def _show_anew(self) -> None:
        """After a reconnect the buckets may be empty, for gateways that start then."""
        if self._shown_after != self._world.reconnects:
            self._shown_after = self._world.reconnects
            for record in self.book.rows():
                self._publisher.publish(record.instance)
            self._announcer.again()

    def _gather(self) -> ControlFacts:
        """What is known now, and what changed since the last tick."""
        world, now_s = self._world, self._clock.monotonic_s()
        held, aged_s = world.demand(now_s)
        demand = self._requests.demand(held, now_s - aged_s)
        waiting_since_s = world.waiting_since_s()
        refusals, self._refusals = tuple(self._refusals), []
        got_room, self._got_room = tuple(self._got_room), []
        sent = self._teller.take_sent()
        facts = ControlFacts(
            now_s=now_s,
            term=TermFacts(
                epoch=self._epoch,
                started_s=self._started_s,
                listening_since_s=world.listening_since_s,
                deaf=world.roster.deaf_since_s is not None,
                announced=self._announced,
            ),
            books=self.book.books,
            workers=world.workers(),
            nodes=world.nodes(),
            models=world.models,
            demand=demand,
            demand_seen_s={**self._requests.since_s(), **waiting_since_s},
            awaited=frozenset(waiting_since_s),
            estimates=self.cold_starts.estimates,
            arrivals=world.arrivals.recent(),
            timings=self.cold_starts.timings,
            drains=world.drains(now_s),
            evict=self._requests.evictions(),
            world_version=world.version,
            refusals=refusals,
            started=got_room,
            changed=world.take_changed() | Focus(nodes=self.cold_starts.take_learned()),
            starts_at_once=self._pacing.starts_at_once,
            told_nodes=sent.nodes,
            told_workers=sent.workers,
        )
        if self._waiters is None or not self._waiters.are_of(demand, world.models):
            self._waiters = Waiters(demand, world.models, self._rules.turns)
        return shortened(facts, self._memory, self._rules, aged_s, self._waiters)

    async def _apply(self, plan: Plan) -> None:
        """Write what was decided; starts ask for their room in the background."""
        self.book.books, self._memory = plan.books, plan.memory
        changed, drained = await self._applier.carry_out(plan.changes, plan.drain)
        for after in changed:
            if after.state in SERVING:
                self._requests.warmed(after.model)
        for drain in drained:
            makes_way = drain.makes_way_for is not None
            self._metrics.decided("drain", "made_way" if makes_way else "drained")
        await self._applier.retarget(plan.retarget)
        # First: the plan was made before what has its room now was written.
        self._grower.begin(plan.grow)
        for growth in self._grower.take():
            await self._applier.apply(
                (growth.change,), {growth.change.instance_id: growth.decision}
            )
            self._metrics.decided("consolidation", "started")
        for model, instance_ids in plan.evicted.items():
            self._requests.settle_evicted(model, instance_ids)
        for order in plan.start:
            # In the background: asking for room takes a while, and nothing else must wait for it.
            record = self._starter.begin(order)
            starting = self._start(order, record, self._log.place)
            self._group.create_task(starting, name=f"start {order.model.name}")
        if plan.start:
            # They begin to ask before this turn goes on.
            await pause(0.0)
        for refused in plan.refuse:
            await self._starter.refuse(
                refused, self._world.models.get(refused.model), self._log.place
            )
            self._requests.settle_planned(
                refused.model, None, error_of(refused.code, refused.message)
            )
            self._requests.warmed(refused.model)
        self._metrics.waited(plan.longest_wait_s)
        self._metrics.looked_at(plan.visited)

    async def _command(
        self, plan: Plan, nodes: Mapping[NodeId, NodeFacts], workers: Mapping[WorkerId, WorkerView]
    ) -> None:
        """After the rows: holds say what was decided."""
        for holds in (plan.tell, plan.repeat):
            await self._teller.tell_all(holds, nodes, workers)
            told = (one.worker_id for one in holds.workers)
            self._world.roster.expect(told, self._clock.monotonic_s())

    async def _start(self, order: StartOrder, record: Record, place: str) -> None:
        try:
            outcome = await self._starter.start(order, record, place)
            if isinstance(outcome, Refusal):
                self._refusals.append(outcome)
            else:
                self._got_room.append(order.model.name)
                self._requests.settle_planned(order.model.name, outcome, None)
        finally:
            self._wake.set()

    async def _settle_for_ever(self) -> None:
        async for _ in every(SETTLE_S):
            kinds = {key: one.facts.device.kind for key, one in self._world.workers().items()}
            await self.cold_starts.settle(kinds, self._world.nodes())
            await self.cold_starts.take_shown(self._world.shown)
            self.cold_starts.seed(self._world.profiles, self._world.models, self._world.nodes())
            self._metrics.instances(self.book.books.instances())

    # Effects.

    def check(self) -> None:
        """See ``Effects``."""
        self._lease_holds()

    def instance(self, instance_id: InstanceId) -> Instance | None:
        """See ``Effects``."""
        record = self.book.get(instance_id)
        return record.instance if record is not None else None

    def is_awaited(self, model: ModelName) -> bool:
        """See ``Effects``."""
        return self._world.is_awaited(model)

    def nodes(self) -> Mapping[NodeId, NodeFacts]:
        """See ``Effects``."""
        return self._world.nodes()

    def release(self, grant_id: GrantId) -> None:
        """See ``Effects``."""
        # Not of the term: what its last act leaves reserved is given back all the same.
        self._background.spawn("release a grant", self.room.release(grant_id))
