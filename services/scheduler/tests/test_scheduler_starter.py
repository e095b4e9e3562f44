"""How a start asks for room, what a refusal leaves, and what nodes are told of it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from sqlalchemy import select

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.errors import HostPoolFull, NoRoom
from pilotlight.common.messages.demand import NEVER_FITS_SUBJECT, NeverFits
from pilotlight.common.messages.hold import NodeHold, Peer, WorkerHold
from pilotlight.common.service import Application
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import NodeId
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import copy, node
from pilotlight.scheduler.testing import Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState
H = HeldState


async def test_no_room_is_recorded_once_and_tried_again_until_there_is(rig: Rig) -> None:
    rig.refusal = HostPoolFull("the pool is full")
    await rig.demand()
    await rig.tried(3)
    rows = await rig.rows(select(tables.decisions))
    assert [row.outcome["refused"] for row in rows] == ["host_pool_full"]
    assert not rig.shown
    rig.refusal = None
    await rig.tried(4)
    await rig.shown_as(S.FETCHING)


async def test_gateways_are_told_of_a_model_that_no_worker_can_hold(rig: Rig) -> None:
    told: list[NeverFits] = []

    async def hear(message: NeverFits) -> None:
        told.append(message)

    await rig.bus.subscribe(NEVER_FITS_SUBJECT, NeverFits, hear)
    rig.memory_bytes = 10
    await rig.report()
    await rig.passing(rig.waited, lambda: told)
    assert (told[0].model, told[0].digest) == ("m", "d-m")
    assert "more than any worker has" in told[0].message
    assert not rig.reserved


async def test_refusals_that_alternate_are_recorded_once_each(rig: Rig) -> None:
    rig.refusal = HostPoolFull("the pool is full")
    await rig.demand()
    await rig.tried(1)
    for tries in range(2, 6):
        rig.refusal = NoRoom("in use") if tries % 2 == 0 else HostPoolFull("the pool is full")
        await rig.tried(tries)
    rows = await rig.rows(select(tables.decisions))
    assert sorted(row.outcome["refused"] for row in rows) == ["host_pool_full", "no_room"]


async def test_a_node_is_told_at_once_from_whom_to_fetch_and_the_next_leader_says_the_same(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    parts = tuple(range(6))
    has = replace(copy(), node_id=NodeId("n1"), parts=parts)
    rig.others = (
        replace(
            node(copies=(has,)),
            node_id=NodeId("n1"),
            dataplane_host="10.0.0.2",
            dataplane_port=7001,
        ),
        replace(
            node(copies=(replace(has, parts=parts[:3]),)),
            node_id=NodeId("n2"),
            dataplane_host="10.0.0.3",
            dataplane_port=7002,
        ),
        replace(
            node(copies=(has,)),
            node_id=NodeId("n3"),
            dataplane_host="10.0.0.4",
            dataplane_port=7003,
            draining=True,
        ),
    )
    await rig.report()
    orders: list[NodeHold | WorkerHold] = []

    async def heard(command: NodeHold | WorkerHold) -> None:
        orders.append(command)

    listening = [
        await rig.bus.subscribe("v1.loader.n0.hold", NodeHold, heard),
        await rig.bus.subscribe("v1.worker.w0.hold", WorkerHold, heard),
    ]
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.ordered(instance.instance_id)
    fetched = [one for one in orders if isinstance(one, NodeHold) and one.fetches]
    held = [one for one in orders if isinstance(one, WorkerHold) and one.holds]
    assert fetched[0].seq + 1 == held[0].seq, (
        "bytes move while the worker gets ready: its node is told just before it"
    )
    upstreams = fetched[0].fetches[0].upstreams
    assert upstreams == (
        Peer(node_id=NodeId("n1"), host="10.0.0.2", port=7001),
        Peer(node_id=NodeId("n2"), host="10.0.0.3", port=7002),
    )
    assert instance.placements[0].upstreams == ("n1",)
    (decision,) = await rig.rows(select(tables.decisions))
    assert [(chain["source"], chain["members"]) for chain in decision.outcome["chains"]] == [
        ("n1", ["n0"])
    ]
    assert "n0 takes the parts from n1, then n2, then file:///m" in decision.reasons

    await new_scheduler(rig.clock)
    epoch = rig.epoch
    for component in reversed(rig.application.components):
        await component.stop()
    for _ in range(4):
        await rig.later(0.5)
    await rig.until(lambda: rig.epoch > epoch)
    for one in listening:
        await one.end()
    told = {
        fetch.upstreams
        for command in orders
        if isinstance(command, NodeHold)
        for fetch in command.fetches
    }
    assert told == {upstreams}
