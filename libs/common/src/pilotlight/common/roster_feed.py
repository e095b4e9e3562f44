"""Keeps a roster current from the bus: a component of every service that listens to reports."""

from collections.abc import Callable

import structlog

from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.clock import Clock
from pilotlight.common.messages.reports import (
    LOADER_REPORTS,
    NODE_REPORTS,
    WORKER_REPORTS,
    LoaderReport,
    NodeReport,
    TellWhole,
    WorkerReport,
    whole_subject,
)
from pilotlight.common.roster import News, Roster
from pilotlight.common.service import Background
from pilotlight.common.waiting import every
from pilotlight.policy.ids import NodeId

log = structlog.get_logger()

CHECK_INTERVAL_S = 0.1
"""A lost connection and a silent sender are noticed within this time."""
ASK_AGAIN_S = 0.4
"""A node that was asked for its whole state has this long: less than to its next report."""
STALL_S = 0.5
"""A check that is later than this says that this process did not run: whatever was sent to it
meanwhile lies unread."""


class RosterFeed:
    """Subscribes to reports, watches the connection, and notices when this process stood still."""

    def __init__(self, bus: Bus, clock: Clock, background: Background, roster: Roster) -> None:
        self.roster = roster
        self._bus = bus
        self._clock = clock
        self._background = background
        self._subscriptions: list[Subscription] = []
        self._told: list[Callable[[News], None]] = []
        self._asked_s: dict[NodeId, float] = {}

    def on_news(self, callback: Callable[[News], None]) -> None:
        """Call with whatever changes in the roster, after it has."""
        self._told.append(callback)

    async def start(self) -> None:
        """Listen from now on."""
        if self._subscriptions:
            return
        self._bus.on_reconnect(self._reconnected)
        self._subscriptions = [
            await self._bus.subscribe(WORKER_REPORTS, WorkerReport, self.hear_worker),
            await self._bus.subscribe(LOADER_REPORTS, LoaderReport, self.hear_loader),
            # Thousands a second, also at rest: each is taken as it is read.
            await self._bus.hear(NODE_REPORTS, NodeReport, self.hear_node),
        ]
        self._background.spawn("check the roster", self._check_for_ever())

    async def stop(self) -> None:
        """Listen no more."""
        while self._subscriptions:
            await self._subscriptions.pop().end()

    async def hear_worker(self, report: WorkerReport) -> None:
        """Take a worker's report."""
        self._tell(self.roster.hear_worker(report, self._clock.monotonic_s()))

    async def hear_loader(self, report: LoaderReport) -> None:
        """Take a loader's report."""
        self._tell(self.roster.hear_loader(report, self._clock.monotonic_s()))

    def hear_node(self, report: NodeReport) -> None:
        """Take a node's report; ask for all that it has where something is missing here."""
        now_s = self._clock.monotonic_s()
        news = self.roster.hear_node(report, now_s)
        self._tell(news)
        node_id = report.node_id
        if news.unknown is None:
            self._asked_s.pop(node_id, None)
            return
        due = now_s - self._asked_s.get(node_id, float("-inf")) >= ASK_AGAIN_S
        # What cannot be sent now is asked with one of the next reports.
        if due and self._bus.publish_soon(whole_subject(node_id), TellWhole(node_id=node_id)):
            self._asked_s[node_id] = now_s

    def check(self) -> None:
        """Bring liveness up to now."""
        now_s = self._clock.monotonic_s()
        self.roster.hear_connection(self._bus.connected, now_s)
        self._tell(self.roster.check(now_s))

    def was_away(self, seconds: float) -> None:
        """This process did not run for so long, until now."""
        log.warning(
            "this process did not run for a while",
            action="process_stalled",
            seconds=round(seconds, 3),
        )
        self.roster.was_away(seconds, self._clock.monotonic_s())

    async def _reconnected(self) -> None:
        self.roster.hear_connection(True, self._clock.monotonic_s())

    async def _check_for_ever(self) -> None:
        checked_s = self._clock.monotonic_s()
        async for _ in every(CHECK_INTERVAL_S):
            late_s = self._clock.monotonic_s() - checked_s - CHECK_INTERVAL_S
            if late_s > STALL_S:
                self.was_away(late_s)
            checked_s = self._clock.monotonic_s()
            self.check()

    def _tell(self, news: News) -> None:
        if not (news.workers or news.nodes):
            return
        for loss in news.losses:
            log.warning("worker lost", action="worker_lost", worker_id=loss.worker_id, why=loss.why)
        for callback in self._told:
            callback(news)
