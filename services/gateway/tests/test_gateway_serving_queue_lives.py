"""The queue with its router and fleet, while instances and requests come and go in any order: its
books are right after each move.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.common.clock import ManualClock
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import PilotlightError, TransientError
from pilotlight.common.messages.reports import WorkerReport
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.queue import PendingQueue, Place
from pilotlight.gateway.serving.route import Router, Siblings
from pilotlight.gateway.serving.testing import ScriptedWorker
from pilotlight.gateway.serving.ticket import Ticket
from pilotlight.gateway.testing import model_of
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Epoch
from pilotlight.policy.instance import STARTING
from pilotlight.policy.plan import InstanceState

MODEL = model_of("fox", vocab_size=10)
KV_TOKENS = 50
WORKERS = 2
_S = InstanceState
NEXT = {
    _S.PLANNED: _S.FETCHING,
    _S.FETCHING: _S.LOADING,
    _S.LOADING: _S.READY,
    _S.READY: _S.DRAINING,
    _S.DRAINING: _S.GONE,
    _S.GONE: None,
    _S.FAILED: None,
}


@dataclass(eq=False)
class Life:
    """A request that is held, or has an instance."""

    place: Place
    taken: bool = False
    """Its submit is under way, or it runs."""
    accepted: bool = False


def at_once(coroutine):
    with suppress(StopIteration):
        coroutine.send(None)
        raise AssertionError("it waits for something")


class Gateway:
    """A queue whose fleet is fed by hand."""

    def __init__(self):
        self.clock = ManualClock()
        self.bus = SimpleNamespace(connected=True)
        self.fleet = Fleet(self.bus, self.clock, SimpleNamespace())
        self.router = Router(self.fleet, self.clock)
        self.queue = PendingQueue(
            self.router, self.clock, QueueBounds(total_requests=6, model_requests=6)
        )
        self.fleet.on_change(self.queue.pump)
        self.fleet.on_source_changed(self.queue.refuse)
        self.born = 0
        self.workers = [self.worker(index) for index in range(WORKERS)]
        self.lives: list[Life] = []

    def worker(self, index):
        """A worker with an instance that is not shown yet."""
        self.born += 1
        worker = ScriptedWorker(self.bus, f"w{index}", f"inst-{self.born}", MODEL, lambda _: [])
        worker.instance = replace(worker.instance, state=_S.PLANNED)
        worker.held_state, worker.kv_capacity_tokens = HeldState.READY, KV_TOKENS
        return worker

    def show(self, index, state, reason=""):
        worker = self.workers[index]
        if state is None:
            at_once(self.fleet._on_instance(worker.instance.instance_id, None))
            self.workers[index] = self.worker(index)
            return
        worker.instance = replace(worker.instance, state=state, reason=reason)
        at_once(self.fleet._on_instance(worker.instance.instance_id, Timed(worker.instance)))

    def report(self, index, *, opens=False):
        worker = self.workers[index]
        worker.held_state = HeldState.LOADING if opens else worker.held_state
        if worker.instance.state not in STARTING:
            worker.held_state = HeldState.READY
        report = worker._report()
        at_once(
            self.fleet.reports.hear_worker(
                WorkerReport(
                    facts=report.facts, incarnation=report.incarnation, epoch_seen=Epoch(1)
                )
            )
        )

    def enter(self, tokens, siblings, *, returning=False):
        now_s = self.clock.monotonic_s()
        ticket = Ticket(
            model=MODEL.name,
            digest=MODEL.digest,
            needed_tokens=tokens + 5,
            held_tokens=tokens,
            since_s=now_s,
            deadline_s=now_s + tokens,
            siblings=siblings,
        )
        with suppress(PilotlightError):
            self.lives.append(Life(self.queue.enter(ticket, returning=returning)))

    def move(self, what, who, number):
        index = who % WORKERS
        match what:
            case "enter":
                siblings = Siblings()
                for _ in range(1 + who % 2):
                    self.enter(3 + 7 * number, siblings)
            case "next":
                self.show(index, NEXT[self.workers[index].instance.state])
            case "fail":
                self.show(
                    index,
                    _S.FAILED,
                    reason="source_changed: other files" if number == 0 else "worker_lost: gone",
                )
            case "open" | "report":
                self.report(index, opens=what == "open")
            case "later":
                self.clock.advance(number / 4)
                for each in range(WORKERS):
                    self.report(each)
                self.queue.pump(MODEL.name)
            case _ if self.lives:
                self.go_on(self.lives[who % len(self.lives)], what)
        self.check()

    def go_on(self, life, what):
        """What the task of a request does next."""
        place = life.place
        if not life.taken and (what == "leave" or place.error is not None):
            self.lives.remove(life)
            self.queue.leave(place, unused=place.assigned)
        elif not life.taken and place.assigned is not None:
            place.take()
            self.queue.leave(place, unused=None)
            life.taken = True
        elif life.taken and not life.accepted and what != "leave":
            life.accepted = what != "refused"
            self.router.answered(place.assigned.instance, accepted=life.accepted)
            self.queue.pump(MODEL.name)
            if not life.accepted:
                self.end(life, again=True)
        elif life.accepted and what != "goes on":
            self.end(life, again=what == "refused")

    def end(self, life, *, again):
        """Its attempt has."""
        self.lives.remove(life)
        if again:
            self.router.avoid(life.place.assigned.instance.instance_id, 0.1)
        self.queue.attempted(life.place)
        if again:
            self.enter(life.place.ticket.held_tokens, life.place.ticket.siblings, returning=True)

    def check(self):
        places = [life.place for life in self.lives]
        waiting = [place for place in places if place.assigned is None and place.error is None]
        line = self.queue._lines.get(MODEL.name)
        held, handed = (list(line), line.handed) if line is not None else ([], set())
        assert held == sorted(waiting, key=lambda place: place.order)
        assert self.queue.held == len(waiting)
        assert handed <= set(places), "an attempt that has ended is waited for no more"
        states = {seen.instance.instance_id: seen.instance.state for seen in self.fleet.instances()}
        for place in places:
            if place.assigned is not None:
                state = states.get(place.assigned.instance.instance_id)
                starts = not place.assigned.serving and state in STARTING
                assert starts <= (place in handed), "it waits still, and the scheduler hears of it"
                assert (place in handed) <= (
                    not self.fleet.serves(place.assigned.instance.instance_id)
                )
        for instance_id in states:
            tokens = sum(
                place.ticket.held_tokens
                for place in handed
                if place.assigned.instance.instance_id == instance_id
            )
            load = self.router._loads.get(instance_id)
            assert tokens == (load.handed_tokens if load is not None else 0)
            assert (
                tokens <= KV_TOKENS
                or sum(place.assigned.instance.instance_id == instance_id for place in handed) == 1
            )
        assert sum(demand.waiting for demand in self.queue.demand()) == len(waiting) + len(handed)


MOVES = st.tuples(
    st.sampled_from(
        (
            "enter",
            "enter",
            "next",
            "next",
            "open",
            "open",
            "report",
            "fail",
            "later",
            "leave",
            "goes on",
            "goes on",
            "refused",
            "ends",
        )
    ),
    st.integers(0, 11),
    st.integers(0, 5),
)


@settings(deadline=None, max_examples=100)
@given(moves=st.lists(MOVES, min_size=10, max_size=80))
def test_the_books_are_right_after_each_move(moves):
    gateway = Gateway()
    for move in moves:
        gateway.move(*move)
    gateway.queue.close(TransientError("stopping"))
    assert gateway.queue.demand() == ()
    for life in list(gateway.lives):
        assert life.place.assigned is not None or life.place.error is not None
        if life.taken and not life.accepted:
            gateway.router.answered(life.place.assigned.instance, accepted=False)
        if life.taken:
            gateway.queue.attempted(life.place)
        else:
            gateway.queue.leave(life.place, unused=life.place.assigned)
    for index in range(WORKERS):
        gateway.show(index, None)
    assert len(gateway.router) == 0, "nothing is remembered of what is gone"
