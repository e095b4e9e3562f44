"""All services to gateways: finished spans, so that the trace viewer needs no collector."""

from msgspec import field

from pilotlight.common.messages.codec import Message

SPANS_SUBJECT = "v1.spans"
"""``SpanBatch``: a notification, and like all of them it may be lost. Gateways listen as one queue
group."""


class SpanRecord(Message, frozen=True, kw_only=True):
    """One finished span.

    Times are Unix time in seconds; ``parent_id`` is empty for the root of a trace.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    name: str
    service: str
    start_at_s: float
    end_at_s: float
    status: str = "ok"
    """``ok``, or the code of the error that ended it."""
    attributes: dict[str, str | int | float | bool] = field(
        default_factory=dict[str, str | int | float | bool]
    )


class SpanBatch(Message, frozen=True, kw_only=True):
    """Spans of one process, in the order in which they ended."""

    spans: tuple[SpanRecord, ...]
