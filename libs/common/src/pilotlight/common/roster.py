"""The roster: workers and nodes by their reports, with liveness.

One rule for every service that listens.

1. Silent for 1 s: suspect, no new work. For 3 s: dead, what it held is lost. For 60 s: forgotten.
2. Ages count time in which something could be heard. They stand still while the bus is lost, or
   while this process does not run: a silent bus is no dead worker.
3. A loader's word that a worker's process has ended is a death at once. Reports of the same
   incarnation that come within 0.5 s are its last words; one that comes later shows that it lives.
4. A loader repeats a death in its reports. Only the first of them counts: the worker may have been
   started anew since.
5. A new incarnation of a worker is a new worker: what the old one held is lost.
6. Nothing else is a death. A report that was overtaken by a later one is left out.

No I/O and no clock: reports and the time go in, views and losses come out. ``RosterFeed`` connects
a roster to the bus.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from pilotlight.common.messages.reports import (
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.newest import Newest
from pilotlight.policy.cluster import Liveness, NodeFacts, WorkerView
from pilotlight.policy.ids import Epoch, NodeId, WorkerId
from pilotlight.policy.liveness import FORGET_AFTER_S, LAST_WORDS_S, SUSPECT_AFTER_S, liveness_of

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker whose requests and stages are lost."""

    worker_id: WorkerId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a report, or the passing of time, has changed."""

    workers: tuple[WorkerId, ...] = ()
    """Workers whose view is another one now; ``Roster.worker`` has no view of those that were
    forgotten."""
    nodes: tuple[NodeId, ...] = ()
    losses: tuple[Loss, ...] = ()
    """Each death once."""


NOTHING = News()


class _ByAge(OrderedDict[Key, float], Generic[Key]):
    """When each sender was heard, on the roster's listening clock. The longest silent is the
    first.
    """

    def heard(self, key: Key, at_s: float) -> None:
        """Take note of a sender."""
        self[key] = at_s
        self.move_to_end(key)

    def cap(self, at_s: float) -> None:
        """Take none for heard later than this."""
        for key in self:
            self[key] = min(self[key], at_s)

    def silent(self, since_s: float) -> list[Key]:
        """Senders that were not heard after ``since_s``, the longest silent first; visits no
        others.
        """
        found: list[Key] = []
        for key, at_s in self.items():
            if at_s > since_s:
                break
            found.append(key)
        return found


class Roster:
    """The view. Keys of the mappings are never those of forgotten senders."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, WorkerView] = {}
        self.nodes: dict[NodeId, NodeFacts] = {}
        self.deaf_since_s: float | None = None
        """Since when the bus is lost; None while it is not."""
        self.epoch_seen = Epoch(0)
        """The highest that any worker or loader has obeyed."""
        self._unheard_s = 0.0
        """Time in which nothing could be heard, without the interval that goes on."""
        self._newest = Newest()
        self._worker_heard: _ByAge[WorkerId] = _ByAge()
        self._node_heard: _ByAge[NodeId] = _ByAge()
        self._declared_dead: dict[WorkerId, float] = {}
        self._listed_dead: dict[NodeId, frozenset[WorkerId]] = {}

    # What is heard.

    def hear_worker(self, report: WorkerReport, now_s: float) -> News:
        """Take a worker's report.

        Args:
            report: It may come late, or twice.
            now_s: On the receiver's monotonic clock, as everywhere here.
        """
        worker_id = report.facts.worker_id
        self.epoch_seen = max(self.epoch_seen, report.epoch_seen)
        if not self._newest.is_news(
            worker_report_subject(worker_id), report.incarnation, report.seq
        ):
            return NOTHING
        before = self.workers.get(worker_id)
        restarted = before is not None and before.incarnation != report.incarnation
        declared_s = self._declared_dead.get(worker_id)
        if not restarted and declared_s is not None and now_s - declared_s < LAST_WORDS_S:
            return NOTHING
        self._declared_dead.pop(worker_id, None)
        self._worker_heard.heard(worker_id, self.listened_s(now_s))
        self.workers[worker_id] = WorkerView(
            facts=report.facts
            if report.facts.liveness is Liveness.ALIVE
            else replace(report.facts, liveness=Liveness.ALIVE),
            heard_s=now_s,
            incarnation=report.incarnation,
            epoch_seen=report.epoch_seen,
        )
        lost = restarted and before is not None and before.facts.liveness is not Liveness.DEAD
        losses = (Loss(worker_id=worker_id, why="the worker was started anew"),) if lost else ()
        return News(workers=(worker_id,), losses=losses)

    def hear_loader(self, report: LoaderReport, now_s: float) -> News:
        """Take a loader's report, and its word for workers whose process has ended."""
        node_id = report.facts.node_id
        self.epoch_seen = max(self.epoch_seen, report.epoch_seen)
        if not self._newest.is_news(loader_report_subject(node_id), report.incarnation, report.seq):
            return NOTHING
        listed = self._listed_dead.get(node_id, frozenset())
        self._listed_dead[node_id] = frozenset(report.dead_workers)
        self._node_heard.heard(node_id, self.listened_s(now_s))
        self.nodes[node_id] = (
            report.facts
            if report.facts.liveness is Liveness.ALIVE
            else replace(report.facts, liveness=Liveness.ALIVE)
        )
        ended: list[WorkerId] = []
        losses: list[Loss] = []
        for worker_id in report.dead_workers:
            view = self.workers.get(worker_id)
            if view is None or worker_id in listed or worker_id in self._declared_dead:
                continue
            self._declared_dead[worker_id] = now_s
            ended.append(worker_id)
            if self._judge(worker_id, view, Liveness.DEAD):
                losses.append(Loss(worker_id=worker_id, why="its node's loader saw it end"))
        return News(workers=tuple(ended), nodes=(node_id,), losses=tuple(losses))

    def hear_connection(self, connected: bool, now_s: float) -> None:
        """Take note of whether anything can be heard at all."""
        if not connected:
            self.deaf_since_s = now_s if self.deaf_since_s is None else self.deaf_since_s
        elif self.deaf_since_s is not None:
            self._unheard_s += now_s - self.deaf_since_s
            self.deaf_since_s = None

    def was_away(self, seconds: float, now_s: float) -> None:
        """This process did not run for ``seconds`` until now: silence in that time says nothing
        about others.
        """
        if self.deaf_since_s is not None:
            return
        self._unheard_s += seconds
        # What was heard since, before this was noticed, is not of the future.
        listened_s = self.listened_s(now_s)
        self._worker_heard.cap(listened_s)
        self._node_heard.cap(listened_s)

    def check(self, now_s: float) -> News:
        """Find the workers and nodes that have been silent for too long.

        Costs what is silent, not what there is.
        """
        listened_s = self.listened_s(now_s)
        workers: list[WorkerId] = []
        losses: list[Loss] = []
        for worker_id in self._worker_heard.silent(listened_s - SUSPECT_AFTER_S):
            age_s = listened_s - self._worker_heard[worker_id]
            view = self.workers[worker_id]
            if age_s >= FORGET_AFTER_S:
                self._forget_worker(worker_id)
                workers.append(worker_id)
                continue
            if worker_id in self._declared_dead or liveness_of(age_s) is view.facts.liveness:
                continue
            workers.append(worker_id)
            if self._judge(worker_id, view, liveness_of(age_s)):
                losses.append(
                    Loss(worker_id=worker_id, why=f"it has been silent for {age_s:.1f} s")
                )
        return News(
            workers=tuple(workers), nodes=self._check_nodes(listened_s), losses=tuple(losses)
        )

    # What others ask.

    def worker(self, worker_id: WorkerId) -> WorkerView | None:
        """A worker by its last report, with the liveness of the last check."""
        return self.workers.get(worker_id)

    def node(self, node_id: NodeId) -> NodeFacts | None:
        """A node by its loader's last report, with the liveness of the last check."""
        return self.nodes.get(node_id)

    def listened_s(self, now_s: float) -> float:
        """The listening clock: it stands still while nothing can be heard."""
        return (now_s if self.deaf_since_s is None else self.deaf_since_s) - self._unheard_s

    # Within.

    def _judge(self, worker_id: WorkerId, view: WorkerView, liveness: Liveness) -> bool:
        """Give a worker its liveness; whether that is a death."""
        was = view.facts.liveness
        self.workers[worker_id] = replace(view, facts=replace(view.facts, liveness=liveness))
        return liveness is Liveness.DEAD and was is not Liveness.DEAD

    def _forget_worker(self, worker_id: WorkerId) -> None:
        del self.workers[worker_id]
        del self._worker_heard[worker_id]
        self._declared_dead.pop(worker_id, None)

    def _check_nodes(self, listened_s: float) -> tuple[NodeId, ...]:
        changed: list[NodeId] = []
        for node_id in self._node_heard.silent(listened_s - SUSPECT_AFTER_S):
            age_s = listened_s - self._node_heard[node_id]
            facts = self.nodes[node_id]
            if age_s >= FORGET_AFTER_S:
                del self.nodes[node_id]
                del self._node_heard[node_id]
                self._listed_dead.pop(node_id, None)
            elif liveness_of(age_s) is facts.liveness:
                continue
            else:
                self.nodes[node_id] = replace(facts, liveness=liveness_of(age_s))
            changed.append(node_id)
        return tuple(changed)
