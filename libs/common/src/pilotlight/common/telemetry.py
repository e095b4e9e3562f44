"""Logs and traces.

Logs are JSON lines on standard error, each with the trace that it belongs to. Spans are
OpenTelemetry's; they cross processes as W3C trace context in headers, and go in batches over the
bus to a gateway, which keeps them for the trace viewer, and to an OTLP endpoint where one is set. A
request makes a handful of spans, never one for each token.
"""

import asyncio
import contextlib
import logging
import random
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue
from prometheus_client import CollectorRegistry, Counter

from pilotlight.common.errors import PilotlightError
from pilotlight.common.light_spans import (
    Around,
    Joined,
    LightSpan,
    Tokens,
    Within,
    attach,
    current_span,
    detach,
    unsampled_context,
)
from pilotlight.common.logs import LEVELS, stamp, to_json, write_logs
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.span_senders import SampledSpans, SpanSender, otlp_export, record_of

log = structlog.get_logger()


_TRACEPARENT = "traceparent"
_SAMPLED_FLAGS = ("-01", "-03")
"""Ends of contexts that are sampled; the second bit says that the trace id is random."""
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
        self.finished = SampledSpans([])
        self.ratio = 1.0
        """Share of traces that is sampled, of those that begin here."""
        self.rng = random.Random()
        self.log_service = ""
        """In every log line; empty before logs are configured."""
        self.log_level = logging.INFO

    def sampled(self, parent: SpanContext) -> bool:
        """A span with this parent is recorded: decided where its trace begins."""
        if parent.is_valid:
            return parent.trace_flags.sampled
        return self.rng.random() < self.ratio


_telemetry = _Telemetry()


def configure_logging(service: str, level: str = "info") -> None:
    """Write every log line of this process, also those of libraries, as JSON on standard error."""
    _telemetry.log_service, _telemetry.log_level = service, LEVELS.get(level, logging.INFO)
    write_logs(service, level, _add_trace)


def log_request(event: str, action: str, **told: object) -> None:
    """An info line that comes with each request, as structlog would write it: that makes a logger
    and passes seven processors for each, at a twentieth of all that a request costs.

    Args:
        event: what happened, for people.
        action: the same as a stable identifier.
        told: what else the line says.
    """
    if not _telemetry.log_service or _telemetry.log_level > logging.INFO:
        return
    line: dict[str, Any] = {
        "action": action,
        **told,
        "event": event,
        "service": _telemetry.log_service,
        "level": "info",
        "timestamp": stamp(),
    }
    text = to_json(_add_trace(None, "info", line))
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


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
        sampler=ALWAYS_ON,
        resource=Resource.create({"service.name": f"pilotlight-{service}"}),
        shutdown_on_exit=False,
    )
    _telemetry.finished = SampledSpans(senders)
    provider.add_span_processor(_telemetry.finished)
    for sender in senders:
        sender.start()
    _telemetry.senders, _telemetry.ratio = senders, settings.trace_sample_ratio
    _telemetry.provider = provider
    _telemetry.tracer = provider.get_tracer("pilotlight")


async def stop_telemetry() -> None:
    """Send what is queued, within a deadline, and make no more spans."""
    senders, provider = _telemetry.senders, _telemetry.provider
    _telemetry.senders, _telemetry.provider, _telemetry.tracer = [], None, None
    await asyncio.gather(*(sender.stop() for sender in senders))
    if provider is not None:
        provider.shutdown()


def span(name: str, **attributes: AttributeValue) -> AbstractContextManager[Span]:
    """A span around a piece of work.

    An error that leaves the body marks it by its code; its message is not recorded, for it may
    quote input.
    """
    light = LightSpan.current.get()
    if light is not None:
        return Within(name, SpanKind.INTERNAL, light, attributes, _keep_failed)
    return _Spanned(name, SpanKind.INTERNAL, None, attributes)


def annotate(**attributes: AttributeValue) -> None:
    """Set attributes of the current span; nothing where there is none."""
    current_span().set_attributes(attributes)


def client_span(name: str) -> AbstractContextManager[Span]:
    """A span around a request to another process."""
    light = LightSpan.current.get()
    if light is not None:
        return Within(name, SpanKind.CLIENT, light, None, _keep_failed)
    return _Spanned(name, SpanKind.CLIENT, None, None)


