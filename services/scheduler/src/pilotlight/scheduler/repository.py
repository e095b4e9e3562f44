"""The scheduler's rows. Reading is free; every write is fenced by the lease."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Row, exists, func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.retention import Keep, keep_outbox
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import Conflict
from pilotlight.common.policy_version import policy_version
from pilotlight.policy.coldstart.timings import Timings
from pilotlight.policy.estimates import with_estimates
from pilotlight.policy.ids import DecisionId, InstanceId, ModelName
from pilotlight.policy.instance import ENDED
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Phase
from pilotlight.policy.plan import Estimate, Estimates, Instance, InstanceState, on_clock
from pilotlight.scheduler.explained import actual_of
from pilotlight.scheduler.lease import Fence
from pilotlight.scheduler.records import LATE_PHASES_S, ColdStart, Decision
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.timing_rows import Rows, timings_of

log = structlog.get_logger()

REMEMBERED_S = 60.0
"""Ended instances that a new leader still reads: their failures slow the next start down."""
EVENTS = {
    InstanceState.READY: "instance_ready",
    InstanceState.FAILED: "instance_failed",
    InstanceState.GONE: "instance_gone",
}


def retention(settings: SchedulerSettings) -> tuple[Keep, ...]:
    """How long rows of this schema are kept, in the order in which they go: what lives stays.

    The decision that an instance was planned by stays as long as the instance: a new leader reads
    the instance's model from it.
    """
    instances, decisions, starts = tables.instances, tables.decisions, tables.cold_starts
    planned = (
        exists()
        .where(instances.c.body["decision_id"].astext == decisions.c.decision_id)
        .correlate(decisions)
    )
    return (
        Keep(
            at=instances.c.updated_at,
            days=settings.instances_keep_days,
            max_rows=settings.instances_max_rows,
            only=instances.c.state.in_([state.value for state in ENDED]),
        ),
        Keep(
            at=starts.c.created_at,
            days=settings.cold_starts_keep_days,
            max_rows=settings.cold_starts_max_rows,
            only=starts.c.status != "open",
        ),
        Keep(
            at=decisions.c.at,
            days=settings.decisions_keep_days,
            max_rows=settings.decisions_max_rows,
            only=~planned,
        ),
        Keep(
            at=tables.timings.c.updated_at,
            days=settings.timings_keep_days,
            max_rows=settings.timings_max_rows,
        ),
        keep_outbox("scheduler", settings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInstance:
    """A row, on this process's monotonic clock, with the model that it was started from."""

    instance: Instance
    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a new leader begins with."""

    instances: tuple[StoredInstance, ...]
    cold_starts: tuple[ColdStart, ...]
    estimates: Estimates
    timings: Timings


class SchedulerRepository:
    """The scheduler's own schema, for one term."""

    def __init__(self, database: Database, fence: Fence, clock: Clock) -> None:
        self._database = database
        self._fence = fence
        self._clock = clock

    async def load(self) -> Stored:
        """Everything that lives, and what has just ended.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
        """
        table = tables.instances
        age = func.extract("epoch", func.clock_timestamp() - table.c.updated_at)
        recent = table.c.updated_at > func.clock_timestamp() - timedelta(seconds=REMEMBERED_S)
        living = table.c.state.not_in([state.value for state in ENDED])
        planned_from = (
            select(table, age.label("age_s"), tables.decisions.c.inputs)
            .outerjoin(
                tables.decisions,
                tables.decisions.c.decision_id == table.c.body["decision_id"].astext,
            )
            # As they were planned: a node that joined a chain earlier is before those that joined
            # it later.
            .order_by(table.c.created_at, table.c.instance_id)
        )
        starts = tables.cold_starts
        late = starts.c.finished_at > func.clock_timestamp() - timedelta(seconds=LATE_PHASES_S)
        async with self._database.reading() as connection:
            rows = (await connection.execute(planned_from.where(living | recent))).all()
            open_starts = (
                await connection.execute(select(starts).where((starts.c.status == "open") | late))
            ).all()
            estimates = (await connection.execute(select(tables.estimates.c.body))).scalars().all()
            timings = (
                await connection.execute(select(tables.timings.c.key, tables.timings.c.body))
            ).all()
        return Stored(
            instances=tuple(one for one in map(self._instance_of, rows) if one is not None),
            cold_starts=tuple(self._cold_start_of(row) for row in open_starts),
            estimates=with_estimates({}, (from_row_json(body, Estimate) for body in estimates)),
            timings=timings_of((row.key, row.body) for row in timings),
        )

    async def is_pinned(self, model: ModelName) -> bool:
        """Whether an administrator was answered that the model is pinned, however lately."""
        pinned = tables.models.c.body["pinned"].as_boolean()
        found = select(pinned).where(tables.models.c.name == model)
        async with self._database.reading() as connection:
            return bool((await connection.execute(found)).scalar_one_or_none())

    async def start(self, instance: Instance, decision: Decision, cold_start: ColdStart) -> None:
        """Write a new instance, the decision that planned it, and its open cold start.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        async with self._fence.unit_of_work() as work:
            await work.connection.execute(
                insert(tables.instances).values(**self._columns(instance), created_at=_NOW)
            )
            await self._decide(work, decision)
            await work.connection.execute(
                insert(tables.cold_starts).values(
                    **self._record_columns(cold_start), created_at=_NOW
                )
            )
            data = {
                "model": instance.model,
                "decision_id": decision.decision_id,
                "workers": [p.worker_id for p in instance.placements],
            }
            work.emit("instance_planned", instance.instance_id, data)

    async def decide(self, decision: Decision) -> None:
        """Write a decision that started nothing.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        async with self._fence.unit_of_work() as work:
            await self._decide(work, decision)

    async def move(
        self,
        before: Instance,
        after: Instance,
        decision: Decision | None = None,
        become: Sequence[Instance] = (),
    ) -> None:
        """Change an instance, if the row still is what the change was made from.

        Args:
            before: As it was.
            after: As it is from now on.
            decision: That made it so.
            become: New instances that its workers are from now on; ``decision`` planned them.

        Raises:
            Conflict: it is not.
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        table = tables.instances
        as_seen = (
            (table.c.instance_id == before.instance_id)
            & (table.c.state == before.state.value)
            & (table.c.epoch == before.epoch)
            & (table.c.generation == before.generation)
        )
        async with self._fence.unit_of_work() as work:
            changed = await work.connection.execute(
                update(table).where(as_seen).values(**self._columns(after))
            )
            if changed.rowcount != 1:
                raise Conflict(
                    f"{before.instance_id} is not {before.state.value} at epoch {before.epoch},"
                    f" generation {before.generation} any more"
                )
            if decision is not None:
                await self._decide(work, decision)
            for one in become:
                await work.connection.execute(
                    insert(table).values(**self._columns(one), created_at=_NOW)
                )
                workers = [place.worker_id for place in one.placements]
                data = {"model": one.model, "decision_id": one.decision_id, "workers": workers}
                work.emit("instance_planned", one.instance_id, data)
            kind = EVENTS.get(after.state)
            if kind is not None:
                work.emit(kind, after.instance_id, {"model": after.model, "reason": after.reason})

    async def save_cold_start(self, record: ColdStart, *, finished: bool) -> None:
        """Write a cold start as it is now; ``finished`` when it has just been closed.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        table = tables.cold_starts
        columns = self._record_columns(record)
        async with self._fence.unit_of_work() as work:
            await work.connection.execute(
                update(table)
                .where(table.c.instance_id == record.instance_id)
                .values(**columns, **({"finished_at": _NOW} if finished else {}))
            )
            if finished:
                await work.connection.execute(
                    update(tables.decisions)
                    .where(tables.decisions.c.decision_id == record.decision_id)
                    .values(actual=actual_of(record))
                )
                data = {
                    "model": record.model,
                    "status": record.status,
                    "ttft_s": record.ttft_s,
                    "coverage": record.coverage,
                }
                work.emit("cold_start_finished", record.instance_id, data)

    async def save_learned(self, estimate: Estimate, timings: Rows) -> None:
        """Write what was learned.

        Args:
            estimate: Of the model.
            timings: Those that are others than before.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        body = to_row_json(estimate)
        new = insert(tables.estimates).values(
            model=estimate.model, device_kind=estimate.device_kind.value, body=body
        )
        async with self._fence.unit_of_work() as work:
            if timings:
                rows = insert(tables.timings).values(
                    [
                        {"key": key, "body": value, "updated_at": _NOW}
                        for key, value in sorted(timings.items())
                    ]
                )
                news = {"body": rows.excluded.body, "updated_at": _NOW}
                await work.connection.execute(
                    rows.on_conflict_do_update(index_elements=["key"], set_=news)
                )
            await work.connection.execute(
                new.on_conflict_do_update(
                    index_elements=["model", "device_kind"], set_={"body": body}
                )
            )

    async def _decide(self, work: UnitOfWork, decision: Decision) -> None:
        await work.connection.execute(
            insert(tables.decisions).values(
                decision_id=decision.decision_id,
                kind=decision.kind,
                model=decision.model,
                instance_id=decision.instance_id,
                epoch=decision.epoch,
                at=self._clock.wall(),
                inputs=decision.inputs,
                outcome=decision.outcome,
                reasons=list(decision.reasons),
                policy_version=policy_version(),
            )
        )

    def _columns(self, instance: Instance) -> dict[str, Any]:
        return {
            "instance_id": instance.instance_id,
            "model": instance.model,
            "digest": instance.digest,
            "state": instance.state.value,
            "generation": instance.generation,
            "epoch": instance.epoch,
            "body": to_row_json(instance),
            "updated_at": _NOW,
        }

    def _record_columns(self, record: ColdStart) -> dict[str, Any]:
        seen_at = datetime.fromtimestamp(record.demand_seen_s + record.wall_offset_s, UTC)
        return {
            "instance_id": record.instance_id,
            "model": record.model,
            "decision_id": record.decision_id,
            "trace_id": record.trace_id,
            "status": record.status,
            "demand_seen_at": seen_at,
            "dispatched_s": record.dispatched_s,
            "first_token_s": record.end_s,
            "wall_offset_s": record.wall_offset_s,
            "queue_s": record.queue_s,
            "ttft_s": record.ttft_s,
            "coverage": record.coverage,
            "phases": to_row_json(record.phases),
        }

    def _instance_of(self, row: Row[Any]) -> StoredInstance | None:
        instance = from_row_json(row.body, Instance)
        since_s = self._clock.monotonic_s() - float(row.age_s)
        # The body's times are of the clock of whichever host led then; the row's age is what holds
        # here.
        instance = on_clock(instance, since_s)
        models: list[dict[str, Any]] = row.inputs["models"] if row.inputs is not None else []
        model = next((one for one in models if one["digest"] == instance.digest), None)
        if model is None:
            # Without its model it cannot be commanded. Its workers let it go, as what is not in a
            # command.
            log.error(
                "instance without its decision",
                action="instance_orphaned",
                instance_id=instance.instance_id,
            )
            return None
        return StoredInstance(instance=instance, model=from_row_json(model, Model))

    def _cold_start_of(self, row: Row[Any]) -> ColdStart:
        return ColdStart(
            instance_id=InstanceId(row.instance_id),
            model=ModelName(row.model),
            decision_id=DecisionId(row.decision_id),
            trace_id=row.trace_id,
            demand_seen_s=row.demand_seen_at.timestamp() - row.wall_offset_s,
            wall_offset_s=row.wall_offset_s,
            status=row.status,
            dispatched_s=row.dispatched_s,
            end_s=row.first_token_s,
            queue_s=row.queue_s,
            ttft_s=row.ttft_s,
            coverage=row.coverage,
            phases=from_row_json(row.phases, tuple[Phase, ...]),
        )


_NOW = text("clock_timestamp()")
"""Rows' ages are told by the database's clock: a new leader on another host has no other in common
with the old one."""
