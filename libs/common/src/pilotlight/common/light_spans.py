"""Spans of traces that are not sampled: they carry the trace on, and cost next to nothing.

A failure is only known at its end, and is kept whatever share of traces is. So such a span knows
its beginning and its attributes, and becomes a finished one of OpenTelemetry's if it fails.
"""

import functools
import random
import time
from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import Attributes, AttributeValue

_bits = random.Random().getrandbits


class LightSpan(NonRecordingSpan):
    """A span that is recorded only if it fails."""

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
        context = parent if parent is not None else _context(_bits(128) or 1)
        super().__init__(context)
        self._name, self._kind, self._parent = name, kind, parent
        self._attributes: dict[str, AttributeValue] = dict(attributes or {})
        self._began_ns = time.time_ns()

    @functools.cached_property
    def traceparent(self) -> str:
        """Its context as W3C says it: not sampled."""
        context = self.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-00"

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Add what is known later."""
        self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Add what is known later."""
        self._attributes.update(attributes)

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
            attributes=self._attributes,
            kind=self._kind,
            status=Status(StatusCode.ERROR, code),
            start_time=self._began_ns,
            end_time=time.time_ns(),
        )


def _context(trace_id: int) -> SpanContext:
    """Of a new span in a trace."""
    return SpanContext(trace_id, _bits(64) or 1, is_remote=False)