def server_span(
    name: str, headers: Mapping[str, str] | None, record: bool = True
) -> AbstractContextManager[Span]:
    """A span around the answer to a request, in the trace that its headers name.

    With ``record=False`` the trace context becomes current and there is no span: for what happens
    often.
    """
    if record and headers and _telemetry.tracer is not None:
        told = headers.get(_TRACEPARENT, "")
        remote = unsampled_context(told)
        if remote is not None:
            return Around(LightSpan(name, SpanKind.SERVER, remote, None, told), _keep_failed)
    parent = _context_of(headers)
    if record:
        return _Spanned(name, SpanKind.SERVER, parent, None)
    return Joined(parent)


def begin_span(name: str, traceparent: str, **attributes: AttributeValue) -> Span | None:
    """A span in the trace of a W3C context, for work that ends elsewhere: the caller ends it.

    It is current nowhere. None where the trace is not sampled: such a span would be sent only if
    it failed, and this one is for work that cannot.
    """
    tracer = _telemetry.tracer
    if tracer is None or not traceparent.endswith(_SAMPLED_FLAGS):
        return None
    parent = _context_of({_TRACEPARENT: traceparent})
    return tracer.start_span(name, context=parent, attributes=attributes)


def with_parent(traceparent: str) -> AbstractContextManager[Span]:
    """Make a W3C trace context current; an empty or malformed one changes nothing."""
    return server_span("", {_TRACEPARENT: traceparent} if traceparent else None, record=False)


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
    light = LightSpan.current.get()
    if light is not None:
        return light.traceparent[:-2] + "01" if keep else light.traceparent
    if not otel_context.get_current():
        return ""
    current = current_span()
    if isinstance(current, LightSpan) and not keep:
        return current.traceparent
    context = current.get_span_context()
    if not context.is_valid:
        return ""
    flags = context.trace_flags | (TraceFlags.SAMPLED if keep else 0)
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


class _Spanned:
    """A span that is current around its body.

    A class and no generator: there are several for each request. One of a trace that is not sampled
    is a light one, and only the first of them is current: those within it (``Within``) have its
    context.
    """

    __slots__ = ("_attributes", "_before", "_kind", "_name", "_parent", "_span", "_tokens")

    def __init__(
        self, name: str, kind: SpanKind, parent: Context | None, attributes: Attributes
    ) -> None:
        self._name, self._kind, self._parent, self._attributes = name, kind, parent, attributes
        self._span: Span = trace.INVALID_SPAN
        self._tokens: Tokens | None = None
        self._before: LightSpan | None = None

    def __enter__(self) -> Span:
        tracer, before = _telemetry.tracer, current_span(self._parent)
        if tracer is None:
            if self._parent is not None:
                self._tokens = attach(self._parent)
            return before
        parent, current = before.get_span_context(), self._parent
        if _telemetry.sampled(parent):
            self._span = tracer.start_span(
                self._name, context=current, kind=self._kind, attributes=self._attributes
            )
            current = trace.set_span_in_context(self._span, current)
        elif parent.is_valid:
            self._span = LightSpan(self._name, self._kind, parent, self._attributes)
        else:
            light = self._span = LightSpan(self._name, self._kind, None, self._attributes)
            # Without the token of a context variable: that would be kept as long.
            self._before = LightSpan.current.get()
            LightSpan.current.set(light)
            return light
        if current is not None:
            self._tokens = attach(current)
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tokens is not None:
            detach(self._tokens)
        if self._span is LightSpan.current.get():
            LightSpan.current.set(self._before)
        if error is None and type(self._span) is LightSpan:
            return
        if isinstance(error, Exception):
            if isinstance(self._span, LightSpan):
                _keep_failed(self._span, error)
            self._span.set_status(Status(StatusCode.ERROR, _code_of(error)))
        self._span.end()


def _keep_failed(light: LightSpan, error: Exception) -> None:
    provider = _telemetry.provider
    if provider is not None:
        _telemetry.finished.on_end(light.failed(_code_of(error), provider.resource))


def _code_of(error: Exception) -> str:
    return error.code if isinstance(error, PilotlightError) else type(error).__name__


def _context_of(headers: Mapping[str, str] | None) -> Context | None:
    if not headers or _TRACEPARENT not in headers:
        return None
    return _propagator.extract(headers)


def _add_trace(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    light = LightSpan.current.get()
    if light is not None:
        event["trace_id"] = light.traceparent[3:35]
        return event
    context = current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event
