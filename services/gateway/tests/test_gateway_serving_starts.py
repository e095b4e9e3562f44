"""Cold starts as clients see them: places that allow none, and what starts are expected to take."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import ModelCold
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.starts import ColdStart, ModelState, Readiness, Starts
from pilotlight.gateway.serving.ticket import Ticket
from pilotlight.gateway.testing import model_of
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.plan import InstanceState

pytestmark = pytest.mark.anyio

FOX = model_of("fox", vocab_size=10)
NONE_ALLOWED = [ColdStart.REFUSE, ColdStart.WARM_ONLY]


@dataclass
class Warmth:
    """A router whose only instance is busy, and perhaps gone; another one loads."""

    warm: bool = True
    free: bool = False

    def pick(self, model, needed_tokens, siblings):
        instance = SimpleNamespace(instance_id="inst-0")
        return SimpleNamespace(instance=instance, serving=True) if self.free else None

    def pick_open(self, model, held_tokens, siblings):
        return SimpleNamespace(instance=SimpleNamespace(instance_id="inst-1"), serving=False)

    def is_warm(self, model):
        return self.warm

    def is_ready(self, instance_id):
        return False

    def sent(self, instance):
        self.free = False

    def handed(self, instance_id, tokens):
        pass


def ticket(clock, cold_start):
    return Ticket(
        model=FOX.name,
        digest=FOX.digest,
        needed_tokens=1,
        held_tokens=1,
        since_s=clock.monotonic_s(),
        deadline_s=clock.monotonic_s() + 10,
        cold_start=cold_start,
    )


def held(**facts):
    clock, router = ManualClock(), Warmth(**facts)
    return PendingQueue(router, clock, QueueBounds()), router, clock


@pytest.mark.parametrize("asked", NONE_ALLOWED)
async def test_nothing_waits_for_a_model_that_is_ready_nowhere(asked):
    queue, _, clock = held(warm=False)
    with pytest.raises(ModelCold):
        queue.enter(ticket(clock, asked))
    assert (queue.held, queue.demand()) == (0, ())


@pytest.mark.parametrize("asked", NONE_ALLOWED)
async def test_the_last_instance_goes_while_it_waits(asked):
    queue, router, clock = held()
    with queue.enter(ticket(clock, asked)) as place:
        assert not await place.decided(0)
        router.warm = False
        queue.pump(FOX.name)
        assert await place.decided(0)
        with pytest.raises(ModelCold):
            place.take()
    assert queue.held == 0


@pytest.mark.parametrize("asked", NONE_ALLOWED)
async def test_an_instance_that_is_free_again_takes_it(asked):
    queue, router, clock = held()
    with queue.enter(ticket(clock, asked)) as place:
        router.free = True
        queue.pump(FOX.name)
        assert place.take().instance.instance_id == "inst-0"


async def test_only_what_may_start_something_is_demand():
    queue, _, clock = held()
    warm_only = queue.enter(ticket(clock, ColdStart.WARM_ONLY))
    assert (queue.held, queue.demand()) == (1, ())
    refusing = queue.enter(ticket(clock, ColdStart.REFUSE))
    (demand,) = queue.demand()
    assert (queue.held, demand.waiting) == (2, 1)
    for place in (warm_only, refusing):
        queue.leave(place, unused=None)
    assert (queue.held, queue.demand()) == (0, ())


async def test_others_still_go_to_an_instance_that_loads():
    queue, _, clock = held(warm=False)
    allowing = queue.enter(ticket(clock, ColdStart.ALLOW))
    assert allowing.assigned.instance.instance_id == "inst-1"
    with pytest.raises(ModelCold):
        queue.enter(ticket(clock, ColdStart.REFUSE))
    assert len(queue.demand()) == 1


class Shown:
    """A fleet with one instance, or none."""

    def __init__(self):
        self.instance = None
        self.tell = None

    def on_change(self, callback):
        self.tell = callback

    def show(self, state, digest=FOX.digest):
        self.instance = state and SimpleNamespace(state=state, digest=digest)
        self.tell(FOX.name)

    def instances(self, name):
        return () if self.instance is None else (SimpleNamespace(instance=self.instance),)

    def serving(self, name):
        ready = self.instance is not None and self.instance.state is InstanceState.READY
        return self.instances(name) if ready else ()


async def test_what_the_last_start_took_is_expected_of_the_next():
    fleet, clock = Shown(), ManualClock()
    starts = Starts(fleet, clock)
    assert starts.readiness(FOX) == Readiness(ModelState.COLD, None)
    fleet.show(InstanceState.PLANNED)
    clock.advance(3)
    fleet.show(InstanceState.LOADING)
    assert starts.readiness(FOX) == Readiness(ModelState.LOADING, None)
    clock.advance(2)
    fleet.show(InstanceState.READY)
    assert starts.readiness(FOX) == Readiness(ModelState.READY, 0.0)
    fleet.show(None)
    assert starts.readiness(FOX) == Readiness(ModelState.COLD, 5.0)
    fleet.show(InstanceState.FETCHING)
    clock.advance(4)
    assert starts.readiness(FOX) == Readiness(ModelState.LOADING, 1.0)
    clock.advance(4)
    assert starts.readiness(FOX) == Readiness(ModelState.LOADING, 0.0)
    # Another checkpoint of the same name is another matter.
    assert starts.readiness(replace(FOX, digest="e" * 64)) == Readiness(ModelState.COLD, None)


async def test_a_start_that_fails_is_no_measure():
    fleet, clock = Shown(), ManualClock()
    starts = Starts(fleet, clock)
    fleet.show(InstanceState.FETCHING)
    clock.advance(9)
    fleet.show(InstanceState.FAILED)
    fleet.show(InstanceState.FETCHING)
    clock.advance(2)
    fleet.show(InstanceState.READY)
    fleet.show(None)
    assert starts.readiness(FOX) == Readiness(ModelState.COLD, 2.0)
