"""Spans of every service, kept for the trace viewer: bounded, and lost without harm."""

import json
from datetime import UTC, datetime
from typing import Any

import structlog
from sqlalchemy import delete, func, text
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.bus import Subscription
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch, SpanRecord
from pilotlight.common.service import Context
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.waiting import pause

log = structlog.get_logger()

FLUSH_INTERVAL_S = 0.25
MAX_BUFFERED_SPANS = 20_000
MAX_ATTRIBUTES_BYTES = 8 * 1024
KEEP_S = 24 * 3600.0
TRIM_EVERY_FLUSHES = 240
"""About once a minute."""


class SpanStore:
    """Listens to span batches (each reaches one gateway) and writes them to ``gateway.spans``."""

    def __init__(self, database: Database, context: Context[ServiceSettings]) -> None:
        self._database = database
        self._context = context
        self._spans: list[SpanRecord] = []
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen and write."""
        self._subscription = await self._context.bus.subscribe(SPANS_SUBJECT, SpanBatch, self._on_batch, queue="gateway")
        self._context.background.spawn("spans", self._run())

    async def stop(self) -> None:
        """Listen no more; write what is left."""
        if self._subscription is not None:
            await self._subscription.end()
            self._subscription = None
        await self._flush()

    async def _on_batch(self, batch: SpanBatch) -> None:
        room = MAX_BUFFERED_SPANS - len(self._spans)
        if room < len(batch.spans):
            log.warning("spans were dropped", action="spans_dropped", spans=len(batch.spans) - room)
        self._spans += batch.spans[: max(0, room)]

    async def _run(self) -> None:
        flushes = 0
        while True:
            await pause(FLUSH_INTERVAL_S)
            await self._flush()
            flushes += 1
            if flushes % TRIM_EVERY_FLUSHES == 0:
                await self._trim()

    async def _flush(self) -> None:
        spans, self._spans = self._spans, []
        if not spans:
            return
        rows = [_row(span) for span in spans]
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(insert(tables.spans).on_conflict_do_nothing(), rows)
        except DatabaseUnavailable as error:
            log.warning("spans were dropped", action="spans_dropped", spans=len(spans), error=error.message)

    async def _trim(self) -> None:
        oldest = func.now() - text("make_interval(secs => :keep_s)").bindparams(keep_s=KEEP_S)
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(delete(tables.spans).where(tables.spans.c.start_at < oldest))
        except DatabaseUnavailable as error:
            log.warning("old spans are kept a little longer", action="spans_trim_deferred", error=error.message)


def _row(span: SpanRecord) -> dict[str, Any]:
    attributes = span.attributes if len(json.dumps(span.attributes)) <= MAX_ATTRIBUTES_BYTES else {"dropped": "too large"}
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "service": span.service,
        "start_at": datetime.fromtimestamp(span.start_at_s, UTC),
        "end_at": datetime.fromtimestamp(span.end_at_s, UTC),
        "status": span.status,
        "attributes": attributes,
    }
