"""Spans of prefills: from a request's acceptance to its first token, in the trace that its submit
came with.
"""

from collections import OrderedDict

from opentelemetry.trace import Span

from pilotlight.common.telemetry import begin_span
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.request import RequestKey

MAX_OPEN = 4096
"""Requests of sampled traces that wait for their first token; the oldest span ends without it when
there are more."""


class PrefillSpans:
    """Open spans by request."""

    def __init__(self) -> None:
        self._open: OrderedDict[RequestKey, Span] = OrderedDict()

    @property
    def any(self) -> bool:
        """A span is open."""
        return bool(self._open)

    def begin(self, key: RequestKey, instance_id: InstanceId, trace_parent: str) -> None:
        """The request is accepted. One whose trace is not sampled has no span."""
        if key in self._open:
            return
        begun = begin_span(
            "prefill",
            trace_parent,
            instance_id=instance_id,
            request_id=key.request_id,
            attempt=key.attempt,
        )
        if begun is None:
            return
        self._open[key] = begun
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)[1].end()

    def end(self, key: RequestKey) -> None:
        """It has its first token, or ended without one. Saying it again changes nothing."""
        begun = self._open.pop(key, None)
        if begun is not None:
            begun.end()
