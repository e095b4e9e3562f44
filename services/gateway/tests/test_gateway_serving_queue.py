"""The queue of held requests: bounded, earliest deadline first, fair between tenants, and what it
tells of its demand.
"""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import TooManyHeld, TransientError
from pilotlight.gateway.serving import queue as queue_module
from pilotlight.gateway.serving.queue import (
    MAX_PROGRESS_INTERVAL_S,
    PROGRESS_INTERVAL_S,
    PendingQueue,
    Ticket,
)
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.fairness import FairShare
from pilotlight.policy.ids import ModelName

pytestmark = pytest.mark.anyio

FOX = ModelName("fox")
CAT = ModelName("cat")


@dataclass
class Slots:
    """A router with a number of free slots, and a number of those of instances that are loading."""

    free: int = 0
    loading: int = 0
    handed_tokens: int = 0
    ready: bool = False
    answered_unused: int = 0
    seen: list = field(default_factory=list)

    def pick(self, model, needed_tokens, siblings):
        return (
            SimpleNamespace(instance=SimpleNamespace(instance_id="inst-0"), serving=True)
            if self.free
            else None
        )

    def pick_open(self, model, held_tokens, siblings):
        found = self.loading and not self.free
        return (
            SimpleNamespace(instance=SimpleNamespace(instance_id="inst-1"), serving=False)
            if found
            else None
        )

    def handed(self, instance_id, tokens):
        self.handed_tokens += tokens

    def is_warm(self, model):
        return self.free > 0

    def is_ready(self, instance_id):
        return self.ready

    def sent(self, instance):
        if instance.instance_id == "inst-1":
            self.loading -= 1
        else:
            self.free -= 1

    def unused(self, instance):
        self.free += 1
        self.answered_unused += 1


def held(slots=None, **bounds):
    clock = ManualClock()
    return PendingQueue(slots or Slots(), clock, QueueBounds(**bounds)), clock


def ticket(clock, deadline_in_s, model=FOX):
    now_s = clock.monotonic_s()
    return Ticket(
        model=model,
        digest="d",
        needed_tokens=1,
        held_tokens=7,
        since_s=now_s,
        deadline_s=now_s + deadline_in_s,
        trace_parent="00-a-b-01",
    )


async def test_earliest_deadline_first():
    slots = Slots()
    queue, clock = held(slots)
    places = {deadline_s: queue.enter(ticket(clock, deadline_s)) for deadline_s in (30, 10, 20, 40)}
    assert [queue.ahead(places[deadline_s]) for deadline_s in (10, 20, 30, 40)] == [0, 1, 2, 3]
    for count, deadline_s in enumerate((10, 20, 30, 40)):
        slots.free = 1
        queue.pump(FOX)
        assert places[deadline_s].assigned is not None
        assert queue.held == 3 - count


async def test_nobody_is_ahead_of_one_that_has_just_got_its_instance():
    slots = Slots()
    queue, clock = held(slots)
    place = queue.enter(ticket(clock, 10))
    slots.free = 1
    queue.pump(FOX)
    # The line is empty and forgotten before the request's own task hears of its instance.
    assert queue.demand() == ()
    assert queue.ahead(place) == 0


async def test_a_returning_request_keeps_its_turn():
    slots = Slots()
    queue, clock = held(slots, total_requests=2, model_requests=2)
    late = queue.enter(ticket(clock, 50))
    queue.enter(ticket(clock, 60))
    early = queue.enter(ticket(clock, 5), returning=True)
    slots.free = 1
    queue.pump(FOX)
    assert early.assigned is not None
    assert late.assigned is None


async def test_nobody_overtakes_the_line():
    slots = Slots()
    queue, clock = held(slots)
    first = queue.enter(ticket(clock, 10))
    slots.free = 1
    second = queue.enter(ticket(clock, 20))
    assert first.assigned is not None
    assert second.assigned is None


async def test_an_instance_that_was_avoided_is_tried_again_also_when_a_timer_comes_early(
    monkeypatch,
):
    """uvloop's may, by a millisecond; nothing else may ever pump."""
    slots, timers = Slots(), []
    monkeypatch.setattr(
        queue_module.asyncio,
        "get_running_loop",
        lambda: SimpleNamespace(call_later=lambda *timer: timers.append(timer)),
    )
    queue, clock = held(slots)
    place = queue.enter(ticket(clock, 10))
    queue.pump_later(FOX, 0.5)
    (after_s, early, *arguments) = timers.pop()
    assert after_s == pytest.approx(0.5)
    slots.free = 1
    clock.advance(0.4995)
    early(*arguments)
    assert place.assigned is None, "it is avoided until then"
    (after_s, in_time, *arguments) = timers.pop()
    assert after_s == pytest.approx(0.0005)
    clock.advance(after_s)
    in_time(*arguments)
    assert place.assigned is not None
    assert not timers


