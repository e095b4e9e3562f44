"""Sends finished spans to their destinations, in batches."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode
from prometheus_client import Counter

from pilotlight.common.messages.spans import SpanRecord
from pilotlight.common.waiting import woken

log = structlog.get_logger()

MAX_QUEUED_SPANS = 4096
"""Finished spans that wait to be sent to one destination; more are dropped and counted."""
MAX_BATCH_SPANS = 256
FLUSH_INTERVAL_S = 0.25
STOP_DEADLINE_S = 2.0
OTLP_TIMEOUT_S = 5.0


class SampledSpans(SpanProcessor):
    """Gives every sender the finished spans that are sampled, or failed."""

    def __init__(self, senders: Sequence["SpanSender"]) -> None:
        self._senders = senders

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None and (
            context.trace_flags.sampled or span.status.status_code is StatusCode.ERROR
        ):
            for sender in self._senders:
                sender.add(span)


class SpanSender:
    """Sends finished spans to one destination, in batches, from the event loop; whatever does not
    fit is dropped and counted.
    """

    def __init__(
        self, name: str, send: Callable[[Sequence[ReadableSpan]], Awaitable[None]], dropped: Counter
    ) -> None:
        self._name = name
        self._send = send
        self._dropped = dropped.labels(destination=name)
        self._queue: deque[ReadableSpan] = deque()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"spans to {self._name}")

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is None:
            return
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._task
        except TimeoutError:
            self._dropped.inc(len(self._queue))

    def add(self, span: ReadableSpan) -> None:
        """Queue a span; from any thread."""
        if len(self._queue) >= MAX_QUEUED_SPANS:
            self._dropped.inc()
            return
        self._queue.append(span)

    async def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = await woken(self._stopping, FLUSH_INTERVAL_S)
            while self._queue:
                batch = [
                    self._queue.popleft() for _ in range(min(MAX_BATCH_SPANS, len(self._queue)))
                ]
                try:
                    await self._send(batch)
                except Exception as error:  # noqa: BLE001 - whatever an exporter raises, tracing must not end the service
                    self._dropped.inc(len(batch))
                    log.warning(
                        "spans lost",
                        action="spans_lost",
                        destination=self._name,
                        spans=len(batch),
                        error=repr(error),
                    )


def otlp_export(endpoint: str) -> Callable[[Sequence[ReadableSpan]], Awaitable[None]]:
    """What sends spans to a collector; it raises what is wrong."""
    # Imported here because it takes a fifth of a second and most processes do not need it.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter = OTLPSpanExporter(
        endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=OTLP_TIMEOUT_S
    )

    async def export(spans: Sequence[ReadableSpan]) -> None:
        if await asyncio.to_thread(exporter.export, spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"{endpoint} did not take them")

    return export


def record_of(service: str, span: ReadableSpan) -> SpanRecord:
    """A finished span of a service, as the bus carries it."""
    context = span.get_span_context()
    if context is None:
        raise ValueError("a finished span has no context")
    attributes: dict[str, str | int | float | bool] = {
        key: value if isinstance(value, str | int | float | bool) else str(value)
        for key, value in (span.attributes or {}).items()
    }
    failed = span.status.status_code is StatusCode.ERROR
    return SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else "",
        name=span.name,
        service=service,
        start_at_s=(span.start_time or 0) / 1e9,
        end_at_s=(span.end_time or 0) / 1e9,
        status=(span.status.description or "error") if failed else "ok",
        attributes=attributes,
    )
