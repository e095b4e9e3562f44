"""What operators ask of the leader."""

import pytest
from sqlalchemy import select

from pilotlight.common.db import tables
from pilotlight.common.errors import ModelNotFound, NoRoom, NotLeader
from pilotlight.common.messages.demand import (
    EVICT_SUBJECT,
    WARM_SUBJECT,
    Evict,
    Evicting,
    Warm,
    Warming,
)
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.plan import InstanceState
from pilotlight.scheduler.operator_requests import OperatorRequests
from pilotlight.scheduler.testing import DEADLINE_S, Rig

pytestmark = pytest.mark.anyio
MODEL = ModelName("m")


async def test_whoever_asked_is_answered() -> None:
    requests = OperatorRequests()
    planned, evicted = requests.planned(MODEL), requests.evict(MODEL)
    requests.settle_planned(MODEL, InstanceId("i"), None)
    requests.settle_evicted(MODEL, (InstanceId("i"),))
    assert (await planned, await evicted) == ("i", ("i",))


async def test_the_end_of_a_term_leaves_nobody_waiting() -> None:
    requests = OperatorRequests()
    waiting = (requests.planned(MODEL), requests.evict(MODEL))
    requests.close(NotLeader("the term is over"))
    for future in waiting:
        with pytest.raises(NotLeader):
            await future
    with pytest.raises(NotLeader):
        requests.planned(MODEL)
    with pytest.raises(NotLeader):
        requests.evict(MODEL)


S = InstanceState
H = HeldState


@pytest.mark.slow
async def test_warm_starts_a_model_that_nobody_waits_for(rig: Rig) -> None:
    with pytest.raises(ModelNotFound):
        await rig.bus.request(
            WARM_SUBJECT, Warm(model=ModelName("nobody")), Warming, deadline_s=DEADLINE_S
        )
    warm = Warm(model=ModelName("m"))
    warming = await rig.bus.request(WARM_SUBJECT, warm, Warming, deadline_s=DEADLINE_S)
    again = await rig.bus.request(WARM_SUBJECT, warm, Warming, deadline_s=DEADLINE_S)
    assert again == warming
    await rig.later(0.9)
    await rig.later(0.9)
    await rig.ordered(warming.instance_id)
    await rig.hold(warming.instance_id, H.READY)
    ready = await rig.shown_as(S.READY)
    assert ready.instance_id == warming.instance_id, (
        "it is not cancelled, although no request waits"
    )
    assert await rig.bus.request(WARM_SUBJECT, warm, Warming, deadline_s=DEADLINE_S) == warming
    await rig.until(lambda: "cold_start_finished" in {one.kind for one in rig.events})
    (cold,) = await rig.rows(select(tables.cold_starts))
    assert (cold.status, cold.ttft_s) == ("done", None)


@pytest.mark.slow
async def test_warm_says_why_it_cannot(rig: Rig) -> None:
    rig.refusal = NoRoom("everything is in use")
    with pytest.raises(NoRoom, match="everything is in use"):
        await rig.bus.request(
            WARM_SUBJECT, Warm(model=ModelName("m")), Warming, deadline_s=DEADLINE_S
        )


@pytest.mark.slow
async def test_evict_drains_every_instance(rig: Rig) -> None:
    ready = await rig.ready()
    evicting = await rig.bus.request(
        EVICT_SUBJECT, Evict(model=ModelName("m")), Evicting, deadline_s=DEADLINE_S
    )
    assert evicting.instance_ids == (ready.instance_id,)
    await rig.shown_as(S.DRAINING)
    with pytest.raises(ModelNotFound):
        await rig.bus.request(
            EVICT_SUBJECT, Evict(model=ModelName("nobody")), Evicting, deadline_s=DEADLINE_S
        )
