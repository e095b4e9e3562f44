"""Spans of prefills: from a request's acceptance to its first token, in the trace that its submit
came with.
"""

import asyncio

from pilotlight.common.service import Background
from pilotlight.common.telemetry import span, with_parent
from pilotlight.common.waiting import woken
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.request import RequestKey

LONGEST_S = 600.0
"""A prefill that takes longer has its span ended without it."""


class PrefillSpans:
    """Open spans by request."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._open: dict[RequestKey, asyncio.Event] = {}

    def begin(self, key: RequestKey, instance_id: InstanceId, trace_parent: str) -> None:
        """The request is accepted. One without a trace has no span."""
        if trace_parent and key not in self._open:
            self._open[key] = ended = asyncio.Event()
            self._background.spawn(
                f"prefill span of {key.request_id}",
                self._span(key, instance_id, trace_parent, ended),
            )

    def end(self, key: RequestKey) -> None:
        """It has its first token, or ended without one. Saying it again changes nothing."""
        ended = self._open.pop(key, None)
        if ended is not None:
            ended.set()

    async def _span(
        self, key: RequestKey, instance_id: InstanceId, trace_parent: str, ended: asyncio.Event
    ) -> None:
        # A task of its own: a span has to begin and end in one context.
        with (
            with_parent(trace_parent),
            span(
                "prefill", instance_id=instance_id, request_id=key.request_id, attempt=key.attempt
            ),
        ):
            await woken(ended, LONGEST_S)
        self._open.pop(key, None)
