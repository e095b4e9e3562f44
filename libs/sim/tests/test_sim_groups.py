"""Groups that become several instances, in simulated time."""

from dataclasses import replace

from pilotlight.policy.control.tick import tick
from pilotlight.policy.instance import ENDED, InstanceEvent
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import CONTENDERS, Scenario, read_builtin


def bursty(duration_s: float = 300.0) -> Scenario:
    scenario = read_builtin("paraserve-testbed-1")
    return replace(scenario, arrivals=replace(scenario.arrivals, duration_s=duration_s))


def test_workers_of_groups_become_instances_in_bursts() -> None:
    """No request is lost by that, no worker is in two instances, and a log replays."""
    simulation = Simulation(bursty(), CONTENDERS["pilotlight"], 3)
    log = simulation.leader.log = []
    result = simulation.run()
    assert result.finished == result.requests
    became = [one for tick in log for change in tick.plan.changes for one in change.become]
    assert became
    assert any(tick.plan.retarget for tick in log), "demand moved what groups were to become"
    assert any(order.choice.instances > 1 for tick in log for order in tick.plan.start), (
        "a burst was asked for as a group"
    )
    for one in log:
        again = tick(one.facts, one.memory, simulation.leader.rules)
        assert (again.start, again.retarget, again.grow, again.changes) == (
            one.plan.start,
            one.plan.retarget,
            one.plan.grow,
            one.plan.changes,
        )
    for worker in simulation.parts.workers.values():
        assert worker.free_bytes >= 0
        for instance_id in worker.held:
            record = simulation.leader.books.get(instance_id)
            assert record is not None
            assert record.instance.state not in ENDED


def test_models_larger_than_any_device_are_served_by_pipelines() -> None:
    """Some become shorter ones; no request is lost, and none waits for a worker that holds all."""
    scenario = bursty(120.0)
    small = tuple(replace(one, device_gib=11.0) for one in scenario.nodes)
    simulation = Simulation(replace(scenario, nodes=small), CONTENDERS["pilotlight"], 3)
    log = simulation.leader.log = []
    result = simulation.run()
    assert result.finished == result.requests
    sizes = {order.choice.scheme.pipeline_size for tick in log for order in tick.plan.start}
    assert min(sizes) > 1
    done = [
        change
        for tick in log
        for change in tick.plan.changes
        if InstanceEvent.CONSOLIDATION_DONE in change.events
    ]
    assert done
    assert all(len(change.placements) > 1 for change in done)
    for worker in simulation.parts.workers.values():
        assert worker.free_bytes >= 0
