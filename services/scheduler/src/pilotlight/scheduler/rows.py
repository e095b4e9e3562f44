"""Rows of the scheduler's schema that are written together: each table gets one statement
(``common.db.documents``), however many rows there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Boolean, Column, case, text, update

from pilotlight.common.db import tables
from pilotlight.common.db.documents import Row, columns, document, given, inserted
from pilotlight.common.db.session import UnitOfWork
from pilotlight.common.errors import Conflict
from pilotlight.common.policy_version import policy_version
from pilotlight.common.telemetry import current_traceparent
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.scheduler.explained import actual_of
from pilotlight.scheduler.records import ColdStart, Decision

NOW = text("clock_timestamp()")
"""Rows' ages are told by the database's clock: a new leader on another host has no other in common
with the old one."""
EVENTS = {
    InstanceState.READY: "instance_ready",
    InstanceState.FAILED: "instance_failed",
    InstanceState.GONE: "instance_gone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of an instance, if its row still is what the change was made from."""

    before: Instance
    after: Instance


@dataclass(frozen=True, slots=True)
class Event:
    """What is told when the rows are there."""

    kind: str
    entity: str
    data: dict[str, Any]
    trace_parent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is written in one transaction, in this order."""

    instances: tuple[Instance, ...] = ()
    """New ones, in the order in which they were planned."""
    moves: tuple[Move, ...] = ()
    """No two of one instance."""
    decisions: tuple[Row, ...] = ()
    opened: tuple[Row, ...] = ()
    """Cold starts that begin."""
    cold_starts: tuple[Row, ...] = ()
    """As they are now; no two of one instance."""
    events: tuple[Event, ...] = ()

    @property
    def changed(self) -> frozenset[InstanceId]:
        """Of what a row is changed, which another change of must follow in a later transaction."""
        return frozenset(
            {one.before.instance_id for one in self.moves}
            | {InstanceId(str(one["instance_id"])) for one in self.cold_starts}
        )


def together(several: Sequence[Rows]) -> Rows:
    """All of them in one transaction."""
    return Rows(
        **{
            one.name: tuple(row for rows in several for row in getattr(rows, one.name))
            for one in fields(Rows)
        }
    )


def event(kind: str, entity: str, data: dict[str, Any]) -> Event:
    """One of the trace that is under way."""
    return Event(kind, entity, data, current_traceparent())


def planned(instance: Instance) -> Event:
    """A new instance is in the rows."""
    workers = [place.worker_id for place in instance.placements]
    data = {"model": instance.model, "decision_id": instance.decision_id, "workers": workers}
    return event("instance_planned", instance.instance_id, data)


def moved(move: Move) -> tuple[Event, ...]:
    """What is told of a change, if anything is."""
    after = move.after
    kind = EVENTS.get(after.state)
    if kind is None:
        return ()
    return (event(kind, after.instance_id, {"model": after.model, "reason": after.reason}),)


def ended(record: ColdStart) -> Event:
    """A cold start has just been closed."""
    data = {
        "model": record.model,
        "status": record.status,
        "ttft_s": record.ttft_s,
        "coverage": record.coverage,
    }
    return event("cold_start_finished", record.instance_id, data)


def decision_row(decision: Decision, at: datetime) -> Row:
    """A row of ``decisions``; ``at``: when it was made."""
    return {
        "decision_id": decision.decision_id,
        "kind": decision.kind,
        "model": decision.model,
        "instance_id": decision.instance_id,
        "epoch": decision.epoch,
        "at": at,
        "inputs": decision.inputs,
        "outcome": decision.outcome,
        "reasons": decision.reasons,
        "policy_version": policy_version(),
    }


def cold_start_row(record: ColdStart, *, finished: bool = False) -> Row:
    """A row of ``cold_starts``; ``finished`` when it has just been closed."""
    return {
        "instance_id": record.instance_id,
        "model": record.model,
        "decision_id": record.decision_id,
        "trace_id": record.trace_id,
        "status": record.status,
        "demand_seen_at": datetime.fromtimestamp(record.demand_seen_s + record.wall_offset_s, UTC),
        "dispatched_s": record.dispatched_s,
        "first_token_s": record.end_s,
        "wall_offset_s": record.wall_offset_s,
        "queue_s": record.queue_s,
        "ttft_s": record.ttft_s,
        "coverage": record.coverage,
        "phases": record.phases,
        "finished": finished,
        "actual": actual_of(record) if record.closed else None,
    }


async def write(work: UnitOfWork, rows: Rows) -> None:
    """Write all of them.

    Raises:
        Conflict: an instance is not what its change was made from.
    """
    execute = work.connection.execute
    if rows.instances:
        await execute(_NEW_INSTANCES, document([_instance_row(one) for one in rows.instances]))
    if rows.moves:
        changed = await execute(_MOVED_INSTANCES, document([_move_row(one) for one in rows.moves]))
        if changed.rowcount != len(rows.moves):
            raise Conflict(_conflict(rows.moves, changed.rowcount))
    if rows.decisions:
        await execute(_NEW_DECISIONS, document(rows.decisions))
    if rows.opened:
        await execute(_NEW_COLD_STARTS, document(rows.opened))
    if rows.cold_starts:
        await execute(_CHANGED_COLD_STARTS, document(rows.cold_starts))
    if over := [one for one in rows.cold_starts if one["actual"] is not None]:
        await execute(_WHAT_CAME_OF_IT, document(over))
    for one in rows.events:
        work.emit(one.kind, one.entity, one.data, one.trace_parent)


def _conflict(moves: Sequence[Move], changed: int) -> str:
    if len(moves) > 1:
        return f"of {len(moves)} instances {len(moves) - changed} are not what they were any more"
    before = moves[0].before
    return (
        f"{before.instance_id} is not {before.state.value} at epoch {before.epoch},"
        f" generation {before.generation} any more"
    )


def _instance_row(instance: Instance) -> Row:
    return {
        "instance_id": instance.instance_id,
        "model": instance.model,
        "digest": instance.digest,
        "state": instance.state,
        "generation": instance.generation,
        "epoch": instance.epoch,
        "body": instance,
    }


def _move_row(move: Move) -> Row:
    before = move.before
    return {
        **_instance_row(move.after),
        "instance_id": before.instance_id,
        "was_state": before.state,
        "was_epoch": before.epoch,
        "was_generation": before.generation,
    }


# Statements.

_INSTANCE = ("instance_id", "model", "digest", "state", "generation", "epoch", "body")
_COLD_START = (
    "instance_id",
    "model",
    "decision_id",
    "trace_id",
    "status",
    "demand_seen_at",
    "dispatched_s",
    "first_token_s",
    "wall_offset_s",
    "queue_s",
    "ttft_s",
    "coverage",
    "phases",
)
_DECISION = (
    "decision_id",
    "kind",
    "model",
    "instance_id",
    "epoch",
    "at",
    "inputs",
    "outcome",
    "reasons",
    "policy_version",
)
_NEW_INSTANCES = inserted(tables.instances, _INSTANCE, created_at=NOW, updated_at=NOW)
_NEW_DECISIONS = inserted(tables.decisions, _DECISION)
_NEW_COLD_STARTS = inserted(tables.cold_starts, _COLD_START, created_at=NOW)

_was = {"was_state": "state", "was_epoch": "epoch", "was_generation": "generation"}
_moves = given(
    *columns(tables.instances, *_INSTANCE),
    *(Column(name, tables.instances.c[of].type) for name, of in _was.items()),
)
_MOVED_INSTANCES = (
    update(tables.instances)
    .where(tables.instances.c.instance_id == _moves.c.instance_id)
    .where(*(tables.instances.c[of] == _moves.c[name] for name, of in _was.items()))
    .values({**{name: _moves.c[name] for name in _INSTANCE[1:]}, "updated_at": NOW})
)
_saved = given(*columns(tables.cold_starts, *_COLD_START), Column("finished", Boolean))
_CHANGED_COLD_STARTS = (
    update(tables.cold_starts)
    .where(tables.cold_starts.c.instance_id == _saved.c.instance_id)
    .values(
        {
            **{name: _saved.c[name] for name in _COLD_START[1:]},
            "finished_at": case((_saved.c.finished, NOW), else_=tables.cold_starts.c.finished_at),
        }
    )
)
_ended = given(*columns(tables.decisions, "decision_id", "actual"))
_WHAT_CAME_OF_IT = (
    update(tables.decisions)
    .where(tables.decisions.c.decision_id == _ended.c.decision_id)
    .values(actual=_ended.c.actual)
)
