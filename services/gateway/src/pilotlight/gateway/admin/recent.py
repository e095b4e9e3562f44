"""Routes of the admin API that the dashboard's pages read: single records, what ended lately, what
was evicted, and the stream of changes.
"""

from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query, Response
from starlette.types import Receive, Scope, Send

from pilotlight.common.errors import NotFound, TraceNotFound
from pilotlight.gateway.admin.live import LiveView, Topic
from pilotlight.gateway.admin.views import JSON, Limit, OptionalName, RecordId
from pilotlight.gateway.edge.http import EventStream, Write, WrittenEvents
from pilotlight.gateway.records.display import COLD_STARTS, DECISIONS, Display
from pilotlight.gateway.records.recent import RecentReader

MAX_MINUTES = 7 * 24 * 60

InstanceId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]+$", max_length=100)]
DecisionId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]+$", max_length=100)]
RequestId = Annotated[
    str,
    Query(
        pattern=r"^[A-Za-z0-9_-]+$",
        max_length=100,
        description="What the header X-Request-Id of its answer says.",
    ),
]
Minutes = Annotated[int, Query(ge=1, le=MAX_MINUTES)]
Topics = Annotated[
    list[Topic], Query(min_length=1, max_length=len(Topic), description="What to follow.")
]


def add_recent(app: FastAPI, display: Display, recent: RecentReader) -> None:
    """Add the routes of single records and of what happened lately.

    Args:
        app: gets the routes.
        display: reads whole rows of other services.
        recent: reads what is counted or found.
    """

    @app.get("/cold-starts/{instance_id}")
    async def cold_start(instance_id: InstanceId) -> Response:
        """One cold start with its phases, also while it goes on."""
        found = await display.one(COLD_STARTS, instance_id)
        if found is None:
            raise NotFound(f"no cold start of {instance_id} is kept", param="instance_id")
        return Response(found, media_type=JSON)

    @app.get("/decisions/{decision_id}")
    async def decision(decision_id: DecisionId) -> Response:
        """One decision with its inputs, reasons and outcome."""
        found = await display.one(DECISIONS, decision_id)
        if found is None:
            raise NotFound(f"no decision {decision_id} is kept", param="decision_id")
        return Response(found, media_type=JSON)

    @app.get("/activity")
    async def activity(model: OptionalName = None, minutes: Minutes = 60) -> dict[str, Any]:
        """Finished requests by the minute, the oldest first; minutes without any are left out."""
        return {"minutes": msgspec.to_builtins(await recent.minutes(model, minutes))}

    @app.get("/evictions")
    async def evictions(
        limit: Limit = 100, before: RecordId = None, model: OptionalName = None
    ) -> dict[str, Any]:
        """What was evicted, why, and what its loss was thought to be; the newest first."""
        found = await recent.evictions(limit, before, model)
        return {"evictions": found, "next_before": found[-1]["id"] if len(found) == limit else None}

    @app.get("/traces")
    async def trace_of(request_id: RequestId) -> dict[str, Any]:
        """The trace of a request."""
        trace_id = await recent.trace_of(request_id)
        if trace_id is None:
            raise TraceNotFound(f"no trace of {request_id} is kept", param="request_id")
        return {"trace_id": trace_id, "request_id": request_id}


class _Streamed(Response):
    """A stream for FastAPI, which turns into JSON whatever is no response of Starlette's."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream(scope, receive, send)


def add_stream(app: FastAPI, live: LiveView) -> None:
    """Add the stream of changes."""

    @app.get("/stream")
    async def stream(topic: Topics) -> Response:
        """Rows of nodes, models, transfers, links, groups and cold starts as server-sent events:
        all of them, then those that change, at most once a second. A comment comes after 10 s
        without any.
        """
        live.check_room()
        topics = list(dict.fromkeys(topic))

        async def write_all(write: Write) -> None:
            async with aclosing(live.events(topics)) as events:
                async for data in events:
                    await write(data)

        return _Streamed(WrittenEvents(write_all))
