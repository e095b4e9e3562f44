"""Starts in clusters of which a choice sees a shortlist: links that are booked or slower than they
say, bursts, models that fail.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.chosen import ChoiceRules
from pilotlight.policy.coldstart.timings import StageSample, Timings
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.plan import Refusal, StartOrder
from pilotlight.policy.control.testing import LargeCluster, Size
from pilotlight.policy.control.tick import tick
from pilotlight.policy.ids import ModelName, NodeId
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import instance


def _told(cluster: LargeCluster, node_id: str, share: float) -> Timings:
    """A fetch to a node got a share of the rate that the node reports."""
    rate = share * cluster.nodes[NodeId(node_id)].nic_bytes_per_s
    sample = StageSample(
        model=ModelName("m00001"),
        device_kind=DeviceKind.CUDA,
        node_id=NodeId(node_id),
        source="s3://there",
        fetch_bytes_per_s=rate,
    )
    return Timings().learned((sample,))


def _cold(nodes: int) -> tuple[LargeCluster, ModelName]:
    """A cluster under ``pilotlight``, and a model of which no node has a copy."""
    cluster = LargeCluster(Size(nodes=nodes, workers_per_node=8, models=nodes + 8, instances=2))
    scheme = replace(cluster.rules.scheme, choice=ChoiceRules())
    cluster.rules = replace(cluster.rules, scheme=scheme)
    cluster.nodes = {key: replace(one, copies=()) for key, one in cluster.nodes.items()}
    cluster.memory = replace(cluster.memory, index=None)
    cluster.carry_out(cluster.tick(None))
    return cluster, list(cluster.models)[-1]


def _asked(cluster: LargeCluster, *models: ModelName) -> tuple[StartOrder, ...]:
    cluster.demand = tuple(
        Demand(model=name, waiting=1, oldest_age_s=0.1, deadline_in_s=10.0) for name in models
    )
    return cluster.tick(Focus()).start


def _nodes(orders: Iterable[StartOrder]) -> list[NodeId]:
    schemes = [one.choice.scheme for one in orders]
    return [one.placements[0].node_id for one in schemes if one is not None]


@pytest.mark.parametrize("nodes", [3, 40])
def test_a_node_that_lied_about_its_bandwidth_is_left(nodes: int) -> None:
    """Also where a shortlist stands for all workers: after one start its link is known."""
    cluster, name = _cold(nodes)
    (first,) = _nodes(_asked(cluster, name))
    facts = replace(
        cluster.facts(Focus(nodes=frozenset({first}))), timings=_told(cluster, first, 0.1)
    )
    (other,) = _nodes(tick(facts, cluster.memory, cluster.rules).start)
    assert other != first


@pytest.mark.parametrize("nodes", [4, 40])
def test_starts_of_one_tick_do_not_share_a_link(nodes: int) -> None:
    """Though every node has eight workers with room, and the first ones have the first ids."""
    cluster, _ = _cold(nodes)
    names = list(cluster.models)[-4:]
    found = _nodes(_asked(cluster, *names))
    assert len(set(found)) == len(found) == 4


def test_a_burst_gets_all_its_instances_in_one_tick() -> None:
    """One for every sixteen requests, on workers of their own, no more than are allowed."""
    cluster, name = _cold(40)
    scaling = replace(cluster.models[name].scaling, max_instances=4)
    cluster.models[name] = replace(cluster.models[name], scaling=scaling)
    waiting = Demand(model=name, waiting=100, oldest_age_s=0.1, deadline_in_s=10.0)
    cluster.demand = (waiting,)
    orders = cluster.tick(Focus(models=frozenset({name}))).start
    assert [one.model.name for one in orders] == [name] * 4
    assert len(set(_nodes(orders))) == 4


def test_other_models_come_before_the_rest_of_a_burst() -> None:
    """Each has its turn first, whatever a burst still wants."""
    cluster, name = _cold(40)
    scaling = replace(cluster.models[name].scaling, max_instances=8)
    cluster.models[name] = replace(cluster.models[name], scaling=scaling)
    other = list(cluster.models)[-2]
    cluster.demand = (
        Demand(model=name, waiting=48, oldest_age_s=5.0, deadline_in_s=10.0),
        Demand(model=other, waiting=1, oldest_age_s=0.1, deadline_in_s=10.0),
    )
    orders = cluster.tick(Focus(models=frozenset({name}))).start
    assert [one.model.name for one in orders] == [name, other, name, name]


def test_a_tick_begins_a_few_starts_and_the_next_ones_the_rest() -> None:
    """However many models are asked for at once, a tick is short; the longest waiter is first."""
    cluster, _ = _cold(40)
    names, begun, ticks = list(cluster.models)[-20:], list[ModelName](), list[int]()
    cluster.demand = tuple(
        Demand(model=name, waiting=1, oldest_age_s=1.0 - at / 100, deadline_in_s=10.0)
        for at, name in enumerate(names)
    )
    while len(begun) < len(names):
        plan = cluster.tick(Focus())
        cluster.carry_out(plan)
        for order in plan.start:
            under_way = instance(
                order.model.name, f"of-{order.model.name}", state=InstanceState.PLANNED
            )
            record = Record(instance=under_way, model=order.model, tentative=True)
            cluster.books = cluster.books.put(record)
            begun.append(order.model.name)
        ticks.append(len(plan.start))
    assert ticks == [8, 8, 4]
    assert begun == names
    assert not cluster.tick(Focus()).start


def test_what_failed_is_tried_by_one_start_alone() -> None:
    """A model that cannot start does not fail by the dozen."""
    cluster, name = _cold(40)
    model = cluster.models[name]
    cluster.models[name] = replace(model, scaling=replace(model.scaling, max_instances=8))
    failed = replace(
        instance(name, "failed", state=InstanceState.FAILED, since_s=cluster.now_s - 1),
        digest=model.digest,
    )
    cluster.books = cluster.books.put(Record(instance=failed, model=model))
    cluster.demand = (Demand(model=name, waiting=100, oldest_age_s=0.1, deadline_in_s=10.0),)
    orders = cluster.tick(Focus(models=frozenset({name}))).start
    assert len(orders) == 1


def test_the_worker_that_refused_is_left_out_of_the_next_try() -> None:
    """And no other."""
    cluster, _ = _cold(4)
    plan = cluster.tick(cluster.ask(0))
    (order,) = plan.start
    assert order.choice.scheme is not None
    refused = order.choice.scheme.placements[0].worker_id
    refusal = Refusal(
        model=order.model.name, worker_id=refused, code="no_room", message="", transient=False
    )
    facts = replace(cluster.facts(Focus()), refusals=(refusal,))
    (again,) = tick(facts, plan.memory, cluster.rules).start
    assert again.choice.scheme is not None
    assert again.choice.scheme.placements[0].worker_id != refused
    assert {one.worker_id for one in again.choice.rejected} == {refused}
