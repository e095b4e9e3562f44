"""A node that an operator empties."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.messages.events import Event
from pilotlight.common.service import Application
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.plan import InstanceState
from pilotlight.scheduler.testing import Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState
H = HeldState


async def intend_drain(rig: Rig, *node_ids: str) -> None:
    """As the gateway writes it: the row, then the event."""
    async with rig.owner.unit_of_work() as work:
        await work.connection.execute(delete(tables.drains))
        for node_id in node_ids:
            values = {"node_id": node_id, "key_id": "k", "requested_at": func.now()}
            await work.connection.execute(insert(tables.drains).values(**values))
    event = Event(event_id=f"drain-{len(rig.events)}", kind="node_drained", entity="n0", at="")
    await rig.bus.publish("v1.event.gateway.node_drained", event)


async def test_a_node_that_drains_is_emptied_and_gets_nothing_until_it_is_used_again(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    """The only node: there is no room elsewhere, so what runs there ends its requests and goes; a
    new leader keeps to it.
    """
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.READY, in_flight=1)
    await rig.later(1.1)
    await intend_drain(rig, "n0")
    drained = await rig.shown_as(S.DRAINING)
    assert drained.instance_id == ready.instance_id
    (decision,) = await rig.rows(select(tables.decisions).where(tables.decisions.c.kind == "drain"))
    assert "no room elsewhere" in decision.reasons[0]
    assert decision.inputs["instance"]["instance_id"] == ready.instance_id
    rig.held.clear()
    await rig.later(0.1)
    await rig.until(lambda: rig.shown[ready.instance_id] is None or not rig.instances(S.DRAINING))

    await rig.demand()

    async def refusals() -> list[Any]:
        refused = tables.decisions.c.outcome["refused"].astext == "no_room"
        return await rig.rows(
            select(tables.decisions).where(refused).order_by(tables.decisions.c.epoch)
        )

    await rig.passing(rig.waited, refusals)
    assert any("its node is draining" in reason for reason in (await refusals())[0].reasons)
    assert len(rig.reserved) == 1, "room was asked for on a node that drains"

    for component in reversed(rig.application.components):
        await component.stop()
    rig.application = await new_scheduler(rig.clock)
    await rig.later(1.1)

    async def refused_anew() -> bool:
        return (await refusals())[-1].epoch > ready.epoch

    await rig.passing(rig.waited, refused_anew)
    assert "its node is draining" in " ".join((await refusals())[-1].reasons)
    assert len(rig.reserved) == 1, "a new leader forgot the drain"

    await intend_drain(rig)
    await rig.tried(2)
    assert (await rig.shown_as(S.FETCHING)).model == "m"
