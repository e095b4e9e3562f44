"""Clusters in simulated time: they end, are the same each time, and ask control for everything."""

import ast
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

import pilotlight.sim.cluster.leader as leader_module
from pilotlight.policy.arrivals import Access
from pilotlight.policy.control.tick import tick
from pilotlight.policy.instance import ENDED, SERVING
from pilotlight.sim.cluster.build import catalogue_of
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.evictions import Evictions
from pilotlight.sim.cluster.results import Result
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import (
    CONTENDERS,
    GIB,
    BadScenario,
    Scenario,
    builtin,
    parse,
    read_builtin,
)

SECONDS = 120.0


def _short(name: str = "paraserve-testbed-1", **changes: float) -> Scenario:
    scenario = read_builtin(name)
    changes.setdefault("duration_s", SECONDS)
    return dataclasses.replace(
        scenario,
        arrivals=dataclasses.replace(scenario.arrivals, **changes),
    )


def _plain(result: Result) -> Result:
    return dataclasses.replace(result, cpu_s=0.0)


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_request_ends_and_nothing_is_left(name: str) -> None:
    """With every contender; afterwards devices hold what control believes, and no more."""
    simulation = Simulation(_short(), CONTENDERS[name], 3)
    result = simulation.run()
    assert result.finished == result.requests > 20
    assert 0.0 <= result.ttft_attainment <= 1.0
    assert result.starts <= result.stages
    for worker in simulation.parts.workers.values():
        assert worker.free_bytes >= 0
        for instance_id in worker.held:
            record = simulation.leader.books.get(instance_id)
            assert record is not None
            assert record.instance.state not in ENDED


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    """To the last float."""
    first, again, other = (
        _plain(Simulation(_short(), CONTENDERS["pilotlight"], seed).run()) for seed in (3, 3, 4)
    )
    assert first == again
    assert first.ttfts_s != other.ttfts_s


def test_the_order_of_the_papers_figure() -> None:
    """Figure 10: serverless vLLM, ServerlessLLM, ParaServe; ours is no worse than ParaServe."""
    scenario = _short(duration_s=400.0)
    attained = {
        name: Simulation(scenario, CONTENDERS[name], 3).run().ttft_attainment
        for name in ("single", "locality", "paraserve", "pilotlight")
    }
    assert attained["single"] < attained["locality"] < attained["paraserve"]
    assert attained["pilotlight"] >= attained["paraserve"]
    assert attained["pilotlight"] >= 1.74 * attained["single"]


def test_a_log_replays() -> None:
    """The facts and memories of a run, given to ``tick`` again, give the same plans."""
    simulation = Simulation(_short(), CONTENDERS["pilotlight"], 3)
    log = simulation.leader.log = []
    simulation.run()
    assert any(one.plan.start for one in log)
    assert any(one.plan.grow for one in log)
    for one in log:
        again = tick(one.facts, one.memory, simulation.leader.rules)
        said = [(plan.start, plan.grow, plan.drain, plan.changes) for plan in (again, one.plan)]
        assert said[0] == said[1]


def test_groups_become_whole_instances() -> None:
    """A group that serves ends with one worker that has the whole model."""
    simulation = Simulation(_short(duration_s=300.0), CONTENDERS["paraserve"], 3)
    result = simulation.run()
    assert result.stages > result.starts
    still_s = simulation.events.now_s + 30.0
    while simulation.events.step(still_s):
        pass
    serving = [
        one.instance for one in simulation.leader.books.rows() if one.instance.state in SERVING
    ]
    assert serving
    assert all(len(one.placements) == 1 for one in serving)


def test_no_rule_is_written_twice() -> None:
    """Nothing here decides where a start goes, how many there are, or who makes way."""
    folder = Path(leader_module.__file__).parent
    deciding = {"choose_scheme", "plan_scaling", "plan_turns", "plan_drain", "reconcile", "CHOICES"}
    for file in folder.glob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert not names & deciding, file.name


