"""Requests that wait for an instance: bounded, fair between tenants, earliest deadline first among
a tenant's own (``lines``).

A place is taken on arrival, or when a worker refused or lost a request, and is left with an
instance assigned, with an error, or when the client is gone. Assignment happens in one spot,
``pump``, in the line's order, whenever something may have become free.

Where a model is ready nowhere, requests are *handed* to an instance that is still loading. They
wait for it as those do that are held here, and stay in the demand until it is ready: that it starts
is for them.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType

from pilotlight.common.clock import Clock
from pilotlight.common.errors import ModelCold, PilotlightError, TooManyHeld
from pilotlight.common.waiting import SharedTimers
from pilotlight.gateway.serving.line_room import LineRoom
from pilotlight.gateway.serving.lines import Line
from pilotlight.gateway.serving.route import Route, Router
from pilotlight.gateway.serving.starts import ColdStart
from pilotlight.gateway.serving.ticket import Ticket
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.fairness import FairShare
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.request import Demand

PROGRESS_INTERVAL_S = 1.0
MAX_PROGRESS_INTERVAL_S = 10.0
TOLD_PER_S = 1000
"""So many of those that wait are told of their progress in a second: all of them each second would
take the whole of a core from 10,000 on."""
TIMER_STEP_S = 0.05


class Place:
    """One request's place; a context manager that frees it whatever happens."""

    __slots__ = (
        "_queue",
        "_taken",
        "_waiter",
        "assigned",
        "assigned_s",
        "demanded_s",
        "error",
        "order",
        "ticket",
        "waited",
    )

    def __init__(self, queue: "PendingQueue", ticket: Ticket, number: int) -> None:
        self.ticket = ticket
        self.demanded_s: float | None = None
        """When the scheduler was first told of it."""
        self.waited = False
        """It was not assigned at once, or to an instance that was still loading."""
        self.assigned_s = 0.0
        self.order = (ticket.deadline_s, number)
        self.assigned: Route | None = None
        self.error: PilotlightError | None = None
        self._queue = queue
        self._taken = False
        self._waiter: asyncio.Future[bool] | None = None

    @property
    def counts(self) -> bool:
        """It is part of the demand: instances may start for it."""
        return self.ticket.cold_start is not ColdStart.WARM_ONLY

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.ticket.share.tenant

    @property
    def weight(self) -> float:
        """Its tenant's."""
        return self.ticket.share.weight

    @property
    def cost(self) -> float:
        """What serving it takes, in tokens."""
        return self.ticket.needed_tokens

    @property
    def since_s(self) -> float:
        """Since when it waits."""
        return self.ticket.since_s

    def decided(self, at_most_s: float) -> Awaitable[bool]:
        """Until there is an instance or an error; False when ``at_most_s`` passed first.

        No coroutine: as many as wait here would each keep one.
        """
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        decided = self.assigned is not None or self.error is not None
        if decided or at_most_s <= 0:
            waiter.set_result(decided)
        else:
            self._queue.timers.limit(waiter, at_most_s)
        return waiter

    def take(self) -> Route:
        """The assigned instance. The caller tells the router how the submit ended.

        Raises:
            PilotlightError: the queue was closed.
        """
        if self.error is not None:
            raise self.error
        if self.assigned is None:
            raise RuntimeError("the place has no instance yet")
        self._taken = True
        return self.assigned

    def __enter__(self) -> "Place":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.leave(self, unused=None if self._taken else self.assigned)

    def settle(self, route: Route | None, error: PilotlightError | None) -> None:
        """For the queue: decide."""
        self.assigned, self.error = route, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)


