"""The loader speaks for its workers: their reports go to it, and one report of the node to all.

It does while it is told that every listener understands that (``common/report_style.py``).
Otherwise, and while it is gone or stands still, its workers report themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pilotlight.common.clock import Clock
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.pool import Hello, Relayed, WorkerHere, WorkerSaid
from pilotlight.common.messages.reports import (
    LOADER_PART,
    Coalesce,
    LoaderReport,
    NodeReport,
    TellWhole,
)
from pilotlight.common.node_state import NodeTeller, aged_alike
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.policy.cluster import Copy, NodeFacts
from pilotlight.policy.ids import NodeId, WorkerId

SILENT_S = 0.35
"""A worker speaks every 0.2 s; one that has said nothing for so long is not vouched for."""


@dataclass(slots=True)
class _Worker:
    hello: Hello
    send: Callable[[Relayed], None]
    heard_s: float
    report: bytes = b""
    seq: int = 0
    is_new: bool = False


class Coalescing:
    """What the workers of this node have said, and what was said of the node."""

    def __init__(
        self,
        node_id: NodeId,
        incarnation: str,
        clock: Clock,
        metrics: LoaderMetrics,
        note: Callable[[], None],
    ) -> None:
        """Speaks for no worker yet.

        Args:
            node_id: the node.
            incarnation: of this loader's process.
            clock: monotonic.
            metrics: count what is sent.
            note: called when there is something new to report.
        """
        self._clock = clock
        self._metrics = metrics
        self._note = note
        self._teller = NodeTeller(node_id, incarnation, clock.monotonic_s())
        self._workers: dict[WorkerId, _Worker] = {}
        self._until_s = float("-inf")
        self._said: LoaderReport | None = None
        self._said_s = 0.0

    @property
    def allowed(self) -> bool:
        """Whether all listeners understand a node's report."""
        return self._clock.monotonic_s() < self._until_s

    # From the bus.

    async def on_coalesce(self, told: Coalesce) -> None:
        """A scheduler says whether all listeners understand."""
        was = self.allowed
        self._until_s = self._clock.monotonic_s() + told.for_s
        if self.allowed and not was:
            self._teller.ask()
            for worker in self._workers.values():
                worker.send(Relayed(seq=worker.seq))
            self._note()

    async def on_whole(self, told: TellWhole) -> None:
        """A listener has missed something."""
        self._teller.ask()
        self._note()

    # From workers.

    def opened(self, hello: Hello, send: Callable[[Relayed], None]) -> None:
        worker = _Worker(hello, send, self._clock.monotonic_s())
        self._workers[hello.worker_id] = worker
        if self.allowed:
            send(Relayed(seq=0))

    def on_said(self, hello: Hello, said: WorkerSaid | WorkerHere) -> None:
        worker = self._workers.get(hello.worker_id)
        if worker is None or worker.hello is not hello:
            return
        worker.heard_s = self._clock.monotonic_s()
        if isinstance(said, WorkerSaid):
            worker.report, worker.seq, worker.is_new = said.report, said.seq, True
            self._note()

    def closed(self, hello: Hello) -> None:
        worker = self._workers.get(hello.worker_id)
        if worker is not None and worker.hello is hello:
            del self._workers[hello.worker_id]

    # To everyone.

    def wait_s(self) -> float:
        """How long until a report is due, if nothing changes."""
        return self._teller.wait_s(self._clock.monotonic_s())

    def report(self, loader: LoaderReport) -> NodeReport | None:
        """What is to be said of the node now; None: nothing.

        ``loader``: the loader's own report as it is now.
        """
        now_s = self._clock.monotonic_s()
        if self._said is None or not _alike(self._said, loader, now_s - self._said_s):
            self._said, self._said_s = loader, now_s
            self._teller.put(LOADER_PART, encode_json(loader), now_s)
        speaking = {key: one for key, one in self._workers.items() if one.seq}
        for worker_id, worker in speaking.items():
            if worker.is_new:
                worker.is_new = False
                self._teller.put(worker_id, worker.report, now_s)
        self._teller.keep({LOADER_PART, *speaking})
        if self._teller.wait_s(now_s) > 0.0:
            return None
        silent_s = {
            key: round(now_s - one.heard_s, 3)
            for key, one in speaking.items()
            if now_s - one.heard_s > SILENT_S
        }
        report = self._teller.report(silent_s, now_s)
        what = "whole" if report.whole else "change" if report.parts or report.gone else "heartbeat"
        self._metrics.reports.labels(what=what).inc()
        return report

    def confirm(self) -> None:
        """Tell the workers that they were spoken for just now."""
        for worker in self._workers.values():
            worker.send(Relayed(seq=worker.seq))


def _alike(before: LoaderReport, now: LoaderReport, elapsed_s: float) -> bool:
    """Whether nothing has changed but how long copies have been idle."""
    if len(before.facts.copies) != len(now.facts.copies):
        return False
    return all(
        aged_alike(one.idle_s, other.idle_s, elapsed_s)
        for one, other in zip(before.facts.copies, now.facts.copies, strict=True)
    ) and _ageless(before) == _ageless(now)


def _ageless(report: LoaderReport) -> tuple[NodeFacts, tuple[WorkerId, ...], int]:
    copies: tuple[Copy, ...] = tuple(replace(one, idle_s=0.0) for one in report.facts.copies)
    return replace(report.facts, copies=copies), report.dead_workers, report.epoch_seen
