"""One start of one model: snapshot, scheme, room, rows, commands."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import (
    CapacityError,
    DatabaseUnavailable,
    NoRoom,
    NotLeader,
    NoWorker,
    PilotlightError,
    TransientError,
)
from pilotlight.common.ids import new_decision_id, new_instance_id
from pilotlight.common.messages.room import Reserved
from pilotlight.common.telemetry import current_traceparent, span, with_parent
from pilotlight.common.waiting import Backoff
from pilotlight.policy.instance import InstanceEvent, step
from pilotlight.policy.parallelism import SchemeChoice, SchemeRules, choose_scheme
from pilotlight.policy.types import (
    Generation,
    GrantId,
    Instance,
    InstanceId,
    InstanceState,
    Model,
    ModelName,
    Placement,
    Scheme,
    Snapshot,
    WorkerId,
)
from pilotlight.scheduler.board import InstanceBoard
from pilotlight.scheduler.book import Book, Entry
from pilotlight.scheduler.chains import Joined, joined
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.commands import Dispatcher
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.records import ColdStart, Decision
from pilotlight.scheduler.repository import SchedulerRepository
from pilotlight.scheduler.room import RoomClient
from pilotlight.scheduler.world import copies_of

log = structlog.get_logger()

MAX_TRIES = 3
"""Workers that are asked for room in one attempt; the next attempt sees newer reports."""
RETRY_AT_ONCE_S = 0.1
"""After a refusal a change of the world is answered no sooner than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """What is to be started, and why."""

    model: Model
    reason: str
    demand_seen_s: float
    trace_parent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A start that is on its way, or why there is none."""

    instance_id: InstanceId | None
    error: PilotlightError | None = None


@dataclass(slots=True)
class _Refused:
    attempts: int
    at_s: float
    retry_at_s: float
    world_version: int
    recorded: frozenset[str] = frozenset()
    """What the recorded decisions said: a model that waits for room must not write rows by the second."""


@dataclass(slots=True)
class Planner:
    """Starts instances. Several models at a time, one start of a model at a time."""

    snapshot: Callable[[], Snapshot]
    book: Book
    repository: SchedulerRepository
    room: RoomClient
    dispatcher: Dispatcher
    board: InstanceBoard
    cold_starts: ColdStarts
    metrics: SchedulerMetrics
    clock: Clock
    rules: SchemeRules
    release: Callable[[GrantId], None]
    world_version: Callable[[], int]
    _refused: dict[ModelName, _Refused] = field(default_factory=dict[ModelName, _Refused])
    _rng: random.Random = field(default_factory=random.Random)

    def may_try(self, model: ModelName, now_s: float) -> bool:
        """False while a refused model waits for its next attempt. A change of workers ends the wait early."""
        refused = self._refused.get(model)
        if refused is None or now_s >= refused.retry_at_s:
            return True
        return refused.world_version != self.world_version() and now_s - refused.at_s >= RETRY_AT_ONCE_S

    def forget(self, wanted: set[ModelName]) -> None:
        """Refusals of models that nobody waits for any more count no longer."""
        self._refused = {model: refused for model, refused in self._refused.items() if model in wanted}

    async def start(self, order: StartOrder) -> Outcome:
        """Try to start one instance.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the start may be written or not; the next term reads it anew.
        """
        with with_parent(order.trace_parent), span("plan cold start", model=order.model.name):
            return await self._start(order, current_traceparent(keep=True))

    async def _start(self, order: StartOrder, trace_parent: str) -> Outcome:
        model = order.model
        refusals: list[tuple[WorkerId, PilotlightError]] = []
        seen = slice_for(model, self.snapshot())
        choice = choose_scheme(model, seen, self.rules)
        while choice.scheme is not None and len(refusals) < MAX_TRIES:
            try:
                instance_id = await self._start_on(choice.scheme, choice, seen, order, trace_parent)
            except (DatabaseUnavailable, NotLeader):
                raise
            except TransientError as error:
                # The cache does not answer: another worker would be asked in vain.
                refusals.append((choice.scheme.placements[0].worker_id, error))
                break
            except CapacityError as error:
                refusals.append((choice.scheme.placements[0].worker_id, error))
            else:
                self._refused.pop(model.name, None)
                return Outcome(instance_id=instance_id)
            seen = slice_for(model, self.snapshot())
            choice = choose_scheme(model, seen, self.rules, frozenset(worker_id for worker_id, _ in refusals))
        return await self._refuse(order, choice, seen, refusals)

    async def _start_on(
        self, scheme: Scheme, choice: SchemeChoice, seen: Snapshot, order: StartOrder, trace_parent: str
    ) -> InstanceId:
        """Reserve, write, command. What was reserved is given back when the rest comes to nothing."""
        model = order.model
        now_s = self.clock.monotonic_s()
        instance = Instance(
            instance_id=new_instance_id(),
            model=model.name,
            digest=model.digest,
            state=InstanceState.PLANNED,
            generation=Generation(1),
            epoch=seen.epoch,
            placements=scheme.placements,
            decision_id=new_decision_id(),
            state_since_s=now_s,
            last_used_s=now_s,
            reason=order.reason,
        )
        entry = Entry(instance=instance, model=model, trace_parent=trace_parent, tentative=True)
        # From here on other decisions count this start, before there is a row of it.
        self.book.add(entry)
        granted: list[Placement] = []
        grants: list[Reserved] = []
        committed = False
        try:
            for placement in scheme.placements:
                grant = await self.room.reserve(instance, model, placement)
                grants.append(grant)
                granted.append(replace(placement, grant_id=grant.grant_id))
            places = joined(model, granted, seen)
            fetching = step(instance.state, InstanceEvent.FETCH_STARTED)
            entry.instance = replace(
                instance, placements=places.placements, state=fetching, state_since_s=self.clock.monotonic_s()
            )
            record = self._record_of(entry, order)
            await self.repository.start(entry.instance, _started(entry.instance, choice, grants, places, seen), record)
            committed = True
        finally:
            if not committed:
                self.book.remove(instance.instance_id)
                for placement in granted:
                    if placement.grant_id is not None:
                        self.release(placement.grant_id)
        entry.tentative = False
        self.board.show(entry.instance)
        self.metrics.decided("cold_start", "started")
        await self._command(entry, record)
        return instance.instance_id

    async def _command(self, entry: Entry, record: ColdStart) -> None:
        self.cold_starts.open(record)
        start_s = self.clock.monotonic_s()
        nodes = {one.node_id: one for one in self.snapshot().nodes}
        await self.dispatcher.dispatch(entry, self.book.rows(), nodes, start_s)
        self.cold_starts.dispatched(entry.instance.instance_id, record.demand_seen_s, start_s, self.clock.monotonic_s())
        log.info(
            "cold start under way",
            action="instance_planned",
            instance_id=entry.instance.instance_id,
            model=entry.instance.model,
            worker_id=entry.instance.lead,
        )

    def _record_of(self, entry: Entry, order: StartOrder) -> ColdStart:
        parts = entry.trace_parent.split("-")
        return ColdStart(
            instance_id=entry.instance.instance_id,
            model=entry.instance.model,
            decision_id=entry.instance.decision_id,
            trace_id=parts[1] if len(parts) == 4 else "",
            demand_seen_s=order.demand_seen_s,
            wall_offset_s=wall_offset_s(self.clock),
        )

    async def _refuse(
        self, order: StartOrder, choice: SchemeChoice, seen: Snapshot, refusals: list[tuple[WorkerId, PilotlightError]]
    ) -> Outcome:
        """Record why nothing was started, when that is new, and wait before the next attempt."""
        model = order.model
        error = _error_of(choice, refusals)
        reasons = [order.reason, choice.reason]
        reasons += [f"{one.worker_id}: {one.reason}" for one in choice.rejected]
        reasons += [f"{worker_id}: {refusal.code}: {refusal.message}" for worker_id, refusal in refusals]
        # Byte counts and ages differ from attempt to attempt; what makes a refusal a new one is who refused and how.
        essence = f"{error.code} {sorted((worker_id, refusal.code) for worker_id, refusal in refusals)}"
        refused = self._not_now(model)
        if essence in refused.recorded:
            return Outcome(instance_id=None, error=error)
        decision = Decision(
            decision_id=new_decision_id(),
            kind="cold_start",
            model=model.name,
            instance_id=None,
            epoch=seen.epoch,
            inputs=to_row_json(seen),
            outcome={"refused": error.code, "message": error.message},
            reasons=tuple(reasons),
        )
        log.warning("no room for a cold start", action="cold_start_refused", model=model.name, code=error.code, reasons=reasons)
        self.metrics.decided("cold_start", error.code)
        await self.repository.decide(decision)
        refused.recorded |= {essence}
        return Outcome(instance_id=None, error=error)

    def _not_now(self, model: Model) -> _Refused:
        """Wait before the next attempt, the longer the more were refused."""
        now_s = self.clock.monotonic_s()
        before = self._refused.get(model.name)
        attempts = before.attempts + 1 if before is not None else 1
        retry_at_s = now_s + Backoff(first_s=0.1, limit_s=2.0).delay_s(attempts - 1, self._rng)
        recorded = before.recorded if before is not None else frozenset[str]()
        refused = self._refused[model.name] = _Refused(attempts, now_s, retry_at_s, self.world_version(), recorded)
        return refused


def slice_for(model: Model, snapshot: Snapshot) -> Snapshot:
    """What a decision over one model looks at: everything but other models' demand, copies and estimates."""
    named = {held.model for worker in snapshot.workers for held in worker.held}
    return replace(
        snapshot,
        models=tuple(one for one in snapshot.models if one.name == model.name or one.name in named),
        nodes=tuple(copies_of(node, model.digest) for node in snapshot.nodes),
        demand=tuple(one for one in snapshot.demand if one.model == model.name),
        estimates=tuple(one for one in snapshot.estimates if one.model == model.name),
    )


