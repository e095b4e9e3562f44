"""The scheduler's rows. Reading is free; every write is fenced by the lease."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import ARRAY, Row, Text, any_, cast, exists, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.events import Event
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.retention import Keep, keep_outbox
from pilotlight.common.db.session import Database
from pilotlight.policy.coldstart.timings import Timings
from pilotlight.policy.estimates import with_estimates
from pilotlight.policy.ids import DecisionId, InstanceId, ModelName
from pilotlight.policy.instance import ENDED
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Phase
from pilotlight.policy.plan import Estimate, Estimates, Instance, InstanceState, on_clock
from pilotlight.scheduler.lease import Fence
from pilotlight.scheduler.records import LATE_PHASES_S, ColdStart, Decision
from pilotlight.scheduler.rows import (
    NOW,
    Move,
    Rows,
    cold_start_row,
    decision_row,
    ended,
    late,
    moved,
    planned,
)
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.timing_rows import Rows as TimingRows
from pilotlight.scheduler.timing_rows import timings_of
from pilotlight.scheduler.writer import MOST_TOGETHER, Writer

log = structlog.get_logger()

PROMISED = "promised"
"""Grants of which a start's decision does not know yet whether they will be written."""
REMEMBERED_S = 60.0
"""Failed instances that a new leader still reads: they slow the next start down."""


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
    has_room: bool = True
    """False: it was written while the cache still wrote grants that it had promised, and there is
    one of them that is not there."""


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
        self._writer = Writer(fence)
        self._clock = clock

    async def load(self) -> Stored:
        """What a leader begins with.

        1. everything that lives
        2. what has failed of late: it slows the next start of its model down
        3. of what has ended otherwise, which is hundreds a second where many models come and go,
           only starts of which phases may still be reported

        Raises:
            DatabaseUnavailable: the database cannot be reached.
        """
        table, starts = tables.instances, tables.cold_starts
        now = func.clock_timestamp()
        late = starts.c.finished_at > now - timedelta(seconds=LATE_PHASES_S)
        age = func.extract("epoch", now - table.c.updated_at)
        wanted = or_(
            table.c.state.not_in([state.value for state in ENDED]),  # 1
            (table.c.state == InstanceState.FAILED.value)
            & (table.c.updated_at > now - timedelta(seconds=REMEMBERED_S)),  # 2
            table.c.instance_id.in_(select(starts.c.instance_id).where(late)),  # 3
        )
        planned_from = (
            select(
                table,
                age.label("age_s"),
                tables.decisions.c.inputs["models"].label("models"),
                tables.decisions.c.outcome[PROMISED].label(PROMISED),
            )
            .outerjoin(
                tables.decisions,
                tables.decisions.c.decision_id == table.c.body["decision_id"].astext,
            )
            # As they were planned: a node that joined a chain earlier is before those that joined
            # it later.
            .order_by(table.c.created_at, table.c.instance_id)
        )
        async with self._database.reading() as connection:
            rows = (await connection.execute(planned_from.where(wanted))).all()
            promised = {grant_id for row in rows for grant_id in _promised(row)}
            written = await self._written(connection, promised)
            open_starts = (
                await connection.execute(select(starts).where((starts.c.status == "open") | late))
            ).all()
            estimates = (await connection.execute(select(tables.estimates.c.body))).scalars().all()
            timings = (
                await connection.execute(select(tables.timings.c.key, tables.timings.c.body))
            ).all()
        return Stored(
            instances=tuple(
                replace(one, has_room=written >= set(_promised(row)))
                for row in rows
                if (one := self._instance_of(row)) is not None
            ),
            cold_starts=tuple(self._cold_start_of(row) for row in open_starts),
            estimates=with_estimates({}, (from_row_json(body, Estimate) for body in estimates)),
            timings=timings_of((row.key, row.body) for row in timings),
        )

    async def _written(
        self, connection: AsyncConnection, promised: AbstractSet[str]
    ) -> AbstractSet[str]:
        if not promised:
            return promised
        grant_id = tables.grants.c.grant_id
        found = select(grant_id).where(grant_id == any_(cast(list(promised), ARRAY(Text))))
        return set((await connection.execute(found)).scalars().all())

    async def connect_ahead(self) -> None:
        """Be ready to write a start."""
        await self._database.connect_ahead()

    async def pinned_of(self, models: Iterable[ModelName]) -> frozenset[ModelName]:
        """Of which models an administrator was answered that they are pinned, however lately."""
        table = tables.models
        found = select(table.c.name).where(
            table.c.name == any_(cast(list(models), ARRAY(Text))),
            table.c.body["pinned"].as_boolean(),
        )
        async with self._database.asking() as connection:
            return frozenset((await connection.execute(found)).scalars().all())

    async def start(self, instance: Instance, decision: Decision, cold_start: ColdStart) -> None:
        """Write a new instance, the decision that planned it, and its open cold start.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        await self._writer.write(
            Rows(
                instances=(instance,),
                decisions=(self._row_of(decision),),
                opened=(cold_start_row(cold_start),),
                events=(planned(instance), *late(instance, decision)),
            )
        )

    async def decide(self, decision: Decision) -> None:
        """Write a decision that started nothing.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        await self._writer.write(Rows(decisions=(self._row_of(decision),)))

    async def move(
        self,
        moves: Sequence[Move],
        decisions: Sequence[Decision] = (),
        become: Sequence[Instance] = (),
    ) -> None:
        """Change instances, if their rows still are what the changes were made from.

        Args:
            moves: Of different instances.
            decisions: That made them so.
            become: New instances that workers are from now on; one of ``decisions`` planned each.

        Raises:
            Conflict: one of them is not; nothing is written.
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        await self._writer.write(
            Rows(
                instances=tuple(become),
                moves=tuple(moves),
                decisions=tuple(map(self._row_of, decisions)),
                events=(
                    *map(planned, become),
                    *(one for move in moves for one in moved(move)),
                ),
            )
        )

    async def save_cold_starts(
        self, records: Iterable[ColdStart], finished: AbstractSet[InstanceId]
    ) -> None:
        """Write cold starts as they are now.

        Args:
            records: Of different instances.
            finished: Those that have just been closed.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        listed = list(records)
        for first in range(0, len(listed), MOST_TOGETHER):
            some = listed[first : first + MOST_TOGETHER]
            await self._writer.write(
                Rows(
                    cold_starts=tuple(
                        cold_start_row(one, finished=one.instance_id in finished) for one in some
                    ),
                    events=tuple(ended(one) for one in some if one.instance_id in finished),
                )
            )

    async def save_learned(
        self, estimates: Sequence[Estimate], timings: TimingRows, told: Sequence[Event] = ()
    ) -> None:
        """Write what was learned.

        Args:
            estimates: One of each model and kind of device.
            timings: Those that are others than before.
            told: Of what they show.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        if not (estimates or timings):
            return
        async with self._fence.unit_of_work() as work:
            for one in told:
                work.emit(one.kind, one.entity, one.data, one.trace_parent)
            if timings:
                rows = insert(tables.timings).values(
                    [
                        {"key": key, "body": value, "updated_at": NOW}
                        for key, value in sorted(timings.items())
                    ]
                )
                news = {"body": rows.excluded.body, "updated_at": NOW}
                await work.connection.execute(
                    rows.on_conflict_do_update(index_elements=["key"], set_=news)
                )
            if estimates:
                new = insert(tables.estimates).values(
                    [
                        {
                            "model": one.model,
                            "device_kind": one.device_kind.value,
                            "body": to_row_json(one),
                        }
                        for one in sorted(estimates, key=lambda one: (one.model, one.device_kind))
                    ]
                )
                await work.connection.execute(
                    new.on_conflict_do_update(
                        index_elements=["model", "device_kind"], set_={"body": new.excluded.body}
                    )
                )

    def _row_of(self, decision: Decision) -> Mapping[str, object]:
        return decision_row(decision, self._clock.wall())

    def _instance_of(self, row: Row[Any]) -> StoredInstance | None:
        instance = from_row_json(row.body, Instance)
        since_s = self._clock.monotonic_s() - float(row.age_s)
        # The body's times are of the clock of whichever host led then; the row's age is what holds
        # here.
        instance = on_clock(instance, since_s)
        models: list[dict[str, Any]] = row.models or []
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


def _promised(row: Row[Any]) -> Sequence[str]:
    """Grants of a start that nobody has taken up yet; of any other its workers' reports say what it
    has.
    """
    return (row.promised or ()) if row.state == InstanceState.FETCHING.value else ()