async def test_bounds():
    queue, clock = held(total_requests=3, model_requests=2)
    queue.enter(ticket(clock, 10))
    queue.enter(ticket(clock, 10))
    with pytest.raises(TooManyHeld) as of_model:
        queue.enter(ticket(clock, 10))
    assert of_model.value.retry_after_s >= 1
    queue.enter(ticket(clock, 10, CAT))
    with pytest.raises(TooManyHeld):
        queue.enter(ticket(clock, 10, ModelName("dog")))
    assert queue.held == 3


async def test_leaving_frees_the_place():
    queue, clock = held(total_requests=1, model_requests=1)
    with queue.enter(ticket(clock, 10)):
        assert queue.held == 1
    assert queue.held == 0
    assert queue.demand() == ()
    queue.enter(ticket(clock, 10))


async def test_an_unused_assignment_goes_to_the_next():
    slots = Slots()
    queue, clock = held(slots)
    with queue.enter(ticket(clock, 10)) as first:
        second = queue.enter(ticket(clock, 20))
        slots.free = 1
        queue.pump(FOX)
        assert first.assigned is not None
    assert slots.answered_unused == 1
    assert second.assigned is not None


async def test_demand_has_ages_as_of_now():
    queue, clock = held()
    place = queue.enter(ticket(clock, 10))
    clock.advance(0.5)
    queue.enter(ticket(clock, 10))
    (demand,) = queue.demand()
    assert (demand.model, demand.waiting) == (FOX, 2)
    assert demand.oldest_age_s == pytest.approx(0.5)
    assert demand.deadline_in_s == pytest.approx(9.5)
    assert demand.trace_parent == "00-a-b-01"
    assert place.demanded_s == clock.monotonic_s()


async def test_closing_lets_everybody_go():
    queue, clock = held()
    place = queue.enter(ticket(clock, 10))
    queue.close(TransientError("stopping"))
    assert await place.decided(0)
    with pytest.raises(TransientError, match="stopping"):
        place.take()
    with pytest.raises(TransientError, match="stopping"):
        queue.enter(ticket(clock, 10))


async def test_what_an_instance_that_loads_was_given_is_waited_for_until_that_is_ready():
    slots = Slots()
    queue, clock = held(slots)
    late, early = queue.enter(ticket(clock, 20)), queue.enter(ticket(clock, 10))
    slots.loading = 1
    changes = []
    queue.on_change = lambda: changes.append(queue.demand())
    queue.pump(FOX)
    assert early.assigned is not None
    assert late.assigned is None
    assert early.waited
    assert (queue.held, slots.handed_tokens) == (1, 7)
    clock.advance(3)
    (demand,) = queue.demand()
    assert (demand.waiting, demand.oldest_age_s, demand.deadline_in_s) == (
        2,
        pytest.approx(3),
        pytest.approx(7),
    )
    # Ready: a request that was given to it waits no more, although its attempt goes on.
    slots.ready = True
    queue.pump(FOX)
    (demand,) = queue.demand()
    assert (demand.waiting, demand.deadline_in_s, slots.handed_tokens) == (1, pytest.approx(17), 0)
    assert changes[-1][0].waiting == 1
    queue.attempted(early)
    assert slots.handed_tokens == 0, "once"


@pytest.mark.parametrize("how", ["attempted", "left"])
async def test_an_attempt_that_ends_while_the_instance_loads_is_no_demand(how):
    slots = Slots(loading=1)
    queue, clock = held(slots)
    with queue.enter(ticket(clock, 10)) as place:
        assert place.waited
        assert [demand.waiting for demand in queue.demand()] == [1]
        if how == "attempted":
            place.take()
    if how == "attempted":
        assert [demand.waiting for demand in queue.demand()] == [1], "its attempt is under way"
        queue.attempted(place)
    assert queue.demand() == ()
    assert slots.handed_tokens == 0


