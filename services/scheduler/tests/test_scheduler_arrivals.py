"""The scheduler hears how often each model is asked for."""

import asyncio
import json

import pytest

from pilotlight.common.bus import Bus
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.messages.arrivals import Arrivals, arrivals_subject
from pilotlight.common.testing import MakeContext, until
from pilotlight.policy.arrivals import SLOT_S, ArrivalCount, CounterLife
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.estimates import with_estimates
from pilotlight.policy.ids import Epoch, GatewayId, ModelName
from pilotlight.policy.plan import Estimate, Snapshot
from pilotlight.scheduler.handlers import Listening
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.world import World

NOW_S = 1000.0
FOX = ModelName("fox")


def told(gateway: str, total: int, *, age_s: float = 0.0) -> Arrivals:
    counts = (ArrivalCount(model=FOX, total=total, idle_s=0.0),)
    return Arrivals(
        life=CounterLife(gateway_id=GatewayId(gateway), number="1", age_s=age_s), counts=counts
    )


def test_arrivals_are_those_of_all_gateways() -> None:
    world = World(listening_since_s=0.0)
    world.listen(NOW_S)
    new = [
        world.hear_arrivals(one.life, one.counts, NOW_S + 1)
        for one in (told("a", 3), told("b", 2), told("a", 3))
    ]
    assert new == [3, 2, 0]
    assert world.arrivals.recent().rate_per_s(FOX, NOW_S + 1) == 5 / SLOT_S
    assert world.listening_since_s == NOW_S


def test_a_decision_keeps_arrivals_and_estimates() -> None:
    world = World(listening_since_s=0.0)
    world.listen(NOW_S)
    world.hear_arrivals(told("a", 3).life, told("a", 3).counts, NOW_S + 1)
    known = Estimate(
        model=FOX,
        device_kind=DeviceKind.SIM,
        fetch_bytes_per_s=1.0,
        load_bytes_per_s=2.0,
        prefill_s=0.1,
        cold_ttft_s=1.0,
        samples=1,
    )
    estimates = with_estimates({}, (known,))
    snapshot = Snapshot(
        now_s=NOW_S + 1, epoch=Epoch(1), estimates=estimates, arrivals=world.arrivals.recent()
    )
    assert from_row_json(json.loads(json.dumps(to_row_json(snapshot))), Snapshot) == snapshot


class NoModels:
    """A database without models."""

    async def models(self):
        return ()

    async def drains(self):
        return {}

    async def profiles(self):
        return ()


@pytest.mark.anyio
async def test_who_listens_hears_every_gateway(bus: Bus, make_context: MakeContext) -> None:
    context = make_context("scheduler", SchedulerSettings(database_url="postgresql:///none"))
    world, wake = World(listening_since_s=0.0), asyncio.Event()
    listening = Listening(context, world, NoModels(), wake)
    await listening.start()
    await bus.publish(arrivals_subject(GatewayId("a")), told("a", 3))
    await bus.publish(arrivals_subject(GatewayId("b")), told("b", 1))
    await until(
        lambda: context.metrics.get_sample_value("pilotlight_scheduler_arrivals_total") == 4
    )
    assert context.metrics.get_sample_value("pilotlight_scheduler_arrival_gateways") == 2
    assert world.arrivals.recent().last_s(FOX) is not None
    assert not wake.is_set(), "nothing is decided by them yet"
    await listening.stop()
