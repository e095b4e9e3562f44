"""Telling everyone what this worker holds, at once on change: through its loader, while that passes
it on, else by itself every 200 ms; and as a last value for late joiners.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import structlog

from pilotlight.common.buckets import Bucket
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.pool import Relayed, WorkerHere, WorkerSaid
from pilotlight.common.messages.reports import (
    REPORT_INTERVAL_S,
    WorkerReport,
    worker_report_subject,
)
from pilotlight.common.node_state import aged_alike
from pilotlight.common.waiting import Backoff, pause, within, woken
from pilotlight.dataplane.report_connection import ReportConnection
from pilotlight.policy.cluster import WorkerFacts
from pilotlight.policy.ids import Epoch
from pilotlight.policy.shown import NO_TIMES
from pilotlight.worker.core import WorkerCore

log = structlog.get_logger()

PUBLISH_DEADLINE_S = 1.0
LOADER_PATIENCE_S = 0.75
"""A loader says twice a second that it passes reports on. After so long without a word this worker
reports itself, before it is suspect."""


class Reporter:
    """Gives ``WorkerReport`` to the loader or publishes it, and keeps the worker's key in the
    bucket ``workers``.
    """

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
        self._loader: ReportConnection | None = None
        self._is_asked = False
        """The loader of this connection wants reports."""
        self._relayed_s = float("-inf")
        self._given: tuple[WorkerFacts, Epoch, float] | None = None
        """What the loader of this connection has, and since when."""
        self._stale = asyncio.Event()
        self._rng = random.Random()

    def start(self) -> None:
        """Report from now on."""
        self._core.background.spawn(f"reports of {self._core.worker_id}", self._report_for_ever())
        self._core.background.spawn(f"last value of {self._core.worker_id}", self._keep_for_ever())
        self._core.bus.on_reconnect(self._resync)

    # The loader's connection.

    def opened(self, connection: ReportConnection) -> None:
        self._loader, self._is_asked, self._given = connection, False, None

    def on_relayed(self, relayed: Relayed) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._core.changed.set()
        if relayed.seq:
            self._relayed_s = self._core.clock.monotonic_s()

    def closed(self) -> None:
        self._loader, self._relayed_s = None, float("-inf")
        self._core.changed.set()

    # Within.

    async def _resync(self) -> None:
        """The server may have come back without its memory."""
        self._kept = None
        self._core.changed.set()

    async def _report_for_ever(self) -> None:
        while True:
            facts = self._facts()
            if _slow(facts) != self._kept:
                self._kept = _slow(facts)
                self._stale.set()
            await self.tell(facts)
            await woken(self._core.changed, REPORT_INTERVAL_S)

    async def tell(self, facts: WorkerFacts) -> None:
        """Tell everyone what this worker is now."""
        epoch = self._epoch()
        self._give(facts, epoch)
        if self._core.clock.monotonic_s() - self._relayed_s > LOADER_PATIENCE_S:
            await self._publish(self._next(facts, epoch))

    def _next(self, facts: WorkerFacts, epoch: Epoch) -> WorkerReport:
        self._seq += 1
        return WorkerReport(
            facts=facts, incarnation=self._incarnation, epoch_seen=epoch, seq=self._seq
        )

    def _give(self, facts: WorkerFacts, epoch: Epoch) -> None:
        """Say it to the loader, or that it is as before, where the loader wants to hear it."""
        if self._loader is None or not self._is_asked:
            return
        now_s = self._core.clock.monotonic_s()
        given = self._given
        if given is not None and given[1] == epoch and _alike(given[0], facts, now_s - given[2]):
            self._loader.send(WorkerHere())
            return
        report = self._next(facts, epoch)
        said = WorkerSaid(report=encode_json(report), seq=report.seq)
        # What is not taken is said again with the next turn.
        self._given = (facts, epoch, now_s) if self._loader.send(said) else None

    async def _publish(self, report: WorkerReport) -> None:
        try:
            subject = worker_report_subject(self._core.worker_id)
            await within(
                PUBLISH_DEADLINE_S, self._core.bus.publish(subject, report), "sending a report"
            )
        except PilotlightError as error:
            log.warning("report lost", action="report_lost", error=error.message)

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
    """The facts without those that change with every request, or while KV grows into a loan."""
    held = tuple(
        replace(
            stage,
            in_flight=0,
            idle_s=0.0,
            idle_device_s=0.0,
            kv_capacity_tokens=stage.kv_reach_tokens,
            times=NO_TIMES,
            loan=replace(stage.loan, lent_bytes=0, wanted_bytes=0, limit_tokens=0),
        )
        for stage in facts.held
    )
    return replace(
        facts, held=held, queue_requests=0, running_requests=0, kv_free_tokens=0, step_time_s=0.0
    )


def _alike(before: WorkerFacts, now: WorkerFacts, elapsed_s: float) -> bool:
    """Whether nothing has changed but how long stages have been idle."""
    if len(before.held) != len(now.held):
        return False
    return all(
        aged_alike(one.idle_s, other.idle_s, elapsed_s)
        for one, other in zip(before.held, now.held, strict=True)
    ) and _ageless(before) == _ageless(now)


def _ageless(facts: WorkerFacts) -> WorkerFacts:
    return replace(facts, held=tuple(replace(one, idle_s=0.0) for one in facts.held))
