"""Reporting the phases of cold starts: each process measures the work that it does itself and tells the leader.

A report is repeated until the leader has answered. Nothing here is in the path of a request: measuring reads a clock, sending
happens in the background.
"""

import asyncio
import random
from collections.abc import Generator
from contextlib import contextmanager

import structlog

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.service import Background
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.types import InstanceId, Phase, PhaseName

log = structlog.get_logger()

MAX_PENDING = 1024
"""Instances whose report waits to be sent; past it the oldest is dropped."""
MAX_PHASES = 1024
"""Phases of one report."""
GATHER_S = 0.02
"""Phases that end together travel together."""
REQUEST_DEADLINE_S = 2.0
KEEP_FOR_S = 60.0
"""A report that no leader has taken by then is dropped: its cold start has long been judged without it."""


class PhaseReporter:
    """Queues phases and sends them as ``PhaseReport``, one process's at a time."""

    def __init__(self, bus: Bus, clock: Clock, background: Background, process: str) -> None:
        self._bus = bus
        self._clock = clock
        self._process = process
        self._pending: dict[InstanceId, PhaseReport] = {}
        self._since_s: dict[InstanceId, float] = {}
        self._wake = asyncio.Event()
        self._rng = random.Random()
        background.spawn("phase reports", self._send_for_ever())

    @contextmanager
    def measure(self, instance_id: InstanceId, name: PhaseName, detail: str = "") -> Generator[None]:
        """Record what the body takes as one phase, also when it fails."""
        start_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self.record(instance_id, self.phase(name, start_s, self._clock.monotonic_s(), detail))

    def phase(self, name: PhaseName, start_s: float, end_s: float, detail: str = "") -> Phase:
        """A phase of this process, from two readings of the host's monotonic clock."""
        offset_s = wall_offset_s(self._clock)
        return Phase(name=name, start_s=start_s, end_s=end_s, wall_offset_s=offset_s, process=self._process, detail=detail)

    def record(self, instance_id: InstanceId, *phases: Phase) -> None:
        """Queue phases that are known already."""
        self._queue(PhaseReport(instance_id=instance_id, phases=phases))

    def first_token(self, instance_id: InstanceId, first_token: FirstToken) -> None:
        """Queue the end of a cold start."""
        self._queue(PhaseReport(instance_id=instance_id, phases=(), first_token=first_token))

    def _queue(self, report: PhaseReport) -> None:
        known = self._pending.get(report.instance_id)
        if known is None and len(self._pending) >= MAX_PENDING:
            dropped = next(iter(self._pending))
            self._forget(dropped)
            log.warning("phases dropped: too many wait", action="phases_dropped", instance_id=dropped)
        self._pending[report.instance_id] = report if known is None else _joined(known, report)
        self._since_s.setdefault(report.instance_id, self._clock.monotonic_s())
        self._wake.set()

    def _forget(self, instance_id: InstanceId) -> None:
        self._pending.pop(instance_id, None)
        self._since_s.pop(instance_id, None)

    async def _send_for_ever(self) -> None:
        backoff = Backoff(first_s=0.1, limit_s=2.0)
        failures = 0
        while True:
            await self._wake.wait()
            await pause(GATHER_S)
            self._wake.clear()
            if await self._send_all():
                failures = 0
                continue
            self._wake.set()
            await pause(backoff.delay_s(failures, self._rng))
            failures += 1

    async def _send_all(self) -> bool:
        """Send everything that waits; False as soon as the leader cannot be reached."""
        for instance_id in list(self._pending):
            report = self._pending.get(instance_id)
            since_s = self._since_s.get(instance_id)
            if report is None or since_s is None:
                continue
            self._forget(instance_id)
            try:
                await self._bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=REQUEST_DEADLINE_S)
            except PilotlightError as error:
                if not error.retryable or self._clock.monotonic_s() - since_s > KEEP_FOR_S:
                    log.warning("phases given up", action="phases_given_up", instance_id=instance_id, error=error.message)
                    continue
                self._put_back(report, since_s)
                return False
        return True

    def _put_back(self, report: PhaseReport, since_s: float) -> None:
        newer = self._pending.get(report.instance_id)
        self._pending[report.instance_id] = report if newer is None else _joined(report, newer)
        self._since_s[report.instance_id] = since_s


def _joined(older: PhaseReport, newer: PhaseReport) -> PhaseReport:
    phases = tuple(dict.fromkeys((*older.phases, *newer.phases)))[-MAX_PHASES:]
    return PhaseReport(instance_id=older.instance_id, phases=phases, first_token=newer.first_token or older.first_token)