async def test_closing_lets_those_go_that_wait_elsewhere():
    queue, clock = held(Slots(loading=1))
    place = queue.enter(ticket(clock, 10))
    place.take()
    queue.close(TransientError("stopping"))
    assert queue.demand() == ()
    assert isinstance(place.error, TransientError)


# Several tenants.


def of(clock, tenant, *, weight=1.0, tokens=100, deadline_in_s=60):
    return Ticket(
        model=FOX,
        digest="d",
        needed_tokens=tokens,
        held_tokens=7,
        since_s=clock.monotonic_s(),
        deadline_s=clock.monotonic_s() + deadline_in_s,
        share=FairShare(tenant, weight),
    )


def served(slots, queue, places):
    """The one whose turn is next."""
    waiting = [place for place in places if place.assigned is None]
    slots.free = 1
    queue.pump(FOX)
    return next(place for place in waiting if place.assigned is not None)


async def test_shares_follow_weights_in_tokens():
    slots = Slots()
    queue, clock = held(slots)
    places = [queue.enter(of(clock, "a", weight=3, tokens=50)) for _ in range(200)]
    places += [queue.enter(of(clock, "b", tokens=100)) for _ in range(200)]
    got = Counter()
    for _ in range(200):
        place = served(slots, queue, places)
        got[place.tenant] += place.ticket.needed_tokens
    assert got["a"] / got["b"] == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize("flood", [2, 50, 400])
async def test_a_flood_delays_another_by_one_request_whatever_its_length(flood):
    slots = Slots()
    queue, clock = held(slots)
    # All of the flood is due earlier.
    places = [queue.enter(of(clock, "flood", deadline_in_s=10)) for _ in range(flood)]
    mine = queue.enter(of(clock, "little"))
    assert queue.ahead(mine) <= 1
    turns = 1
    while served(slots, queue, [*places, mine]) is not mine:
        turns += 1
    assert turns <= 2


async def test_among_its_own_the_earliest_deadline_is_first():
    slots = Slots()
    queue, clock = held(slots)
    places = [
        queue.enter(of(clock, tenant, deadline_in_s=deadline_s))
        for deadline_s in (30, 10, 20)
        for tenant in ("a", "b")
    ]
    order = [served(slots, queue, places) for _ in range(6)]
    for tenant in ("a", "b"):
        own = [place.ticket.deadline_s for place in order if place.tenant == tenant]
        assert own == sorted(own)


async def test_a_full_queue_has_room_for_who_has_little_of_it():
    queue, clock = held(model_requests=4)
    flood = [queue.enter(of(clock, "flood", deadline_in_s=60 + n)) for n in range(4)]
    with pytest.raises(TooManyHeld):
        queue.enter(of(clock, "flood"))
    for _ in range(2):
        queue.enter(of(clock, "little"))
    # The flood's own last ones made way; they are told so.
    assert [place.error is not None for place in flood] == [False, False, True, True]
    with pytest.raises(TooManyHeld):
        flood[3].take()
    with pytest.raises(TooManyHeld):
        queue.enter(of(clock, "little"))
    assert queue.held == 4
    for place in flood:
        with place:
            pass
    assert queue.held == 2


async def test_over_all_models_it_is_the_longest_line_that_makes_way():
    queue, clock = held(total_requests=3)
    queue.enter(ticket(clock, 60, model="other"))
    flood = [queue.enter(of(clock, "flood")) for _ in range(2)]
    queue.enter(of(clock, "little"))
    assert [place.error is not None for place in flood] == [False, True]
    assert queue.held == 3


async def test_the_more_wait_the_less_often_each_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queue_module, "TOLD_PER_S", 10)
    queue, clock = held(total_requests=1000, model_requests=1000)
    assert queue.progress_interval_s == PROGRESS_INTERVAL_S
    for _ in range(30):
        queue.enter(ticket(clock, 30))
    assert queue.progress_interval_s == 3.0
    for _ in range(170):
        queue.enter(ticket(clock, 30))
    assert queue.progress_interval_s == MAX_PROGRESS_INTERVAL_S


async def test_one_that_waits_hears_of_its_instance_or_that_time_has_passed():
    slots = Slots()
    queue, clock = held(slots)
    place = queue.enter(ticket(clock, 30))
    assert await place.decided(0.0) is False
    assert await place.decided(0.01) is False
    waiting = place.decided(600.0)
    slots.free = 1
    queue.pump(FOX)
    assert await waiting is True
    assert await place.decided(0.0) is True
