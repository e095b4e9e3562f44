"""The view of workers and instances: liveness by this gateway's clock, absence is never
deletion.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pilotlight.common.clock import ManualClock, moment_of
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import WorkerLost
from pilotlight.common.messages.reports import WorkerReport
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.route import MAX_UNCONFIRMED, Router, expected_wait_s
from pilotlight.gateway.serving.testing import ScriptedWorker, loader_report
from pilotlight.gateway.testing import model_of
from pilotlight.policy.cluster import HeldState, Liveness
from pilotlight.policy.ids import Epoch
from pilotlight.policy.plan import InstanceState

pytestmark = pytest.mark.anyio

MODEL = model_of("fox", vocab_size=10)


class View:
    """A fleet that is fed by hand."""

    def __init__(self, *names):
        self.clock = ManualClock()
        self.bus = SimpleNamespace(connected=True)
        self.fleet = Fleet(self.bus, self.clock, SimpleNamespace())
        self.router = Router(self.fleet, self.clock)
        self.lost = []
        self.fleet.on_lost(lambda worker_id, error: self.lost.append(worker_id))
        self.workers = {
            name: ScriptedWorker(self.bus, name, f"inst-{name}", MODEL, lambda _: [])
            for name in names
        }

    async def report(self, name, **facts):
        report = self.workers[name]._report()
        changed = replace(report.facts, **facts)
        await self.fleet.reports.hear_worker(
            WorkerReport(facts=changed, incarnation=report.incarnation, epoch_seen=Epoch(1))
        )

    async def instance(self, name, state=InstanceState.READY, shown=None):
        instance = self.workers[name].instance
        await self.fleet._on_instance(
            instance.instance_id, Timed(replace(instance, state=state), shown)
        )

    async def up(self, name, **facts):
        await self.instance(name)
        await self.report(name, **facts)

    def shown(self, name):
        """An instance, while it is shown."""
        return next(one.instance for one in self.fleet.instances() if one.instance.lead == name)

    def picked(self, needed_tokens=10):
        seen = self.router.pick(MODEL.name, needed_tokens)
        return None if seen is None else seen.instance.lead


async def test_silence_is_suspect_then_dead():
    view = View("w0")
    assert view.fleet.liveness("w0") is Liveness.SUSPECT
    await view.up("w0")
    assert view.picked() == "w0"
    view.clock.advance(1.1)
    view.fleet.reports.check()
    assert view.fleet.liveness("w0") is Liveness.SUSPECT
    assert view.picked() is None
    assert view.lost == []
    view.clock.advance(2.0)
    view.fleet.reports.check()
    view.fleet.reports.check()
    assert view.lost == ["w0"]
    await view.report("w0")
    assert view.picked() == "w0"


async def test_the_late_word_of_an_old_leader_is_ignored():
    view = View("w0")
    await view.up("w0")
    instance = view.workers["w0"].instance
    await view.fleet._on_instance(
        instance.instance_id, Timed(replace(instance, epoch=Epoch(3), state=InstanceState.DRAINING))
    )
    await view.fleet._on_instance(
        instance.instance_id, Timed(replace(instance, epoch=Epoch(2), state=InstanceState.READY))
    )
    assert view.picked() is None
    await view.fleet._on_instance(
        instance.instance_id, Timed(replace(instance, epoch=Epoch(3), state=InstanceState.READY))
    )
    assert view.picked() == "w0"


async def test_nobody_dies_while_the_bus_is_gone():
    view = View("w0")
    await view.up("w0")
    view.bus.connected = False
    for _ in range(10):
        view.clock.advance(1.0)
        view.fleet.reports.check()
    view.bus.connected = True
    view.fleet.reports.check()
    assert view.lost == []
    assert view.fleet.instances(MODEL.name)


async def test_a_loader_that_is_silent_is_dead_unless_nothing_can_be_heard():
    view = View()
    await view.fleet.reports.hear_loader(loader_report())

    def liveness():
        view.fleet.reports.check()
        return [one.liveness for one in view.fleet.nodes()]

    view.bus.connected = False
    view.fleet.reports.check()
    for _ in range(10):
        view.clock.advance(1.0)
        view.fleet.reports.check()
    view.bus.connected = True
    view.fleet.reports.check()
    assert liveness() == [Liveness.ALIVE]
    view.clock.advance(1.1)
    assert liveness() == [Liveness.SUSPECT]
    view.clock.advance(2.0)
    assert liveness() == [Liveness.DEAD]
    view.bus.connected = False
    view.fleet.reports.check()
    assert liveness() == [Liveness.DEAD], (
        "a worker that was away before NATS was does not come back by that"
    )
    view.bus.connected = True
    view.fleet.reports.check()
    view.clock.advance(60.0)
    assert liveness() == []


async def test_nobody_dies_because_this_process_stood_still():
    view = View("w0")
    await view.up("w0")
    view.clock.advance(20.0)
    view.fleet.reports.was_away(19.9)
    view.fleet.reports.check()
    assert view.lost == []
    assert view.fleet.liveness("w0") is Liveness.ALIVE
    view.clock.advance(3.0)
    view.fleet.reports.check()
    assert view.lost == ["w0"]


async def test_loader_tells_of_a_death_at_once():
    view = View("w0")
    await view.up("w0")
    await view.fleet.reports.hear_loader(loader_report(dead_workers=("w0",)))
    assert view.lost == ["w0"]
    # Its last report may come later than the news of its death.
    await view.report("w0")
    assert view.picked() is None
    await view.fleet.reports.hear_loader(loader_report(dead_workers=("w0",)))
    assert view.lost == ["w0"]
    # A new process under the same id.
    view.workers["w0"].incarnation = "anew"
    await view.report("w0")
    assert view.picked() == "w0"
    assert view.lost == ["w0"]


async def test_restarted_worker_has_lost_its_requests():
    view = View("w0")
    await view.up("w0")
    view.workers["w0"].incarnation = "anew"
    await view.report("w0")
    assert view.lost == ["w0"]


async def test_only_serving_instances_get_requests():
    view = View("w0")
    await view.report("w0")
    for state in InstanceState:
        await view.instance("w0", state)
        assert (view.picked() == "w0") is (
            state in (InstanceState.READY, InstanceState.CONSOLIDATING)
        )
    await view.fleet._on_instance("inst-w0", None)
    assert view.picked() is None
    assert view.fleet.instances() == ()


async def test_serving_since_is_kept_through_consolidation():
    view = View("w0")
    await view.instance("w0", InstanceState.LOADING)
    assert view.fleet.instances()[0].serving_since_s is None
    await view.instance("w0")
    since_s = view.clock.monotonic_s()
    view.clock.advance(1)
    await view.instance("w0", InstanceState.CONSOLIDATING)
    assert view.fleet.instances()[0].serving_since_s == since_s


@pytest.mark.parametrize(
    ("told_before_s", "begins_before_s"), [(0.2, 0.2), (None, 0.0), (-0.2, 0.0), (60.0, 0.0)]
)
async def test_an_instance_serves_since_it_was_shown(told_before_s, begins_before_s):
    view = View("w0")
    now = moment_of(view.clock)
    shown = None if told_before_s is None else replace(now, at_s=now.at_s - told_before_s)
    await view.instance("w0", shown=shown)
    view.clock.advance(1)
    await view.instance("w0", InstanceState.CONSOLIDATING, shown=moment_of(view.clock))
    (seen,) = view.fleet.instances()
    assert (seen.serving_since_s, seen.shown_s) == (
        now.at_s,
        pytest.approx(now.at_s - begins_before_s),
    )


async def test_least_expected_wait():
    view = View("w0", "w1")
    await view.up("w0", queue_requests=3, step_time_s=0.01)
    await view.up("w1", running_requests=1, step_time_s=0.01)
    assert view.picked() == "w1"
    # What was sent and is not in a report yet counts.
    for _ in range(5):
        view.router.sent(view.shown("w1"))
        view.router.answered(view.shown("w1"), accepted=True)
    assert view.picked() == "w0"
    view.clock.advance(0.6)
    assert view.picked() == "w1"


async def test_kv_room_counts():
    view = View("w0", "w1")
    await view.up("w0", kv_free_tokens=5)
    await view.up("w1", queue_requests=2)
    assert view.picked(needed_tokens=1) == "w0"
    assert view.picked(needed_tokens=100) == "w1"
    assert expected_wait_s(view.fleet.worker("w0"), 0, 5) == 0


async def test_an_open_instance_is_taken_where_none_is_ready():
    view = View("w0", "w1", "w2")
    for name in ("w0", "w1"):
        await view.up(name)
        held = view.fleet.worker(name).held[0]
        await view.instance(name, InstanceState.FETCHING)
        await view.report(
            name,
            held=(
                replace(held, state=HeldState.LOADING, kv_capacity_tokens=100, open=name == "w0"),
            ),
        )

    def taken(held_tokens=40):
        seen = view.router.pick_open(MODEL.name, held_tokens)
        return None if seen is None else seen.instance.lead

    assert view.picked() is None
    assert taken() == "w0"
    assert taken(500) == "w0", "whether it fits at all is for the worker to say"
    view.router.handed("inst-w0", 40)
    assert (taken(60), taken(61)) == ("w0", None)
    view.router.handed("inst-w0", 60)
    assert taken(1) is None
    view.router.handed("inst-w0", -100)
    assert taken(100) == "w0"
    await view.report("w0", engine_up=False)
    assert taken() is None
    await view.report(
        "w0", held=(replace(held, instance_id="inst-w0", state=HeldState.LOADING, open=True),)
    )
    assert taken() == "w0"
    for state in InstanceState:
        await view.instance("w0", state)
        assert (taken() == "w0") is (
            state in (InstanceState.PLANNED, InstanceState.FETCHING, InstanceState.LOADING)
        )
    await view.instance("w0", InstanceState.LOADING)
    await view.up("w2")
    assert taken() is None, "another is ready"
    await view.fleet._on_instance("inst-w0", None)
    view.router.handed("inst-w0", -40)
    assert len(view.router) == 0


async def test_nothing_is_remembered_of_instances_that_are_gone():
    view = View("w0")
    await view.up("w0")
    instance = view.shown("w0")
    view.router.sent(instance)
    view.router.avoid("inst-w0", 0.5)
    await view.fleet._on_instance("inst-w0", None)
    assert len(view.router) == 1, "its answer is still to come"
    view.router.answered(instance, accepted=False)
    view.router.avoid("inst-w0", 0.5)
    assert len(view.router) == 0


async def test_what_is_not_usable_is_left_out():
    view = View("w0")
    await view.up("w0")
    held = view.fleet.worker("w0").held[0]
    for state in HeldState:
        await view.report("w0", held=(replace(held, state=state),))
        assert (view.picked() is None) is (
            state in (HeldState.DRAINING, HeldState.FAILED, HeldState.EVICTED)
        )
    await view.report("w0", engine_up=False)
    assert view.picked() is None
    await view.report("w0")
    view.router.avoid("inst-w0", 0.5)
    assert view.picked() is None
    view.clock.advance(0.5)
    assert view.picked() == "w0"
    for _ in range(MAX_UNCONFIRMED):
        view.router.sent(view.shown("w0"))
    assert view.picked() is None
    view.router.answered(view.shown("w0"), accepted=False)
    assert view.picked() == "w0"
    await view.fleet._on_instance("inst-w0", None)


async def test_a_full_worker_is_left_alone_until_a_request_of_it_ends():
    view = View("w0", "w1")
    await view.up("w0")
    await view.up("w1", queue_requests=9)
    view.router.full.refused("w0", 1.0)
    assert view.picked() == "w1"
    view.router.full.freed("w0")
    assert view.picked() == "w0"
    view.router.sent(view.shown("w0"))
    assert view.picked() == "w1"
    view.router.unused(view.shown("w0"))
    assert view.picked() == "w0"
    for one in view.fleet._lost:
        one("w0", WorkerLost("gone"))
    assert len(view.router.full) == 0


async def test_callbacks_name_the_model():
    view = View("w0")
    changed = []
    view.fleet.on_change(changed.append)
    await view.up("w0")
    assert changed == [MODEL.name, MODEL.name]