def _started(instance: Instance, choice: SchemeChoice, grants: list[Reserved], places: Joined, seen: Snapshot) -> Decision:
    outcome: dict[str, Any] = {
        "instance_id": instance.instance_id,
        "scheme": to_row_json(choice.scheme),
        "meets_slo": choice.meets_slo,
        "needs_eviction": choice.needs_eviction,
        "evicted_instances": [instance_id for grant in grants for instance_id in grant.evicted_instances],
        "dropped_copies": [digest for grant in grants for digest in grant.dropped_copies],
        "chains": to_row_json(places.chains),
        "considered": [
            {"worker_ids": [one.worker_id for one in scheme.placements], "predicted_ttft_s": scheme.predicted_ttft_s}
            for scheme in choice.considered
        ],
    }
    return Decision(
        decision_id=instance.decision_id,
        kind="cold_start",
        model=instance.model,
        instance_id=instance.instance_id,
        epoch=instance.epoch,
        inputs=to_row_json(seen),
        outcome=outcome,
        reasons=(
            instance.reason,
            choice.reason,
            *places.reasons,
            *(f"{one.worker_id}: {one.reason}" for one in choice.rejected),
        ),
    )


def _error_of(choice: SchemeChoice, refusals: list[tuple[WorkerId, PilotlightError]]) -> PilotlightError:
    if refusals:
        return refusals[-1][1]
    if choice.no_worker_ever:
        return NoWorker(choice.reason)
    return NoRoom(choice.reason)
