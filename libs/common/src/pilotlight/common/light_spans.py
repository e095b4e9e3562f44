"""Spans of traces that are not sampled: they carry the trace on, and cost next to nothing.

A failure is only known at its end, and is kept whatever share of traces is. So such a span knows
its beginning and its attributes, and becomes a finished one of OpenTelemetry's if it fails.
"""

import random
import time
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import ClassVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import Attributes, AttributeValue

_bits = random.Random().getrandbits


class LightSpan(NonRecordingSpan):
    """A span that is recorded only if it fails."""

    current: ClassVar[ContextVar["LightSpan | None"]] = ContextVar("light span", default=None)
    """The current span, where it is a light one: a context of OpenTelemetry's around each would
    take as much memory as all else of it."""

    def __init__(
        self, name: str, kind: SpanKind, parent: SpanContext | None, attributes: Attributes
    ) -> None:
        """Begins now.

        Args:
            name: what is done.
            kind: for whom.
            parent: None: it is the first of a trace. Otherwise it has its parent's context as
                long as it does not fail: what comes of it belongs to the parent.
            attributes: known at its beginning.
        """
        # What its base does, without a call: there are several of these for each request.
        self._context = parent if parent is not None else _context(_bits(128) or 1)
        self._name, self._kind, self._parent = name, kind, parent
        self._attributes = tuple(attributes.items()) if attributes else ()
        self._began_ns = time.time_ns()
        self._traceparent = ""

    @property
    def traceparent(self) -> str:
        """Its context as W3C says it: not sampled."""
        if not self._traceparent:
            trace_id, span_id = self._context[:2]
            self._traceparent = f"00-{trace_id:032x}-{span_id:016x}-00"
        return self._traceparent

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


def current_span(context: Context | None = None) -> Span:
    """The span of a context; None: the one that is current here."""
    light = LightSpan.current.get() if context is None else None
    return trace.get_current_span(context) if light is None else light


def _context(trace_id: int) -> SpanContext:
    """Of a new span in a trace."""
    return SpanContext(trace_id, _bits(64) or 1, is_remote=False)
