"""Nodes coalesce their reports while every listener understands that, and no longer than that."""

import pytest

from pilotlight.common.buckets import HEALTH
from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.reports import COALESCE_SUBJECT, Coalesce, Understands
from pilotlight.common.report_style import FOR_S, SAY_EVERY_S, SURE_AFTER_S, ReportStyle
from pilotlight.common.service import Background
from pilotlight.common.testing import until

pytestmark = pytest.mark.anyio


async def test_a_listener_of_the_release_before_is_found_by_what_it_writes(bus) -> None:
    told = list[float]()

    async def on_told(message: Coalesce) -> None:
        told.append(message.for_s)

    await bus.subscribe(COALESCE_SUBJECT, Coalesce, on_told)
    clock, background = ManualClock(), Background()
    style = ReportStyle(bus, clock, background)
    bucket = await bus.bucket(HEALTH)
    await bucket.put("gateway", Understands(node_reports=True))
    await bucket.put("loader", None)
    await style.start()
    try:
        await style.say()
        clock.advance(SURE_AFTER_S)
        await style.say()
        await until(lambda: told == [FOR_S], deadline_s=10)
        clock.advance(SAY_EVERY_S)
        await style.say()
        await until(lambda: told == [FOR_S, FOR_S], deadline_s=10)
        await bucket.put("cache", None)
        await until(lambda: told == [FOR_S, FOR_S, 0.0], deadline_s=10)
        clock.advance(SURE_AFTER_S)
        await bucket.put("cache", Understands(node_reports=True))
        await style.say()
        await until(lambda: told == [FOR_S, FOR_S, 0.0, FOR_S], deadline_s=10)
    finally:
        await style.stop()
        await background.stop()
