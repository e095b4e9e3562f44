"""Whether one more request may wait, and who goes for it."""

from types import SimpleNamespace

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import TooManyHeld
from pilotlight.gateway.serving.line_room import LineRoom
from pilotlight.gateway.serving.lines import Line
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.ticket import Ticket
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.fairness import FairShare
from pilotlight.policy.ids import ModelName

FOX = ModelName("fox")
FLOOD, LITTLE = FairShare("flood"), FairShare("little")


def line_of(tenant, *since_s):
    line = Line(lambda: 0.0)
    for number, at_s in enumerate(since_s):
        place = SimpleNamespace(
            order=(at_s + 60, number), tenant=tenant, weight=1.0, cost=1.0, since_s=at_s
        )
        line.add(place)
    return line


def test_nobody_goes_while_there_is_room():
    room = LineRoom(QueueBounds(total_requests=3, model_requests=2))
    room.held = 2
    assert room.made_by(line_of("flood", 0.0), [], FLOOD, 1.0) is None


def test_when_to_come_back_goes_by_who_waits_longest():
    room = LineRoom(QueueBounds(total_requests=9, model_requests=2))
    room.held = 2
    with pytest.raises(TooManyHeld) as refused:
        room.made_by(line_of("flood", 1.0, 4.0), [], FLOOD, 4.0)
    assert refused.value.retry_after_s == pytest.approx(2.0), "a start, less what it lasts already"


def test_who_has_most_goes_from_the_line_where_it_has_most():
    room = LineRoom(QueueBounds(total_requests=3, model_requests=9))
    room.held = 3
    one, two = line_of("flood", 0.0), line_of("flood", 1.0, 2.0)
    made = room.made_by(Line(lambda: 0.0), [one, two], LITTLE, 3.0)
    assert made is not None
    longest, last, told = made
    assert (longest, last.since_s) == (two, 2.0)
    assert "3 requests already wait" in str(told)


def test_who_would_be_turned_away_is_told_before_anything_is_done_for_it():
    clock = ManualClock()
    router = SimpleNamespace(
        pick=lambda *_: None, pick_open=lambda *_: None, is_warm=lambda _: False
    )
    queue = PendingQueue(router, clock, QueueBounds(model_requests=2))

    def enter(share):
        ticket = Ticket(
            model=FOX,
            digest="d",
            needed_tokens=100,
            held_tokens=7,
            since_s=clock.monotonic_s(),
            deadline_s=clock.monotonic_s() + 60,
            share=share,
        )
        return queue.enter(ticket)

    queue.check_room(FOX, FLOOD)
    for _ in range(2):
        enter(FLOOD)
    with pytest.raises(TooManyHeld) as early:
        queue.check_room(FOX, FLOOD)
    with pytest.raises(TooManyHeld) as late:
        enter(FLOOD)
    assert str(early.value) == str(late.value)
    assert early.value.retry_after_s == late.value.retry_after_s
    # Others have room there, and other models have it for all; to ask takes nobody's place.
    queue.check_room(FOX, LITTLE)
    queue.check_room(ModelName("cat"), FLOOD)
    assert queue.held == 2


def moving_queue(clock):
    """A queue of at most two, whose router has an instance while ``free`` says so."""
    free = [True]
    instance = SimpleNamespace(instance=SimpleNamespace(instance_id="inst-0"), serving=True)
    router = SimpleNamespace(
        pick=lambda *_: instance if free[0] else None,
        pick_open=lambda *_: None,
        is_warm=lambda _: True,
        sent=lambda _: None,
        answered=lambda *_, **__: None,
    )
    queue = PendingQueue(router, clock, QueueBounds(model_requests=2))

    def enter():
        now_s = clock.monotonic_s()
        return queue.enter(
            Ticket(
                model=FOX,
                digest="d",
                needed_tokens=100,
                held_tokens=7,
                since_s=now_s,
                deadline_s=now_s + 60,
                share=FLOOD,
            )
        )

    return queue, free, enter


def test_a_line_may_be_as_long_as_what_is_served_within_a_second():
    clock = ManualClock()
    queue, free, enter = moving_queue(clock)
    for _ in range(300):  # for three seconds, 100 a second, nobody waits
        enter()
        clock.advance(0.01)
    queue.demand()
    free[0] = False
    for _ in range(95):
        queue.check_room(FOX, FLOOD)
        enter()

    def six_more():
        for _ in range(6):
            queue.check_room(FOX, FLOOD)
            enter()

    with pytest.raises(TooManyHeld):
        six_more()
    with pytest.raises(TooManyHeld):
        enter()
    clock.advance(300.0)  # nothing is served any more
    with pytest.raises(TooManyHeld):
        queue.check_room(FOX, FLOOD)


def test_a_line_that_nothing_has_moved_of_late_is_forgotten():
    clock = ManualClock()
    queue, free, enter = moving_queue(clock)
    for _ in range(300):
        enter()
        clock.advance(0.01)
    clock.advance(300.0)
    queue.demand()
    free[0] = False
    for _ in range(2):
        enter()
    with pytest.raises(TooManyHeld, match="2 requests already wait"):
        enter()


def test_a_burst_long_after_the_last_one_finds_a_long_line():
    clock = ManualClock()
    line = Line(clock.monotonic_s)

    def busy_s(seconds):
        for _ in range(seconds * 100):
            for _ in range(10):
                line.served()
            clock.advance(0.01)

    def place():
        return SimpleNamespace(order=(0, 0), tenant="flood", weight=1.0, cost=1.0, since_s=0.0)

    busy_s(3)
    first, second = place(), place()
    line.add(first)
    long = line.room(600, 512)
    assert long > 900
    line.remove(first)
    busy_s(60)
    line.add(second)
    assert line.room(600, 512) == pytest.approx(long, rel=0.05)
    busy_s(6)
    assert line.room(600, 512) < 150, "it was long since"
    line.remove(second)
    busy_s(1)
    line.add(first)
    assert line.room(0, 512) < 150, "it is kept short"