class PendingQueue:
    """Every held request of this gateway."""

    def __init__(self, router: Router, clock: Clock, bounds: QueueBounds) -> None:
        self._router = router
        self._clock = clock
        self.room = LineRoom[Place](bounds)
        self._lines: dict[ModelName, Line[Place]] = {}
        self._numbers = itertools.count()
        self._closed: PilotlightError | None = None
        self.timers = SharedTimers(TIMER_STEP_S)
        """Of places."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the demand has changed."""

    @property
    def held(self) -> int:
        """Requests that wait."""
        return self.room.held

    @property
    def progress_interval_s(self) -> float:
        """How often each of those that wait is told how far it has come."""
        return min(max(PROGRESS_INTERVAL_S, self.room.held / TOLD_PER_S), MAX_PROGRESS_INTERVAL_S)

    def check_room(self, model: ModelName, share: FairShare) -> float:
        """The wait of one more (``Line.wait_s``); raises what ``enter`` would for want of room."""
        if not (line := self._lines.get(model)):
            return 0.0
        self._made_by(line, share, self.room.coming.get(model, 0))
        return line.wait_s(share.tenant, share.weight)

    def enter(self, ticket: Ticket, *, returning: bool = False) -> Place:
        """Take a place; it may have its instance at once.

        A ``returning`` request was accepted before, so no bound turns it away.

        Raises:
            TooManyHeld: there is no place left.
            ModelCold: the ticket allows no cold start, and no instance is ready.
            PilotlightError: the queue is closed.
        """
        if self._closed is not None:
            raise self._closed
        if self._too_cold(ticket):
            raise _cold(ticket.model)
        place = Place(self, ticket, next(self._numbers))
        line = self._lines.get(ticket.model)
        if line is None:
            line = self._lines[ticket.model] = Line(self._clock.monotonic_s)
        if not line:
            route = self._pick(ticket)
            if route is not None:
                line.served()
                self._assign(place, route)
                return place
        if not returning:
            self._admit(line, place)
        place.waited = True
        line.conditional |= ticket.cold_start is not ColdStart.ALLOW
        line.add(place)
        self.room.held += 1
        self.on_change()
        self.pump(ticket.model)
        return place

    def leave(self, place: Place, *, unused: Route | None) -> None:
        """Free a place. An instance that was assigned and is not used goes to the next."""
        if place.assigned is None and self._remove(place):
            self.on_change()
        if unused is not None:
            self.attempted(place)
            self._router.unused(unused.instance)
            self.pump(place.ticket.model)

    def attempted(self, place: Place) -> None:
        """The attempt on a place's instance has ended, in whatever way."""
        line = self._lines.get(place.ticket.model)
        if line is not None and place in line.handed:
            self._no_longer_handed(line, place)
            self.on_change()
            self.pump(place.ticket.model)

    def pump(self, model: ModelName) -> None:
        """Assign instances to waiting requests, in the line's order, as long as there is one that
        may take more.
        """
        line = self._lines.get(model)
        if line is None:
            return
        ready = [
            place
            for place in line.handed
            if place.assigned and self._router.is_ready(place.assigned.instance.instance_id)
        ]
        for place in ready:
            self._no_longer_handed(line, place)
        if ready:
            self.on_change()
        before = self.room.held
        self._let_go_cold(model, line)
        while line:
            place = line.first()
            route = self._pick(place.ticket)
            if route is None:
                break
            line.serve(place)
            self.room.held -= 1
            self._assign(place, route)
        if self.room.held != before:
            self.on_change()

    def refuse(self, model: ModelName, digest: Digest, error: PilotlightError) -> None:
        """Let the requests for a model go that cannot be started as it is registered: no waiting
        helps them.
        """
        line = self._lines.get(model)
        if line is None:
            return
        for place in line.handed:
            if place.ticket.digest == digest:
                place.error = error
        refused = line.drop(lambda place: place.ticket.digest == digest)
        for place in refused:
            place.settle(None, error)
        if refused:
            self.room.held -= len(refused)
            self.on_change()

    def pump_later(self, model: ModelName, after_s: float) -> None:
        """Pump when an instance that is avoided may be tried again: not before, for nothing may
        pump after that. The loop's timers come early (uvloop's count from when its round began).
        """
        self._pump_at(model, self._clock.monotonic_s() + after_s)

    def _pump_at(self, model: ModelName, due_s: float) -> None:
        left_s = due_s - self._clock.monotonic_s()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._pump_at, model, due_s)
        else:
            self.pump(model)

    def ahead(self, place: Place) -> int:
        """Requests for the same model whose turn is before its own; none for one that has just got
        its instance.
        """
        line = self._lines.get(place.ticket.model)
        return line.ahead(place) if line is not None and place.assigned is None else 0

    def demand(self) -> tuple[Demand, ...]:
        """Everything that waits, here or for an instance that loads, with ages as of now.

        The caller is about to tell the scheduler.
        """
        now_s = self._clock.monotonic_s()
        demands: list[Demand] = []
        for model, line in list(self._lines.items()):
            if self.room.may_go(line):
                del self._lines[model]
            waiting = [place for place in (*line, *line.handed) if place.counts]
            if not waiting:
                continue
            for place in waiting:
                place.demanded_s = now_s if place.demanded_s is None else place.demanded_s
            oldest = min(waiting, key=lambda each: each.ticket.since_s)
            demands.append(
                Demand(
                    model=model,
                    waiting=len(waiting),
                    oldest_age_s=now_s - oldest.ticket.since_s,
                    deadline_in_s=min(place.ticket.deadline_s for place in waiting) - now_s,
                    trace_parent=oldest.ticket.trace_parent,
                    prompt_tokens=oldest.ticket.held_tokens,
                )
            )
        return tuple(demands)

    def waiting_keys(self, model: ModelName) -> Counter[str]:
        """Requests of each key that are part of a model's demand."""
        line = self._lines.get(model)
        waiting = (*line, *line.handed) if line is not None else ()
        return Counter(place.ticket.key_id for place in waiting if place.counts)

    def close(self, error: PilotlightError) -> None:
        """Let every request go with an error, and take no more."""
        self._closed = error
        for line in self._lines.values():
            for place in line.drop(lambda _: True):
                place.settle(None, error)
            for place in line.handed:
                place.error = error
            line.handed.clear()
        self.room.held = 0
        self.on_change()

    def _admit(self, line: Line[Place], place: Place) -> None:
        """Have a place, if need be another tenant's that has more than its share.

        Raises:
            TooManyHeld: there is none.
        """
        made = self._made_by(line, place.ticket.share)
        if made is not None:
            longest, last, full = made
            longest.remove(last)
            self.room.held -= 1
            last.settle(None, full)

    def _made_by(
        self, line: Line[Place], share: FairShare, coming: int = 0
    ) -> tuple[Line[Place], Place, TooManyHeld] | None:
        now_s = self._clock.monotonic_s()
        return self.room.made_by(line, self._lines.values(), share, now_s, coming)

    def _pick(self, ticket: Ticket) -> Route | None:
        route = self._router.pick(ticket.model, ticket.needed_tokens, ticket.siblings)
        if route is not None or ticket.cold_start is not ColdStart.ALLOW:
            return route
        return self._router.pick_open(ticket.model, ticket.held_tokens, ticket.siblings)

    def _too_cold(self, ticket: Ticket) -> bool:
        return ticket.cold_start is not ColdStart.ALLOW and not self._router.is_warm(ticket.model)

    def _let_go_cold(self, model: ModelName, line: Line[Place]) -> None:
        """Refuse what may not wait for a start, once no instance is ready any more."""
        if not line.conditional or self._router.is_warm(model):
            return
        line.conditional = False
        cold = line.drop(lambda place: place.ticket.cold_start is not ColdStart.ALLOW)
        self.room.held -= len(cold)
        for place in cold:
            place.settle(None, _cold(model))

    def _assign(self, place: Place, route: Route) -> None:
        instance_id = route.instance.instance_id
        self._router.sent(route.instance)
        place.ticket.siblings.instance_id = instance_id
        place.assigned_s = self._clock.monotonic_s()
        place.settle(route, None)
        if not route.serving:
            place.waited = True
            self._lines[place.ticket.model].handed.add(place)
            self._router.handed(instance_id, place.ticket.held_tokens)
            self.on_change()

    def _no_longer_handed(self, line: Line[Place], place: Place) -> None:
        line.handed.remove(place)
        if place.assigned is not None:
            self._router.handed(place.assigned.instance.instance_id, -place.ticket.held_tokens)

    def _remove(self, place: Place) -> bool:
        line = self._lines.get(place.ticket.model)
        if line is None or not line.remove(place):
            return False
        self.room.held -= 1
        return True


def _cold(model: ModelName) -> ModelCold:
    return ModelCold(f"no instance of {model} is ready, and the request allows no cold start")
