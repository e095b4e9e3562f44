"""Spans of traces that are not sampled: they carry the trace on, and cost next to nothing.

A failure is only known at its end, and is kept whatever share of traces is. So such a span knows
its beginning and its attributes, and becomes a finished one of OpenTelemetry's if it fails.
"""

import random
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import ClassVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import Attributes, AttributeValue

_bits = random.Random().getrandbits
_unsampled = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-0[02]").fullmatch


class LightSpan(NonRecordingSpan):
    """A span that is recorded only if it fails."""

    current: ClassVar[ContextVar["LightSpan | None"]] = ContextVar("light span", default=None)
    """The current span, where it is a light one: a context of OpenTelemetry's around each would
    take as much memory as all else of it."""

    def __init__(
        self,
        name: str,
        kind: SpanKind,
        parent: SpanContext | None,
        attributes: Attributes,
        traceparent: str = "",
    ) -> None:
        """Begins now.

        Args:
            name: what is done.
            kind: for whom.
            parent: None: it is the first of a trace. Otherwise it has its parent's context as
                long as it does not fail: what comes of it belongs to the parent.
            attributes: known at its beginning.
            traceparent: its context as W3C says it, where that is known.
        """
        # What its base does, without a call: there are several of these for each request.
        self._context = parent if parent is not None else _context(_bits(128) or 1)
        self._name, self._kind, self._parent = name, kind, parent
        self._attributes = tuple(attributes.items()) if attributes else ()
        self._began_ns = time.time_ns()
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str:
        """Its context as W3C says it: not sampled."""
        if self._traceparent:
            return self._traceparent
        # Not kept: many spans wait for long.
        trace_id, span_id = self._context[:2]
        return f"00-{trace_id:032x}-{span_id:016x}-00"

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Add what is known later."""
        self._attributes = (*self._attributes, (key, value))

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Add what is known later."""
        self._attributes = (*self._attributes, *attributes.items())

    def failed(self, code: str, resource: Resource) -> ReadableSpan:
        """It ends now, with an error.

        Args:
            code: the error's.
            resource: what the process is.
        """
        context = self.get_span_context()
        return ReadableSpan(
            self._name,
            context=context if self._parent is None else _context(context.trace_id),
            parent=self._parent,
            resource=resource,
            attributes=dict(self._attributes),
            kind=self._kind,
            status=Status(StatusCode.ERROR, code),
            start_time=self._began_ns,
            end_time=time.time_ns(),
        )


class Within(LightSpan):
    """A light span within the current one, around a body: it is not current itself."""

    def __init__(
        self,
        name: str,
        kind: SpanKind,
        around: LightSpan,
        attributes: Attributes,
        on_failure: Callable[[LightSpan, Exception], None],
    ) -> None:
        """As ``LightSpan``; ``on_failure`` hears of an error that leaves the body."""
        self._context = self._parent = around._context
        self._name, self._kind = name, kind
        self._attributes = tuple(attributes.items()) if attributes else ()
        self._began_ns = time.time_ns()
        self._traceparent = ""
        self._on_failure = on_failure

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._on_failure(self, error)


Tokens = tuple[Token[Context], Token[LightSpan | None]]
"""What ``detach`` takes."""


def attach(context: Context) -> Tokens:
    """Make a context of OpenTelemetry's current."""
    return otel_context.attach(context), LightSpan.current.set(None)


def detach(tokens: Tokens) -> None:
    """Make current what was before."""
    attached, hidden = tokens
    otel_context.detach(attached)
    LightSpan.current.reset(hidden)


class Joined:
    """Makes a trace context current, without a span; None changes nothing."""

    __slots__ = ("_parent", "_tokens")

    def __init__(self, parent: Context | None) -> None:
        self._parent = parent
        self._tokens: Tokens | None = None

    def __enter__(self) -> Span:
        if self._parent is not None:
            self._tokens = attach(self._parent)
        return trace.INVALID_SPAN

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tokens is not None:
            detach(self._tokens)


class Around:
    """Makes a light span current around its body: of a trace that began elsewhere, as most of what
    is served.
    """

    __slots__ = ("_on_failure", "_span", "_token")

    def __init__(
        self, light: LightSpan, on_failure: Callable[[LightSpan, Exception], None]
    ) -> None:
        """``on_failure`` hears of an error that leaves the body."""
        self._span, self._on_failure = light, on_failure

    def __enter__(self) -> Span:
        self._token = LightSpan.current.set(self._span)
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        LightSpan.current.reset(self._token)
        if isinstance(error, Exception):
            self._on_failure(self._span, error)


def current_span(context: Context | None = None) -> Span:
    """The span of a context; None: the one that is current here."""
    light = LightSpan.current.get() if context is None else None
    return trace.get_current_span(context) if light is None else light


def unsampled_context(traceparent: str) -> SpanContext | None:
    """What a W3C context says of a trace that is not sampled; None for any other, and for one that
    is not valid.
    """
    said = _unsampled(traceparent)
    if said is None:
        return None
    context = SpanContext(int(said[1], 16), int(said[2], 16), is_remote=True)
    return context if context.is_valid else None


def _context(trace_id: int) -> SpanContext:
    """Of a new span in a trace."""
    return SpanContext(trace_id, _bits(64) or 1, is_remote=False)
