"""Sends the phases that a process records to the leader, until the leader has answered.

Nothing here is in the path of a request: sending happens in the background.
"""

import asyncio
import random

import structlog

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.phases import PhaseRecorder
from pilotlight.common.service import Background
from pilotlight.common.waiting import Backoff, pause

log = structlog.get_logger()

GATHER_S = 0.02
"""Phases that end together travel together."""
REQUEST_DEADLINE_S = 2.0
KEEP_FOR_S = 60.0
"""A report that no leader has taken by then is dropped: its cold start was judged without it."""


def reported_phases(
    bus: Bus, clock: Clock, background: Background, process: str, place: str = ""
) -> PhaseRecorder:
    """A recorder whose phases are sent to the leader in the background.

    Args:
        bus: to the leading scheduler.
        clock: what phases are measured by.
        background: owns the task that sends.
        process: the kind of process that measures, as it stands in the record.
        place: see ``PhaseReport``.
    """
    recorder = PhaseRecorder(clock, process)
    background.spawn("phase reports", _Sender(bus, clock, recorder, place).run())
    return recorder


class _Sender:
    """Sends what is recorded as ``PhaseReport``, one instance after the other."""

    def __init__(self, bus: Bus, clock: Clock, recorder: PhaseRecorder, place: str) -> None:
        self._place = place
        self._bus = bus
        self._clock = clock
        self._recorder = recorder
        self._wake = asyncio.Event()
        self._rng = random.Random()
        recorder.on_recorded = self._wake.set

    async def run(self) -> None:
        """Send for ever."""
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
        for instance_id in self._recorder.pending:
            taken = self._recorder.take(instance_id)
            if not taken.phases and taken.first_token is None:
                continue  # It was dropped meanwhile: too many wait.
            phases = tuple(dict.fromkeys(taken.phases))
            report = PhaseReport(
                instance_id=instance_id,
                phases=phases,
                first_token=taken.first_token,
                place=self._place,
            )
            try:
                await self._bus.request(
                    PHASES_SUBJECT, report, PhasesKept, deadline_s=REQUEST_DEADLINE_S
                )
            except PilotlightError as error:
                if not error.retryable or self._clock.monotonic_s() - taken.since_s > KEEP_FOR_S:
                    log.warning(
                        "phases given up",
                        action="phases_given_up",
                        instance_id=instance_id,
                        error=error.message,
                    )
                    continue
                self._recorder.put_back(instance_id, taken)
                return False
        return True
