"""Nodes with a disk tier: what left the host pool comes from there."""

import pytest

from pilotlight.policy.cluster import Tier
from pilotlight.policy.coldstart.facts import DISK
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import CONTENDERS, parse

WORLD = """
keep_alive_s = 5.0
[arrivals]
duration_s = 200.0
[[nodes]]
name = "n"
count = 1
devices = 2
device_gib = 32.0
memory_gib = 10.5
network_gbit_per_s = 16.0
load_gib_per_s = 20.0
memory_gib_per_s = 800.0
{disk}
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
models = 3
ttft_s = 30.0
tpot_s = 0.2
prompt_tokens = 100
output_tokens = 100
"""
FIRST, SECOND, THIRD = (ModelName(f"a-000{number}") for number in range(3))
NETWORK_S, DISK_S = 10 * 2**30 / 2e9, 10 / 4
"""A model of 10 GiB over 16 Gbit/s, and from a disk that gives 4 GiB/s."""


def a_disk(gib: float = 100.0) -> str:
    return f"disk_gib = {gib}\ndisk_gib_per_s = 4.0"


def ran(requests: list[Request], disk: str = "", policy: str = "pilotlight") -> Simulation:
    """A host pool of 10.5 GiB has room for one model."""
    scenario = parse("world", WORLD.format(disk=disk))
    simulation = Simulation(scenario, CONTENDERS[policy], 1, asked=requests)
    simulation.leader.log = []
    assert simulation.run().finished == len(requests)
    return simulation


def in_turn() -> list[Request]:
    """Each start after the instance before it is gone."""
    return [Request(name, at_s, 100, 20) for name, at_s in ((FIRST, 1), (SECOND, 40), (FIRST, 80))]


def sources(simulation: Simulation) -> list[str]:
    """Of the starts, in their order."""
    assert simulation.leader.log is not None
    return [
        place.source
        for one in simulation.leader.log
        for order in one.plan.start
        if order.choice.scheme is not None
        for place in order.choice.scheme.placements
    ]


@pytest.mark.parametrize("policy", ["locality", "pilotlight"])
def test_what_left_the_host_pool_comes_from_the_disk(policy: str) -> None:
    """As the policy predicted, and in the time that the disk takes."""
    without, with_disk = in_turn(), in_turn()
    ran(without, policy=policy)
    simulation = ran(with_disk, a_disk(), policy)
    assert [one == DISK for one in sources(simulation)] == [False, False, True]
    assert with_disk[0].ttft_s == without[0].ttft_s >= NETWORK_S
    gained_s = without[2].ttft_s - with_disk[2].ttft_s
    assert gained_s == pytest.approx(NETWORK_S - DISK_S, rel=0.2)


def test_two_that_read_it_share_it() -> None:
    alone = in_turn()
    ran(alone, a_disk())
    asked = [(FIRST, 1), (SECOND, 40), (THIRD, 80), (FIRST, 120), (SECOND, 120)]
    together = [Request(name, at_s, 100, 20) for name, at_s in asked]
    simulation = ran(together, a_disk())
    assert sources(simulation)[3:] == [DISK, DISK]
    both_s = max(one.ttft_s for one in together[3:])
    assert both_s - alone[2].ttft_s == pytest.approx(DISK_S, rel=0.2)


def test_a_disk_that_is_full_lets_go_what_was_used_the_longest_ago() -> None:
    simulation = ran(in_turn(), a_disk(gib=10.5))
    assert DISK not in sources(simulation)
    (host,) = simulation.parts.hosts.values()
    assert host.disk is not None
    assert len(host.disk.copies) == 1


def test_a_disk_outlives_its_node() -> None:
    simulation = ran(in_turn(), a_disk())
    (host,) = simulation.parts.hosts.values()
    host.die()
    host.revive()
    assert [one.tier for one in host.facts().copies] == [Tier.DISK] * 2
    assert host.facts().pool_free_bytes == host.pool_bytes


def test_contenders_whose_pools_keep_nothing_have_no_disk() -> None:
    simulation = ran(in_turn(), a_disk(), "paraserve")
    assert DISK not in sources(simulation)
    (host,) = simulation.parts.hosts.values()
    assert host.facts().links == ()
