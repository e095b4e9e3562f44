"""Events in rows: an outbox has them when, and only when, it has what they tell of."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import CTE, Insert

from pilotlight.common.db import tables
from pilotlight.common.db.documents import Row, inserted
from pilotlight.common.ids import new_event_id
from pilotlight.common.telemetry import current_traceparent

EVENTS = "new_events"
"""The document of a statement's events."""
_EVENT = ("event_id", "kind", "entity", "at", "data", "trace_parent")


@dataclass(frozen=True, slots=True)
class Event:
    """What is told when the rows are there."""

    kind: str
    entity: str
    data: dict[str, Any]
    trace_parent: str


def event(kind: str, entity: str, data: dict[str, Any]) -> Event:
    """One of the trace that is under way."""
    return Event(kind, entity, data, current_traceparent())


def event_rows(events: Sequence[Event], at: datetime) -> list[Row]:
    """Rows of an outbox; ``at``: when they happened."""
    return [
        {
            "event_id": new_event_id(),
            "kind": one.kind,
            "entity": one.entity,
            "at": at,
            "data": one.data,
            "trace_parent": one.trace_parent,
        }
        for one in events
    ]


def events_inserted(schema: str, where: CTE | None = None) -> Insert:
    """Insert the events of a document into a schema's outbox; ``where``: as for ``inserted``."""
    return inserted(tables.outboxes[schema], _EVENT, EVENTS, where=where)
