"""Rows of the scheduler's schema that are written together: one statement
(``common.db.documents``), however many rows of however many tables there are. It is a transaction
of its own, and writes nothing when the term is over, or when an instance is not what its change was
made from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    CTE,
    Boolean,
    Column,
    Insert,
    Select,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    select,
    text,
    true,
    update,
)

from pilotlight.common.db import tables
from pilotlight.common.db.documents import Row, columns, document, given, inserted
from pilotlight.common.db.events import Event, event, events_inserted
from pilotlight.common.errors import Conflict, NotLeader
from pilotlight.common.policy_version import policy_version
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.scheduler.explained import actual_of
from pilotlight.scheduler.lease import TERM, Fence
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


def planned(instance: Instance) -> Event:
    """A new instance is in the rows."""
    workers = [place.worker_id for place in instance.placements]
    data = {"model": instance.model, "decision_id": instance.decision_id, "workers": workers}
    return event("instance_planned", instance.instance_id, data)


def late(instance: Instance, decision: Decision) -> tuple[Event, ...]:
    """What is told of a start by which no choice meets the SLO, if none does."""
    if decision.outcome.get("meets_slo", True):
        return ()
    data = {
        "model": instance.model,
        "decision_id": decision.decision_id,
        "predicted_ttft_s": decision.outcome["scheme"]["predicted_ttft_s"],
        "slo_ttft_s": decision.inputs["models"][0]["slo"]["ttft_ms"] / 1000,
    }
    return (event("start_misses_slo", instance.instance_id, data),)


def slow(node_id: NodeId, source: str, bytes_per_s: float) -> Event:
    """A node fetches at less than half of the rate of others."""
    return event("node_slow", node_id, {"source": source, "bytes_per_s": bytes_per_s})


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


async def write(fence: Fence, rows: Rows) -> None:
    """Write all of them.

    Raises:
        Conflict: an instance is not what its change was made from; nothing was written.
        NotLeader: the term is over; nothing was written.
        DatabaseUnavailable: the database cannot be reached.
    """
    parts: dict[str, Sequence[Row]] = {
        "new_instances": [_instance_row(one) for one in rows.instances],
        MOVED: [_move_row(one) for one in rows.moves],
        "new_decisions": rows.decisions,
        "new_cold_starts": rows.opened,
        "changed_cold_starts": rows.cold_starts,
        "what_came_of_it": [one for one in rows.cold_starts if one["actual"] is not None],
    }
    documents: dict[str, Any] = {}
    for name, part in parts.items():
        if part:
            documents |= document(part, name)
    if not documents and not rows.events:
        return
    statement = _all_of(frozenset(documents), tells=bool(rows.events))
    if rows.moves:
        documents["moves"] = len(rows.moves)
    ((is_term, unchanged),) = await fence.write_at_once(statement, documents, rows.events)
    if not is_term:
        raise NotLeader(f"epoch {fence.epoch} is over")
    if unchanged != len(rows.moves):
        raise Conflict(_conflict(rows.moves, unchanged))


def _conflict(moves: Sequence[Move], unchanged: int) -> str:
    if len(moves) > 1:
        return f"of {len(moves)} instances {len(moves) - unchanged} are not what they were any more"
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
MOVED = "moved_instances"
_was = {"was_state": "state", "was_epoch": "epoch", "was_generation": "generation"}
_moves = given(
    *columns(tables.instances, *_INSTANCE),
    *(Column(name, tables.instances.c[of].type) for name, of in _was.items()),
    document=MOVED,
)
_is_as_it_was = (tables.instances.c.instance_id == _moves.c.instance_id) & and_(
    *(tables.instances.c[of] == _moves.c[name] for name, of in _was.items())
)
_unchanged = (
    select(tables.instances.c.instance_id)
    .select_from(tables.instances.join(_moves, _is_as_it_was).join(TERM, true()))
    .with_for_update(of=tables.instances)
    .cte("unchanged")
)
_saved = given(
    *columns(tables.cold_starts, *_COLD_START),
    Column("finished", Boolean),
    document="changed_cold_starts",
)
_ended = given(*columns(tables.decisions, "decision_id", "actual"), document="what_came_of_it")


def _parts(where: CTE) -> dict[str, Insert | Update]:
    """What writes each document, if ``where`` has its row."""
    instances, decisions, starts = tables.instances, tables.decisions, tables.cold_starts
    there = exists(select(where))
    moved = (
        update(instances)
        .where(_is_as_it_was, there)
        .values({**{name: _moves.c[name] for name in _INSTANCE[1:]}, "updated_at": NOW})
    )
    changed = (
        update(starts)
        .where(starts.c.instance_id == _saved.c.instance_id, there)
        .values(
            {
                **{name: _saved.c[name] for name in _COLD_START[1:]},
                "finished_at": case((_saved.c.finished, NOW), else_=starts.c.finished_at),
            }
        )
    )
    came_of_it = (
        update(decisions)
        .where(decisions.c.decision_id == _ended.c.decision_id, there)
        .values(actual=_ended.c.actual)
    )
    return {
        "new_instances": inserted(
            instances, _INSTANCE, "new_instances", where=where, created_at=NOW, updated_at=NOW
        ),
        MOVED: moved,
        "new_decisions": inserted(decisions, _DECISION, "new_decisions", where=where),
        "new_cold_starts": inserted(
            starts, _COLD_START, "new_cold_starts", where=where, created_at=NOW
        ),
        "changed_cold_starts": changed,
        "what_came_of_it": came_of_it,
    }


@cache
def _all_of(names: frozenset[str], *, tells: bool) -> Select[bool, int]:
    """Some of these in one statement, with their events if it ``tells``: says whether the term goes
    on, and how many instances are what their changes were made from. None sees what another writes:
    no two are about the same row.
    """
    is_term = exists(select(TERM)).label("is_term")
    unchanged = literal(0)
    may = select(TERM)
    if MOVED in names:
        unchanged = select(func.count()).select_from(_unchanged).scalar_subquery()
        may = may.where(unchanged == bindparam("moves"))
    where = may.cte("may_write")
    parts = [part.cte(name) for name, part in _parts(where).items() if name in names]
    if tells:
        parts.append(events_inserted("scheduler", where).cte("new_events"))
    return select(is_term, unchanged.label("unchanged")).add_cte(*parts)
