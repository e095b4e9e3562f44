"""Arrivals are told of every model, whether its requests wait or not."""

import asyncio

import pytest

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock, ManualClock, SystemClock
from pilotlight.common.messages.arrivals import ARRIVAL_SUBJECTS, Arrivals
from pilotlight.common.service import Background
from pilotlight.common.testing import MakeContext, until
from pilotlight.gateway.serving.arrivals import ArrivalPublisher
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.policy.arrivals import ArrivalWindows
from pilotlight.policy.ids import GatewayId, ModelName

pytestmark = pytest.mark.anyio
FOX, CAT = ModelName("fox"), ModelName("cat")


class Heard:
    """A listener, as scheduler and cache have one."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.windows = ArrivalWindows(clock.monotonic_s())
        self.messages: list[Arrivals] = []
        self.more = asyncio.Event()

    async def hear(self, message: Arrivals) -> None:
        self.messages.append(message)
        now_s = self.clock.monotonic_s()
        self.windows.hear(message.life, message.counts, now_s, now_s)
        self.more.set()

    def counts(self) -> dict[ModelName, int]:
        return {
            model: self.windows.recent().count(model, self.clock.monotonic_s())
            for model in (FOX, CAT)
        }


async def listening(bus: Bus, clock: Clock) -> Heard:
    heard = Heard(clock)
    await bus.subscribe(ARRIVAL_SUBJECTS, Arrivals, heard.hear)
    return heard


def publisher(
    bus: Bus, make_context: MakeContext, clock: ManualClock, background: Background
) -> ArrivalPublisher:
    metrics = make_context("gateway", GatewaySettings()).metrics
    return ArrivalPublisher(bus, clock, background, GatewayId("gw"), "inc", metrics)


async def test_what_arrives_is_told_and_told_again(bus: Bus, make_context: MakeContext) -> None:
    clock, background = ManualClock(), Background()
    heard = await listening(bus, clock)
    telling = publisher(bus, make_context, clock, background)
    await telling.start()
    for model in (FOX, FOX, CAT):
        telling.arrived(model)
    await until(lambda: heard.counts() == {FOX: 2, CAT: 1})
    before = len(heard.messages)
    await until(lambda: len(heard.messages) > before)
    assert heard.counts() == {FOX: 2, CAT: 1}, "told again, counted once"
    assert {one.model for one in heard.messages[-1].counts} == {FOX, CAT}
    assert (heard.messages[-1].life.gateway_id, heard.messages[-1].life.number) == ("gw", "inc.1")
    telling.arrived(CAT)
    await telling.stop()
    await until(lambda: heard.counts() == {FOX: 2, CAT: 2})


async def test_nothing_is_said_before_there_is_something(
    bus: Bus, make_context: MakeContext, monkeypatch
) -> None:
    monkeypatch.setattr("pilotlight.gateway.serving.arrivals.REPEAT_S", 0.001)
    clock, background = ManualClock(), Background()
    heard = await listening(bus, clock)
    quiet, telling = (
        publisher(bus, make_context, clock, background),
        publisher(bus, make_context, clock, background),
    )
    await quiet.start()
    await telling.start()
    telling.arrived(FOX)
    await until(lambda: len(heard.messages) >= 3)
    assert all(message.counts for message in heard.messages)
    await quiet.stop()
    await telling.stop()


async def test_a_request_for_a_model_that_is_ready_is_told(world) -> None:
    heard = await listening(world.bus, SystemClock())
    await world.worker()
    await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    await until(lambda: heard.counts()[FOX] == 1)
    assert not world.serving.queue.held
    assert world.metrics.get_sample_value("pilotlight_arrivals_total") == 1
    assert world.metrics.get_sample_value("pilotlight_arrival_models") == 1
    assert world.metrics.get_sample_value("pilotlight_arrival_messages_total") >= 1
