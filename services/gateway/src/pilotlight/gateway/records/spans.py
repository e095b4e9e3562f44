"""Spans of every service, kept for the trace viewer: bounded, and lost without harm."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.bus import Subscription
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch, SpanRecord
from pilotlight.common.service import Context
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.waiting import cancel_all, pause

log = structlog.get_logger()

FLUSH_INTERVAL_S = 0.25
MAX_BUFFERED_SPANS = 20_000
MAX_TEXT_CHARS = 300
MAX_ATTRIBUTES_BYTES = 8 * 1024


class SpanStore:
    """Listens to span batches (each reaches one gateway) and writes them to ``gateway.spans``."""

    def __init__(self, database: Database, context: Context[ServiceSettings]) -> None:
        self._database = database
        self._context = context
        self._rows: list[dict[str, Any]] = []
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen and write."""
        if self._subscription is None:
            self._subscription = await self._context.bus.subscribe(
                SPANS_SUBJECT, SpanBatch, self._on_batch, queue="gateway"
            )
            self._task = self._context.background.spawn("spans", self._run())

    async def stop(self) -> None:
        """Listen no more; write what is left."""
        if self._subscription is not None:
            await self._subscription.end()
            self._subscription = None
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None
        await self._flush()

    async def _on_batch(self, batch: SpanBatch) -> None:
        kept = [
            row
            for row in map(_row, batch.spans[: MAX_BUFFERED_SPANS - len(self._rows)])
            if row is not None
        ]
        self._rows += kept
        if len(kept) < len(batch.spans):
            log.warning(
                "spans were dropped", action="spans_dropped", spans=len(batch.spans) - len(kept)
            )

    async def _run(self) -> None:
        while True:
            await pause(FLUSH_INTERVAL_S)
            await self._flush()

    async def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(insert(tables.spans).on_conflict_do_nothing(), rows)
        except DatabaseUnavailable as error:
            log.warning(
                "spans were dropped", action="spans_dropped", spans=len(rows), error=error.message
            )


def _row(span: SpanRecord) -> dict[str, Any] | None:
    """A span as its row; None when no calendar has its times.

    One odd span must not cost the others of its batch.
    """
    try:
        start_at, end_at = (
            datetime.fromtimestamp(time_s, UTC) for time_s in (span.start_at_s, span.end_at_s)
        )
    except (ValueError, OverflowError, OSError):
        return None
    encoded = msgspec.json.encode(span.attributes)
    storable = len(encoded) <= MAX_ATTRIBUTES_BYTES and b"\\u0000" not in encoded
    return {
        "trace_id": _text(span.trace_id),
        "span_id": _text(span.span_id),
        "parent_id": _text(span.parent_id),
        "name": _text(span.name),
        "service": _text(span.service),
        "start_at": start_at,
        "end_at": end_at,
        "status": _text(span.status),
        "attributes": span.attributes if storable else {"dropped": "too large, or not storable"},
    }


def _text(value: str) -> str:
    """What PostgreSQL takes: text without NUL."""
    return value.replace("\0", "")[:MAX_TEXT_CHARS]
