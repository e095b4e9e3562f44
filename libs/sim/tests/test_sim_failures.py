"""Workers and nodes that die in simulated time: requests end elsewhere, control hears it late."""

import dataclasses

import pytest

from pilotlight.policy.cluster import Liveness
from pilotlight.policy.coldstart.contention import incoming, outgoing
from pilotlight.policy.control.holds import PartFetch
from pilotlight.policy.ids import Generation, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.events import Events
from pilotlight.sim.cluster.hosts import Host
from pilotlight.sim.cluster.network import Network
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import (
    CONTENDERS,
    BadScenario,
    Failure,
    parse,
    read_builtin,
)

WORLD = """
keep_alive_s = 30.0
[arrivals]
duration_s = 100.0
[[nodes]]
name = "n"
count = 2
devices = 1
device_gib = 32.0
memory_gib = 100.0
network_gbit_per_s = 16.0
load_gib_per_s = 20.0
memory_gib_per_s = 800.0
[[families]]
name = "f"
size_gib = 10.0
layers = 32
hidden_size = 4096
kv_heads = 8
prefill_tokens_per_s = 10000
decode_step_s = 0.03
decode_more_s = 0.001
[[applications]]
name = "a"
family = "f"
models = 2
ttft_s = 20.0
tpot_s = 0.2
prompt_tokens = 100
output_tokens = 100
"""
MODEL = ModelName("a-0000")


def _world(text: str, *requests: Request, policy: str = "pilotlight") -> Simulation:
    simulation = Simulation(parse("world", WORLD + text), CONTENDERS[policy], 1)
    simulation.requests = iter(requests)
    return simulation


@pytest.mark.parametrize("policy", CONTENDERS)
@pytest.mark.parametrize("kind", ["worker", "node"])
def test_whatever_dies_every_request_ends(policy: str, kind: str) -> None:
    """Something every 20 s, drawn; afterwards devices hold what control believes."""
    scenario = read_builtin("paraserve-testbed-1")
    scenario = dataclasses.replace(
        scenario,
        arrivals=dataclasses.replace(scenario.arrivals, duration_s=120.0),
        failures=(Failure(kind=kind, at_s=10.0, every_s=20.0, for_s=6.0),),
    )
    simulation = Simulation(scenario, CONTENDERS[policy], 3)
    result = simulation.run()
    assert result.deaths == 6
    assert result.finished == result.requests > 20
    still_s = simulation.events.now_s + 10.0
    while simulation.events.step(still_s):
        pass
    for worker in simulation.parts.workers.values():
        for instance_id in worker.held:
            record = simulation.leader.books.get(instance_id)
            assert record is not None
            assert worker.worker_id in {one.worker_id for one in record.instance.placements}


@pytest.mark.parametrize(
    ("failure", "least_s"),
    [
        ('kind = "worker"\nname = "{}-0"', 0.0),
        ('kind = "node"\nname = "{}"', 3.0),
    ],
)
def test_a_request_goes_on_where_its_worker_died(failure: str, least_s: float) -> None:
    """With the tokens that it has; of a node nobody hears before it was silent for 3 s."""
    first = Request(MODEL, 1.0, 100, 400)
    probe = _world("", first)
    probe.run()
    where = next(one.host.node_id for one in probe.parts.workers.values() if one.held)
    undisturbed_s = first.finished_s
    request = Request(MODEL, 1.0, 100, 400)
    text = f"[[failures]]\nat_s = 12.0\nfor_s = 1000.0\n{failure.format(where)}\n"
    simulation = _world(text, request)
    result = simulation.run()
    assert result.deaths == 1
    assert request.first_token_s < 12.0
    # Another node has to have the model: 5.4 s from the store.
    assert undisturbed_s + least_s < request.finished_s < undisturbed_s + least_s + 8.0
    assert all(one.host.node_id != where for one in simulation.parts.workers.values() if one.held)


def test_a_silent_worker_is_suspected_and_then_dead() -> None:
    """By the age of its last report, as in the service; a new process holds nothing."""
    simulation = _world(
        '[[failures]]\nkind = "worker"\nname = "n-0000-0"\nat_s = 5.0\nfor_s = 9.0\n'
    )
    worker = simulation.parts.workers[WorkerId("n-0000-0")]
    seen: list[tuple[Liveness, str]] = []
    for at_s in (4.0, 5.5, 6.5, 8.5, 14.5):
        while simulation.events.step(at_s):
            pass
        simulation.events.now_s = at_s
        view = worker.view(NodeId("n-0000"))
        seen.append((view.facts.liveness, view.incarnation))
    assert seen == [
        (Liveness.ALIVE, "1"),
        (Liveness.ALIVE, "1"),
        (Liveness.SUSPECT, "1"),
        (Liveness.DEAD, "1"),
        (Liveness.ALIVE, "2"),
    ]


def test_what_a_dead_node_was_giving_comes_from_the_store() -> None:
    """The follower of a chain keeps the bytes that it has, and takes the rest from elsewhere."""
    names = (NodeId("given"), NodeId("taken"))
    events = Events()
    links = {link: 2e9 for name in names for link in (incoming(name), outgoing(name))}
    network = Network(events, links)
    hosts = {
        name: Host(
            node_id=name,
            nic_bytes_per_s=2e9,
            pool_bytes=100 * 2**30,
            network=network,
            changed=lambda _: None,
            caches=True,
            peers=True,
        )
        for name in names
    }
    given, taken = hosts.values()
    model = _world("").leader.models[MODEL]

    def told(instance: str, upstreams: tuple[NodeId, ...]) -> PartFetch:
        return PartFetch(
            instance_id=InstanceId(instance),
            generation=Generation(1),
            model=model,
            parts=tuple(range(len(model.spec.part_bytes))),
            trace_parent="",
            upstreams=upstreams,
        )

    given.obey([told("i", ())], lambda _: "", hosts)
    taken.obey([told("j", (names[0],))], lambda _: "", hosts)
    there: list[float] = []
    taken.when_there(model, range(len(model.spec.part_bytes)), lambda: there.append(events.now_s))
    while events.step(2.0):
        pass
    events.now_s = 2.0
    assert [one.peer for one in taken.fetches.values()] == [given]
    taken.lose_source(given)
    given.die()
    while not there and events.step(60.0):
        pass
    # Both flows had the whole link: the follower goes on as if nothing had been.
    assert there == [pytest.approx(10.0 * 2**30 / 2e9, rel=0.01)]
    assert not given.copies


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[failures]]\nkind = "rack"\nat_s = 1.0', "a kind is worker or node"),
        ('[[failures]]\nkind = "node"\nat_s = 1.0\nname = "m"', "there is no node 'm'"),
    ],
)
def test_a_failure_that_cannot_be_is_named(text: str, says: str) -> None:
    with pytest.raises(BadScenario, match=says):
        _world(text)
