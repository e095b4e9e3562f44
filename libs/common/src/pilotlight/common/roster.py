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
7. A loader that speaks for its workers (``NodeReport``) is their word, too: each of them is heard
   with it, but for those that it names as silent. Where the state that it means is not the one
   that is known here, the node has to be asked.

No I/O and no clock: reports and the time go in, views and losses come out. ``RosterFeed`` connects
a roster to the bus.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import structlog

from pilotlight.common.errors import MessageUndecodable
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.reports import (
    LOADER_PART,
    LoaderReport,
    NodeReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.newest import Newest
from pilotlight.common.node_state import NodeReader
from pilotlight.policy.cluster import Liveness, NodeFacts, WorkerView
from pilotlight.policy.ids import Epoch, NodeId, WorkerId
from pilotlight.policy.liveness import FORGET_AFTER_S, LAST_WORDS_S, SUSPECT_AFTER_S, liveness_of

log = structlog.get_logger()

Key = TypeVar("Key")

VOUCHED_BEFORE_S = 0.25
"""A loader's word that nothing has changed is of a moment ago: its worker may have been told
something since."""
CONFIRMED_AFTER_S = 0.2
"""From when a worker was told something to when a state without it shows that it did not hear."""


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
    unknown: NodeId | None = None
    """A node whose whole state is not known: it has to be asked."""


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
        self._reader = NodeReader()
        self._facts_s: dict[NodeId, float] = {}
        self._expected: dict[WorkerId, float] = {}
        self._declared_dead: dict[WorkerId, float] = {}
        self._listed_dead: dict[NodeId, frozenset[WorkerId]] = {}

    # What is heard.

    def hear_worker(self, report: WorkerReport, now_s: float, age_s: float = 0.0) -> News:
        """Take a worker's report.

        Args:
            report: It may come late, or twice.
            now_s: On the receiver's monotonic clock, as everywhere here.
            age_s: How long ago it was said, by a loader that has it from the worker.
        """
        worker_id = report.facts.worker_id
        self.epoch_seen = max(self.epoch_seen, report.epoch_seen)
        before = self.workers.get(worker_id)
        restarted = before is not None and before.incarnation != report.incarnation
        declared_s = self._declared_dead.get(worker_id)
        if not restarted and declared_s is not None and now_s - declared_s < LAST_WORDS_S:
            return NOTHING
        if not self._newest.is_news(
            worker_report_subject(worker_id), report.incarnation, report.seq
        ):
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
            unchanged_for_s=age_s,
        )
        lost = restarted and before is not None and before.facts.liveness is not Liveness.DEAD
        losses = (Loss(worker_id=worker_id, why="the worker was started anew"),) if lost else ()
        return News(workers=(worker_id,), losses=losses)

    def hear_loader(self, report: LoaderReport, now_s: float, age_s: float = 0.0) -> News:
        """Take a loader's report, and its word for workers whose process has ended.

        ``age_s``: see ``hear_worker``.
        """
        node_id = report.facts.node_id
        self.epoch_seen = max(self.epoch_seen, report.epoch_seen)
        if not self._newest.is_news(loader_report_subject(node_id), report.incarnation, report.seq):
            return NOTHING
        listed = self._listed_dead.get(node_id, frozenset())
        self._listed_dead[node_id] = frozenset(report.dead_workers)
        self._node_heard.heard(node_id, self.listened_s(now_s))
        self._facts_s[node_id] = now_s - age_s
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

    def hear_node(self, report: NodeReport, now_s: float) -> News:
        """Take what a loader says of its node and of the workers that it speaks for."""
        word = self._reader.hear(report)
        if word is None:
            return NOTHING
        node_id, told, complete = report.node_id, list[News](), word.complete
        for key, part in word.parts.items():
            told.append(self._hear_part(key, bytes(part), report.ages_s.get(key, 0.0), now_s))
            if WorkerId(key) in self._declared_dead:
                # Taken for its last words; if it lives all the same, its part is needed later.
                self._reader.distrust(node_id, key)
        node = self.nodes.get(node_id)
        if node is not None and LOADER_PART not in word.parts:
            self._node_heard.heard(node_id, self.listened_s(now_s))
            if node.liveness is not Liveness.ALIVE:
                self.nodes[node_id] = replace(node, liveness=Liveness.ALIVE)
                told.append(News(nodes=(node_id,)))
        spoken_for = [
            one for one in word.workers if one not in report.silent_s and one not in word.parts
        ]
        known = [one for one in spoken_for if one in self.workers]
        for worker_id in spoken_for if len(known) < len(spoken_for) else ():
            if worker_id in self.workers:
                continue
            complete = False
            self._reader.distrust(node_id, worker_id)
        vouched = self._vouch(known, now_s, complete=word.complete)
        if not told and not vouched and complete and node is not None:
            return NOTHING
        return News(
            workers=(*(one for news in told for one in news.workers), *vouched),
            nodes=tuple(one for news in told for one in news.nodes),
            losses=tuple(one for news in told for one in news.losses),
            unknown=None if complete and node is not None else node_id,
        )

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

    def expect(self, worker_ids: Iterable[WorkerId], now_s: float) -> None:
        """Workers that were told something: that nothing has changed there is news, once."""
        self._expected.update(dict.fromkeys(worker_ids, now_s))

    def node_facts_s(self, node_id: NodeId) -> float | None:
        """The time of which ages in a node's facts are; None while the node is not known."""
        return self._facts_s.get(node_id)

    def listened_s(self, now_s: float) -> float:
        """The listening clock: it stands still while nothing can be heard."""
        return (now_s if self.deaf_since_s is None else self.deaf_since_s) - self._unheard_s

    # Within.

    def _hear_part(self, key: str, part: bytes, age_s: float, now_s: float) -> News:
        try:
            if key == LOADER_PART:
                return self.hear_loader(decode_json(part, LoaderReport), now_s, age_s)
            return self.hear_worker(decode_json(part, WorkerReport), now_s, age_s)
        except MessageUndecodable as error:
            log.error("part dropped", action="part_undecodable", part=key, error=error.message)
            return NOTHING

    def _vouch(
        self, worker_ids: Iterable[WorkerId], now_s: float, *, complete: bool
    ) -> list[WorkerId]:
        """A loader says that workers live; those of which that is news. Sixteen thousand times a
        second in a cluster of 8,000 at rest.
        """
        workers, listened_s, said_s = self.workers, self.listened_s(now_s), now_s - VOUCHED_BEFORE_S
        news: list[WorkerId] = []
        for worker_id in worker_ids:
            if worker_id in self._declared_dead:
                continue
            self._worker_heard.heard(worker_id, listened_s)
            view = workers[worker_id]
            at_s = max(view.heard_s, said_s) if complete else view.heard_s
            facts, revived = view.facts, view.facts.liveness is not Liveness.ALIVE
            if revived:
                facts = replace(facts, liveness=Liveness.ALIVE)
            if revived or at_s > view.heard_s:
                aged_s = at_s - view.heard_s + view.unchanged_for_s
                workers[worker_id] = WorkerView(
                    facts=facts,
                    heard_s=at_s,
                    incarnation=view.incarnation,
                    epoch_seen=view.epoch_seen,
                    unchanged_for_s=aged_s,
                )
            told_s = self._expected.get(worker_id)
            if told_s is not None and at_s - told_s >= CONFIRMED_AFTER_S:
                del self._expected[worker_id]
                news.append(worker_id)
            elif revived:
                news.append(worker_id)
        return news

    def _judge(self, worker_id: WorkerId, view: WorkerView, liveness: Liveness) -> bool:
        """Give a worker its liveness; whether that is a death."""
        was = view.facts.liveness
        self.workers[worker_id] = replace(view, facts=replace(view.facts, liveness=liveness))
        return liveness is Liveness.DEAD and was is not Liveness.DEAD

    def _forget_worker(self, worker_id: WorkerId) -> None:
        del self.workers[worker_id]
        del self._worker_heard[worker_id]
        self._expected.pop(worker_id, None)
        self._newest.forget(worker_report_subject(worker_id))
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
                self._facts_s.pop(node_id, None)
                self._reader.forget(node_id)
                self._newest.forget(loader_report_subject(node_id))
            elif liveness_of(age_s) is facts.liveness:
                continue
            else:
                self.nodes[node_id] = replace(facts, liveness=liveness_of(age_s))
            changed.append(node_id)
        return tuple(changed)