def test_every_scenario_of_the_package_is_one() -> None:
    """They are read, and have the paper's testbeds among them."""
    assert {"paraserve-testbed-1", "paraserve-testbed-2"} <= set(builtin())
    assert all(read_builtin(name).nodes for name in builtin())
    assert {one.kind for one in read_builtin("deaths").failures} == {"worker", "node"}
    first, second = read_builtin("paraserve-testbed-1"), read_builtin("paraserve-testbed-2")
    assert [one.count * one.devices for one in first.nodes] == [4, 16]
    assert [one.count * one.devices for one in second.nodes] == [8, 16]
    assert sum(one.models for one in first.applications) == 3 * 2 * 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = 3 =", "s:"),
        ("speed = 1", "unknown fields: speed"),
        ("", "there must be nodes"),
        ("[arrivals]\nrate = 3", "arrivals: unknown fields: rate"),
        ("[[nodes]]\nname = 'n'", "nodes, entry 1"),
    ],
)
def test_a_scenario_that_cannot_be_used_says_why(text: str, says: str) -> None:
    """Where, and what."""
    with pytest.raises(BadScenario, match=says):
        parse("s", text)


def test_a_cluster_evicts_by_the_policy_of_its_contender() -> None:
    """Two places: recency gives up the popular model, importance keeps it and has the others take
    turns.
    """
    short = _short(duration_s=200.0)
    scenario = dataclasses.replace(
        short,
        keep_alive_s=1e4,
        nodes=(dataclasses.replace(short.nodes[0], count=1, device_gib=32.0),),
        applications=(dataclasses.replace(_short().applications[0], models=3),),
    )
    popular, *others = catalogue_of(scenario).models
    asked = [(popular, 2.0 + number) for number in range(10)]
    asked += [(others[number % 2], 20.0 + 10.0 * number) for number in range(12)]
    asked += [(popular, 140.0)]
    starts = {
        policy: _starts(scenario, policy, [Request(name, at_s, 10, 2) for name, at_s in asked])
        for policy in ("lru", "iam", "pilotlight")
    }
    assert starts["lru"] == 4
    assert starts["iam"] == starts["pilotlight"] > 12


@pytest.mark.parametrize(("policy", "stays"), [("", False), ("lru", False), ("iam", True)])
def test_host_pools_let_go_by_the_policy_of_their_contender(policy: str, stays: bool) -> None:
    """There is room for two copies, and by importance the popular model's stays, though two others
    were wanted since.
    """
    short = _short(duration_s=300.0)
    scenario = dataclasses.replace(
        short,
        keep_alive_s=2.0,
        nodes=(dataclasses.replace(short.nodes[0], count=1),),
        applications=(dataclasses.replace(short.applications[0], models=3),),
    )
    popular, *others = catalogue_of(scenario).models.values()
    room = 2.5 * popular.spec.total_bytes / GIB
    nodes = (dataclasses.replace(scenario.nodes[0], memory_gib=room),)
    asked = [Request(popular.name, 2.0 + number, 10, 2) for number in range(60)]
    asked += [Request(others[at % 2].name, 100.0 + 40.0 * at, 10, 2) for at in range(4)]
    contender = dataclasses.replace(CONTENDERS["least-ttft"], pool_eviction=policy)
    scenario = dataclasses.replace(scenario, nodes=nodes)
    simulation = Simulation(scenario, contender, 3, asked=asked)
    assert simulation.run().finished == len(asked)
    (host,) = simulation.parts.hosts.values()
    assert len(host.copies) == 2
    assert (popular.digest in host.copies) == stays


def test_a_cluster_tells_of_arrivals_as_gateways_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at once, whether it starts something or not; what comes sooner than the next message may
    be sent goes together.
    """
    told: list[Access] = []
    hear = Evictions.hear_arrivals

    def heard(evictions: Evictions, accesses: Iterable[Access]) -> None:
        told.extend(listed := tuple(accesses))
        hear(evictions, listed)

    monkeypatch.setattr(Evictions, "hear_arrivals", heard)
    model = next(iter(catalogue_of(_short()).models))
    times = (10.0, 10.2, 10.21, 10.22, 30.0, 30.15)
    _starts(_short(), "pilotlight", [Request(model, at_s, 10, 2) for at_s in times])
    assert [(one.at_s, one.count) for one in told] == [
        (pytest.approx(at_s), count)
        for at_s, count in ((10.0, 1), (10.2, 1), (10.22, 2), (30.0, 1), (30.15, 1))
    ]


def _starts(scenario: Scenario, policy: str, asked: list[Request]) -> int:
    contender = dataclasses.replace(CONTENDERS["least-ttft"], eviction=policy)
    simulation = Simulation(scenario, contender, 3, asked=asked)
    assert simulation.run().finished == len(asked)
    return simulation.leader.starts
