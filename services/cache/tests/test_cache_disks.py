"""The order that loaders are told for their disks, on real NATS."""

from dataclasses import replace

import pytest

from pilotlight.cache.books import Books
from pilotlight.cache.disks import INTERVAL_S, REPEAT_S, DiskOrders
from pilotlight.cache.testing import hear
from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.room import DISK_ORDER_SUBJECT, DiskOrder
from pilotlight.common.testing import until
from pilotlight.policy.arrivals import ArrivalCount, CounterLife
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.ids import GatewayId, ModelName
from pilotlight.policy.testing import model, node

pytestmark = pytest.mark.anyio


async def test_loaders_are_told_once_what_changed_and_again_for_those_that_begin(bus: Bus) -> None:
    told: list[tuple[str, ...]] = []
    clock, books = ManualClock(), Books()
    books.listen(clock.monotonic_s())
    books.models = registered([model("often"), model("rare")])

    async def hears(order: DiskOrder) -> None:
        told.append(order.models)

    def asked(**totals: int) -> None:
        life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
        counts = [
            ArrivalCount(model=ModelName(name), total=total, idle_s=0.0)
            for name, total in totals.items()
        ]
        books.hear_arrivals(life, counts, clock.monotonic_s())

    await bus.subscribe(DISK_ORDER_SUBJECT, DiskOrder, hears)
    orders = DiskOrders(books, bus, clock)
    asked(often=20, rare=1)
    hear(books, node(), clock.monotonic_s())
    await orders.follow()
    hear(books, replace(node(), disk_tier_bytes=1000), clock.monotonic_s())
    await orders.follow()
    await until(lambda: told == [("d-rare", "d-often")])
    clock.advance(INTERVAL_S)
    await orders.follow()
    clock.advance(INTERVAL_S)
    asked(rare=200)
    await orders.follow()
    await orders.follow()
    await until(lambda: told[1:] == [("d-often", "d-rare")])
    clock.advance(REPEAT_S)
    await orders.follow()
    await until(lambda: told[2:] == [("d-often", "d-rare")])
