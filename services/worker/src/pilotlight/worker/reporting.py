"""Telling everyone what this worker holds: every 200 ms, at once on change, and as a last value for
late joiners.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.reports import (
    REPORT_INTERVAL_S,
    WorkerReport,
    worker_report_subject,
)
from pilotlight.common.waiting import Backoff, pause, within, woken
from pilotlight.policy.cluster import WorkerFacts
from pilotlight.policy.ids import Epoch
from pilotlight.worker.core import WorkerCore

log = structlog.get_logger()

PUBLISH_DEADLINE_S = 1.0


class Reporter:
    """Publishes ``WorkerReport``, and keeps the worker's key in the bucket ``workers``."""

    def __init__(
        self,
        core: WorkerCore,
        bucket: Bucket,
        incarnation: str,
        facts: Callable[[], WorkerFacts],
        epoch: Callable[[], Epoch],
    ) -> None:
        self._core = core
        self._bucket = bucket
        self._incarnation = incarnation
        self._facts = facts
        self._epoch = epoch
        self._kept: WorkerFacts | None = None
        self._seq = 0
        self._stale = asyncio.Event()
        self._rng = random.Random()

    def start(self) -> None:
        """Report from now on."""
        self._core.background.spawn(f"reports of {self._core.worker_id}", self._report_for_ever())
        self._core.background.spawn(f"last value of {self._core.worker_id}", self._keep_for_ever())
        self._core.bus.on_reconnect(self._resync)

    async def _resync(self) -> None:
        """The server may have come back without its memory."""
        self._kept = None
        self._core.changed.set()

    async def _report_for_ever(self) -> None:
        subject = worker_report_subject(self._core.worker_id)
        while True:
            facts = self._facts()
            if _slow(facts) != self._kept:
                self._kept = _slow(facts)
                self._stale.set()
            self._seq += 1
            report = WorkerReport(
                facts=facts, incarnation=self._incarnation, epoch_seen=self._epoch(), seq=self._seq
            )
            try:
                await within(
                    PUBLISH_DEADLINE_S, self._core.bus.publish(subject, report), "sending a report"
                )
            except PilotlightError as error:
                log.warning("report lost", action="report_lost", error=error.message)
            await woken(self._core.changed, REPORT_INTERVAL_S)

    async def _keep_for_ever(self) -> None:
        """Write the last value; what changes while it is being written is written next."""
        backoff = Backoff(first_s=0.1, limit_s=2.0)
        failures = 0
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._bucket.put(self._core.worker_id, self._facts())
                failures = 0
            except PilotlightError as error:
                # It is said again until it is heard: late joiners have nothing else.
                log.warning(
                    "last value not written", action="worker_value_lost", error=error.message
                )
                self._stale.set()
                await pause(backoff.delay_s(failures, self._rng))
                failures += 1


def _slow(facts: WorkerFacts) -> WorkerFacts:
    """The facts without those that change with every request."""
    held = tuple(replace(stage, in_flight=0, idle_s=0.0) for stage in facts.held)
    return replace(
        facts, held=held, queue_requests=0, running_requests=0, kv_free_tokens=0, step_time_s=0.0
    )
