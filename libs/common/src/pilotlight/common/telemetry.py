"""Logs and traces.

Logs are JSON lines on standard error, each with the trace that it belongs to. Spans are
OpenTelemetry's; they cross processes as W3C trace context in headers, and go in batches over the
bus to a gateway, which keeps them for the trace viewer, and to an OTLP endpoint where one is set. A
request makes a handful of spans, never one for each token.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue
from prometheus_client import CollectorRegistry, Counter

from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.span_senders import SampledSpans, SpanSender, otlp_export, record_of

log = structlog.get_logger()


_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_TRACEPARENT = "traceparent"
_propagator = TraceContextTextMapPropagator()


class SpanSink(Protocol):
    """What spans ask of the bus."""

    async def publish(self, subject: str, message: object, *, binary: bool = False) -> None: ...


class _Telemetry:
    """What this process traces with; one for each process, made by ``start_telemetry``."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self.provider: TracerProvider | None = None
        self.senders: list[SpanSender] = []


_telemetry = _Telemetry()


def configure_logging(service: str, level: str = "info") -> None:
    """Write every log line of this process, also those of libraries, as JSON on standard error."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace,
        structlog.processors.format_exc_info,
    ]

    def add_service(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    shared.insert(1, add_service)
    render = structlog.processors.JSONRenderer(serializer=_to_json)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS.get(level, logging.INFO)),
        # Looked up for each line: a test or a daemon that redirects standard error means the log
        # too.
        logger_factory=lambda *_: _LogLines(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared)
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class _LogLines(structlog.WriteLogger):
    """Writes lines as long as they can be written: where logs go to a disk that is full, the
    service goes on without.
    """

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def start_telemetry(
    service: str,
    settings: ServiceSettings,
    bus: SpanSink,
    *,
    metrics: CollectorRegistry | None = None,
) -> None:
    """Make spans from now on and send them.

    Call within the event loop; does nothing when it runs already.

    Args:
        service: its name, in every span.
        settings: the share of requests that is traced, and the collector's address.
        bus: takes spans for ``pilotlight trace``.
        metrics: counts spans that were lost; None: they are not counted.
    """
    configure_logging(service, settings.log_level)
    if _telemetry.provider is not None:
        return
    dropped = Counter(
        "pilotlight_spans_dropped",
        "Finished spans that were lost.",
        ["destination"],
        registry=metrics,
    )

    async def over_bus(spans: Sequence[ReadableSpan]) -> None:
        await bus.publish(
            SPANS_SUBJECT, SpanBatch(spans=tuple(record_of(service, span) for span in spans))
        )

    senders = [SpanSender("bus", over_bus, dropped)]
    if settings.otlp_endpoint:
        senders.append(SpanSender("otlp", otlp_export(settings.otlp_endpoint), dropped))
    provider = TracerProvider(
        sampler=_KeepFailures(settings.trace_sample_ratio),
        resource=Resource.create({"service.name": f"pilotlight-{service}"}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(SampledSpans(senders))
    for sender in senders:
        sender.start()
    _telemetry.senders = senders
    _telemetry.provider = provider
    _telemetry.tracer = provider.get_tracer("pilotlight")


async def stop_telemetry() -> None:
    """Send what is queued, within a deadline, and make no more spans."""
    senders, provider = _telemetry.senders, _telemetry.provider
    _telemetry.senders, _telemetry.provider, _telemetry.tracer = [], None, None
    await asyncio.gather(*(sender.stop() for sender in senders))
    if provider is not None:
        provider.shutdown()


@contextmanager
def span(name: str, **attributes: AttributeValue) -> Generator[Span]:
    """A span around a piece of work.

    An error that leaves the body marks it by its code; its message is not recorded, for it may
    quote input.
    """
    with _spanned(name, SpanKind.INTERNAL, None, attributes) as current:
        yield current


@contextmanager
def client_span(name: str) -> Generator[Span]:
    """A span around a request to another process."""
    with _spanned(name, SpanKind.CLIENT, None, None) as current:
        yield current


@contextmanager
def server_span(
    name: str, headers: Mapping[str, str] | None, record: bool = True
) -> Generator[Span]:
    """A span around the answer to a request, in the trace that its headers name.

    With ``record=False`` the trace context becomes current and there is no span: for what happens
    often.
    """
    parent = _context_of(headers)
    if record:
        with _spanned(name, SpanKind.SERVER, parent, None) as current:
            yield current
        return
    if parent is None:
        yield trace.INVALID_SPAN
        return
    token = otel_context.attach(parent)
    try:
        yield trace.get_current_span(parent)
    finally:
        otel_context.detach(token)


@contextmanager
def with_parent(traceparent: str) -> Generator[None]:
    """Make a W3C trace context current; an empty or malformed one changes nothing."""
    with server_span("", {_TRACEPARENT: traceparent} if traceparent else None, record=False):
        yield


def inject(headers: dict[str, str]) -> dict[str, str]:
    """Add the current trace context to headers, and return them."""
    traceparent = current_traceparent()
    if traceparent:
        headers[_TRACEPARENT] = traceparent
    return headers


def current_traceparent(*, keep: bool = False) -> str:
    """The current W3C trace context; empty where there is none.

    ``keep`` marks the trace as sampled for every service that joins it: a cold start is always
    traced, whatever share of requests is.
    """
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    flags = context.trace_flags | (TraceFlags.SAMPLED if keep else 0)
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


@contextmanager
def _spanned(
    name: str, kind: SpanKind, parent: Context | None, attributes: Attributes
) -> Generator[Span]:
    tracer = _telemetry.tracer
    if tracer is None:
        token = otel_context.attach(parent) if parent is not None else None
        try:
            yield trace.get_current_span()
        finally:
            if token is not None:
                otel_context.detach(token)
        return
    with tracer.start_as_current_span(
        name,
        context=parent,
        kind=kind,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except Exception as error:
            current.set_status(
                Status(
                    StatusCode.ERROR,
                    error.code if isinstance(error, PilotlightError) else type(error).__name__,
                )
            )
            raise


def _context_of(headers: Mapping[str, str] | None) -> Context | None:
    if not headers or _TRACEPARENT not in headers:
        return None
    return _propagator.extract(headers)


class _KeepFailures(Sampler):
    """Samples a share of the traces, and records the rest all the same: a failure is only known at
    its end.
    """

    def __init__(self, ratio: float) -> None:
        self._by_ratio = TraceIdRatioBased(ratio)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent: SpanContext = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            sampled = parent.trace_flags.sampled
        else:
            sampled = (
                self._by_ratio.should_sample(None, trace_id, name).decision
                is Decision.RECORD_AND_SAMPLE
            )
        return SamplingResult(
            Decision.RECORD_AND_SAMPLE if sampled else Decision.RECORD_ONLY, attributes, trace_state
        )

    def get_description(self) -> str:
        return "KeepFailures"


def _add_trace(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


def _to_json(value: Any, **_: Any) -> str:
    return msgspec.json.encode(value, enc_hook=repr).decode()
