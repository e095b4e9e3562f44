"""Small stories under control's own decisions: what shares a link, bursts, what cannot be."""

from collections.abc import Iterable

import pytest

from pilotlight.policy.ids import ModelName
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.results import Result
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import CONTENDERS, parse

WORLD = """
keep_alive_s = 20.0
max_batch = 8
[arrivals]
duration_s = 120.0
[[nodes]]
name = "n"
count = {nodes}
devices = {devices}
device_gib = 32.0
memory_gib = 100.0
network_gbit_per_s = 16.0
load_gib_per_s = 20.0
memory_gib_per_s = 800.0
[[families]]
name = "f"
size_gib = {size_gib}
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
ttft_s = {ttft_s}
tpot_s = 0.2
prompt_tokens = 100
output_tokens = 100
max_instances = 8
"""
FIRST, SECOND = ModelName("a-0000"), ModelName("a-0001")


def _world(
    policy: str,
    requests: Iterable[Request],
    *,
    nodes: int = 1,
    devices: int = 2,
    size_gib: float = 10.0,
    ttft_s: float = 7.0,
) -> tuple[Simulation, Result]:
    """A run with given requests; a fetch of 10 GiB takes 5.4 s alone."""
    text = WORLD.format(nodes=nodes, devices=devices, size_gib=size_gib, ttft_s=ttft_s)
    simulation = Simulation(parse("world", text), CONTENDERS[policy], 1)
    simulation.requests = iter(requests)
    return simulation, simulation.run()


def _two() -> tuple[Request, Request]:
    return Request(FIRST, 1.0, 100, 20), Request(SECOND, 1.5, 100, 20)


def test_starts_that_would_make_each_other_late_go_apart() -> None:
    """Each node could hold both; together on one link both would be late."""
    first, second = _two()
    _, result = _world("pilotlight", (first, second), nodes=2)
    assert result.ttft_attainment == 1.0
    first, second = _two()
    _, result = _world("single", (first, second), nodes=2)
    assert result.ttft_attainment == 0.0


@pytest.mark.parametrize("policy", ["pilotlight", "paraserve"])
def test_with_one_node_the_second_waits_and_the_first_is_in_time(policy: str) -> None:
    """It starts when the first has what it fetches, and is as late as it has to be."""
    first, second = _two()
    _, result = _world(policy, (first, second))
    assert result.finished == 2
    assert first.ttft_s <= 7.0
    assert 10.0 < second.ttft_s < 13.0
    assert result.starts == 2


def test_a_burst_gets_the_instances_that_it_needs_and_they_go_again() -> None:
    """Forty requests, eight for an instance; nothing is held after the keep-alive."""
    requests = [Request(FIRST, 1.0, 100, 400) for _ in range(40)]
    simulation, result = _world("pilotlight", requests, nodes=8, devices=1, ttft_s=30.0)
    assert result.finished == 40
    assert result.starts == 5
    end_s = simulation.events.now_s + 30.0
    while simulation.events.step(end_s):
        pass
    assert not simulation.leader.books.rows()
    assert all(not worker.granted for worker in simulation.parts.workers.values())


def test_an_slo_that_cannot_be_met_gets_the_best_there_is() -> None:
    """One start, as soon as it can be, over as many nodes as help; no loop."""
    request = Request(FIRST, 1.0, 100, 20)
    _, result = _world("pilotlight", [request], nodes=4, ttft_s=0.2)
    assert result.starts == 1
    assert result.refusals == 0
    assert request.ttft_s < 5.4 / 2


def test_a_model_that_fits_nowhere_is_refused_and_starves_nobody() -> None:
    """Its refusals become rare; the other model is served as if it were alone."""
    text = WORLD.format(nodes=1, devices=2, size_gib=10.0, ttft_s=7.0)
    huge = text.replace("[[applications]]", _HUGE + "[[applications]]", 1) + _HUGE_APPLICATION
    simulation = Simulation(parse("world", huge), CONTENDERS["pilotlight"], 1)
    served = Request(FIRST, 2.0, 100, 20)
    simulation.requests = iter([Request(ModelName("b-0000"), 1.0, 100, 20), served])
    result = simulation.run()
    assert served.ttft_s < 7.0
    assert result.finished == 1
    assert result.starts == 1
    assert result.refusals < 2 * simulation.events.now_s


_HUGE = """[[families]]
name = "huge"
size_gib = 100.0
layers = 32
hidden_size = 4096
kv_heads = 8
prefill_tokens_per_s = 10000
decode_step_s = 0.03
decode_more_s = 0.001
"""
_HUGE_APPLICATION = """[[applications]]
name = "b"
family = "huge"
models = 1
ttft_s = 5.0
tpot_s = 0.2
prompt_tokens = 100
output_tokens = 100
"""


def test_a_start_that_is_late_by_its_waiting_takes_no_more_than_its_slo_needs() -> None:
    """All nodes are busy for longer than the SLO; then all are free, and one is enough."""
    text = WORLD.format(nodes=4, devices=1, size_gib=10.0, ttft_s=7.0)
    text = text.replace("models = 2", "models = 5").replace(
        "device_gib = 32.0", "device_gib = 16.0"
    )
    simulation = Simulation(parse("world", text), CONTENDERS["pilotlight"], 1)
    busy = [Request(ModelName(f"a-000{at}"), 1.0, 100, 300) for at in range(4)]
    late = Request(ModelName("a-0004"), 2.0, 100, 20)
    simulation.requests = iter([*busy, late])
    result = simulation.run()
    assert all(one.ttft_s <= 7.0 for one in busy)
    assert late.ttft_s > 7.0
    assert result.finished == result.starts == result.stages == 5


def test_a_start_is_predicted_for_the_prompt_that_waits() -> None:
    """Gateways tell how long the oldest prompt is, and control predicts for that one."""
    predicted: list[float] = []
    for prompt_tokens in (100, 2100):
        text = WORLD.format(nodes=1, devices=1, size_gib=10.0, ttft_s=7.0)
        simulation = Simulation(parse("world", text), CONTENDERS["pilotlight"], 1)
        simulation.requests = iter([Request(FIRST, 1.0, prompt_tokens, 20)])
        log = simulation.leader.log = []
        simulation.run()
        start = next(one for one in log if one.plan.start)
        assert [one.prompt_tokens for one in start.facts.demand] == [prompt_tokens]
        scheme = start.plan.start[0].choice.scheme
        assert scheme is not None
        predicted.append(scheme.predicted_ttft_s)
    # 2,000 more tokens at 10,000 a second.
    assert predicted[1] - predicted[0] == pytest.approx(0.2, rel=0.1)
