"""Who is turned away before anything is done for them: the pace of a line, and what is due."""

from types import SimpleNamespace

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import TooManyHeld
from pilotlight.gateway.pacing import Pacing
from pilotlight.gateway.serving.lines import Line
from pilotlight.gateway.serving.turned_away import check_room
from pilotlight.gateway.texts.waiting_jobs import TextJob, WaitingJobs
from pilotlight.policy.fairness import FairShare
from pilotlight.policy.ids import ModelName
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.lanes import LaneJob
from pilotlight.policy.pace import LEAST_TURNS

SERVES, STARTS = next(iter(SERVING)), next(iter(STARTING))
FOX = SimpleNamespace(name=ModelName("fox"))


def test_a_pace_is_that_of_late():
    pacing = Pacing(10.0)
    for number in range(1, 2 * LEAST_TURNS + 1):
        pacing.turn(10.0 + number / 100)
    assert pacing.pace(10.0 + 2 * LEAST_TURNS / 100).wait_s(100) == pytest.approx(1.0)
    # Ten times as slow from here on: what came before is forgotten.
    start_s = 10.0 + 2 * LEAST_TURNS / 100
    for number in range(1, 2 * LEAST_TURNS + 1):
        pacing.turn(start_s + number / 10)
    assert pacing.pace(start_s + 2 * LEAST_TURNS / 10).wait_s(100) == pytest.approx(10.0)


def place_of(tenant, number):
    return SimpleNamespace(order=(0.0, number), tenant=tenant, weight=1.0, cost=1.0, since_s=0.0)


def moving_line(clock, places):
    """A hundred turns a second, a flood's, while others of its wait."""
    line = Line(clock.monotonic_s)
    for number in range(places + LEAST_TURNS):
        line.add(place_of("flood", number))
    for _ in range(LEAST_TURNS):
        clock.advance(0.01)
        line.serve(line.first())
    return line


def test_one_more_waits_for_its_own_tenants_and_as_many_of_others():
    clock = ManualClock()
    line = moving_line(clock, places=300)
    assert line.wait_s("flood", 1.0) == pytest.approx(3.0)
    assert line.wait_s("little", 1.0) == pytest.approx(0.01)
    assert line.drop(lambda _: True)
    assert line.wait_s("flood", 1.0) == 0.0


def fill(waiting, owner, jobs):
    for number in range(jobs):
        lane = LaneJob(number=len(waiting), owner=owner, model="m", long=False, turn=number)
        waiting.add(
            TextJob(
                lane=lane,
                kind="chat",
                data=b"hello",
                give=None,
                cpu_s=1.0,
                give_cpu_s=0.0,
                came_s=0.0,
                answer=None,
            )
        )


def test_prompts_of_others_go_before_one_more_by_turns():
    waiting = WaitingJobs()
    fill(waiting, "flood", 500)
    fill(waiting, "little", 2)
    assert waiting.ahead_of_new("flood") == 502
    assert waiting.ahead_of_new("little") == 2 + 3
    assert waiting.ahead_of_new("new") == 1 + 1


class Parts:
    """What ``check_room`` looks at."""

    def __init__(self, line_wait_s, *states):
        seen = [SimpleNamespace(instance=SimpleNamespace(state=state)) for state in states]
        self.queue = SimpleNamespace(check_room=lambda *_: line_wait_s)
        self.fleet = SimpleNamespace(
            instances=lambda _: seen,
            serving=lambda _: [one for one in seen if one.instance.state in SERVING],
        )


def test_who_would_begin_too_late_is_told_when_to_come_back():
    parts = Parts(4.0, SERVES)
    with pytest.raises(TooManyHeld, match=r"6\.5 s would pass") as told:
        check_room(parts, FOX, FairShare("t"), 2.5, 5.0)
    assert told.value.retry_after_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("states", "due_s"), [((), 5.0), ((STARTS,), 5.0), ((SERVES, STARTS), 5.0), ((SERVES,), 9.0)]
)
def test_who_waits_for_a_start_or_comes_in_time_is_let_in(states, due_s):
    parts = Parts(4.0, *states)
    check_room(parts, FOX, FairShare("t"), 2.5, due_s)
