"""Routes of the admin API that only show."""

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query, Response

from pilotlight.common.errors import TraceNotFound
from pilotlight.gateway.admin.nodes import Fleet
from pilotlight.gateway.models.schemas import MAX_NAME_CHARS, NAME_PATTERN
from pilotlight.gateway.records.audit import AuditFilter, AuditLog
from pilotlight.gateway.records.display import COLD_STARTS, DECISIONS, INSTANCES, Display
from pilotlight.gateway.tenants.schemas import Moment

JSON = "application/json"

Limit = Annotated[int, Query(ge=1, le=1000)]
OptionalName = Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)]
TraceId = Annotated[
    str,
    Path(pattern=r"^[0-9a-f]{32}$", description="32 hex digits: what the header X-Trace-Id says."),
]
Before = Annotated[
    str | None,
    Query(
        pattern=r"^[A-Za-z0-9_-]+$",
        max_length=100,
        description="`next_before` of the page before this one.",
    ),
]
Word = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9._/-]+$", max_length=200)]
RecordId = Annotated[
    int | None, Query(ge=1, le=2**62, description="`next_before` of the page before this one.")
]
OptionalMoment = Annotated[
    Moment | None, Query(description="RFC 3339, for example 2026-01-31T12:00:00Z.")
]


def add_views(app: FastAPI, display: Display, fleet: Fleet, audit: AuditLog) -> None:
    """Add the routes of workers, instances, cold starts, decisions, traces and the audit log.

    Args:
        app: gets the routes.
        display: reads other services' rows.
        fleet: workers as last reported.
        audit: the log to show.
    """

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        """Workers with devices and held stages, as last reported; ages are as of now."""
        return {"workers": msgspec.to_builtins(fleet.workers_now())}

    @app.get("/instances")
    async def instances(limit: Limit = 100, before: Before = None) -> Response:
        """Instances, the newest first."""
        return Response(await display.page(INSTANCES, limit=limit, before=before), media_type=JSON)

    @app.get("/cold-starts")
    async def cold_starts(
        model: OptionalName = None, limit: Limit = 20, before: Before = None
    ) -> Response:
        """Cold starts with their phases, the newest first."""
        return Response(
            await display.page(COLD_STARTS, model=model, limit=limit, before=before),
            media_type=JSON,
        )

    @app.get("/decisions")
    async def decisions(
        model: OptionalName = None, limit: Limit = 20, before: Before = None
    ) -> Response:
        """The scheduler's decisions with their inputs and reasons, the newest first; about 8 MiB of
        them at most.
        """
        return Response(
            await display.page(DECISIONS, model=model, limit=limit, before=before), media_type=JSON
        )

    @app.get("/traces/{trace_id}")
    async def trace(trace_id: TraceId) -> Response:
        """Spans and cold starts of one trace."""
        found = await display.trace(trace_id)
        if found is None:
            raise TraceNotFound(f"nothing is kept of trace {trace_id}", param="trace_id")
        return Response(found, media_type=JSON)

    @app.get("/audit")
    async def audit_log(
        limit: Limit = 100,
        before: RecordId = None,
        action: Word = None,
        entity: Word = None,
        outcome: Word = None,
        key_id: Word = None,
        since: OptionalMoment = None,
        until: OptionalMoment = None,
    ) -> dict[str, Any]:
        """What administrators did and tried, the newest first."""
        wanted = AuditFilter(
            action=action,
            entity=entity,
            outcome=outcome,
            key_id=key_id,
            before_id=before,
            since=since,
            until=until,
        )
        found = await audit.page(wanted, limit)
        return {"audit": found, "next_before": found[-1]["id"] if len(found) == limit else None}
