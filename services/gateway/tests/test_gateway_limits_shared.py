"""Three gateways that share limits: how far they are off, with the others' news on its way, lost,
and absent.
"""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import RateLimited
from pilotlight.common.messages.limits import LimitTotal
from pilotlight.common.testing import MakeContext, until
from pilotlight.gateway.edge.client_headers import noted_headers
from pilotlight.gateway.limits.exchange import TELL_S, LimitExchange
from pilotlight.gateway.limits.limiter import Admission, Limiter
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.testing import KnownBudgets
from pilotlight.policy.ids import GatewayId
from pilotlight.policy.tenants import Tenant, TenantLimits

pytestmark = pytest.mark.anyio

STEP_S = 0.01
WAY_S = 0.02
"""Of a message: ten times what it takes."""
KEY = "key-1"


@dataclass
class Gateways:
    """Some, on one clock, with news that takes its time."""

    limits: TenantLimits
    count: int = 3
    lost: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    clock: ManualClock = field(default_factory=ManualClock)
    connected: bool = True

    def __post_init__(self) -> None:
        self.tenant = Tenant(project="acme/one", key_limits=self.limits)
        self.limiters = [
            Limiter(self.clock, KnownBudgets(), GatewayId(f"gw-{n}")) for n in range(self.count)
        ]
        self.admitted = [0] * self.count
        self.refused = [0] * self.count
        self._news: list[tuple[float, int, int, tuple[LimitTotal, ...]]] = []
        self._seq = 0
        self._told_s = self._looked_s = -1.0
        self.step()

    def step(self) -> None:
        """One step of the clock; what is due is told and heard."""
        self.clock.advance(STEP_S)
        now_s = self.clock.monotonic_s()
        if self.connected and now_s - self._told_s >= TELL_S - 1e-9:
            self._told_s = now_s
            self._seq += 1
            for teller, limiter in enumerate(self.limiters):
                self._news.append((now_s + WAY_S, teller, self._seq, limiter.tell()))
        due = [one for one in self._news if one[0] <= now_s + 1e-9]
        self._news = [one for one in self._news if one[0] > now_s + 1e-9]
        for _, teller, seq, totals in due:
            for heard, limiter in enumerate(self.limiters):
                if heard != teller and self.rng.random() >= self.lost:
                    limiter.hear(GatewayId(f"gw-{teller}"), seq, totals)
        if now_s - self._looked_s >= 1.0:
            self._looked_s = now_s
            for limiter in self.limiters:
                limiter.look(connected=self.connected)

    def settle(self) -> None:
        """All know that all are there."""
        for _ in range(300):
            self.step()

    async def ask(self, gateway: int, tokens: int = 1) -> Admission | None:
        """One request; None: it is refused."""
        scope: dict[str, Any] = {"state": {}}
        try:
            admission = await self.limiters[gateway].admit(KEY, self.tenant, tokens, scope)
        except RateLimited:
            self.refused[gateway] += 1
            return None
        self.admitted[gateway] += 1
        return admission

    async def load(
        self, per_s: Sequence[float], seconds: float, tokens: int = 1, used: float = 1.0
    ) -> int:
        """Random arrivals at each gateway; how many were let in."""
        before = sum(self.admitted)
        for _ in range(int(seconds / STEP_S)):
            self.step()
            for gateway, rate in enumerate(per_s):
                expected = rate * STEP_S
                arrivals = int(expected) + (self.rng.random() < expected % 1)
                for _ in range(arrivals):
                    if (admission := await self.ask(gateway, tokens)) is not None:
                        admission.end(round(tokens * used))
        return sum(self.admitted) - before


@pytest.mark.parametrize(
    ("per_s", "lost"),
    [
        ((20, 20, 20), 0.0),
        ((60, 0, 0), 0.0),
        ((55, 5, 0), 0.0),
        ((20, 20, 20), 0.2),
        ((200, 200, 200), 0.0),
    ],
    ids=["even", "one gateway", "uneven", "a fifth of the news is lost", "twenty times the limit"],
)
async def test_three_gateways_let_in_what_one_would(per_s: Sequence[float], lost: float) -> None:
    """Offered at least three times the limit for three minutes."""
    limit, minutes = 600, 3
    gateways = Gateways(TenantLimits(requests_per_minute=limit), lost=lost)
    gateways.settle()
    let_in = await gateways.load(per_s, 60 * minutes)
    allowed = limit * (minutes + 1)  # a minute's worth at once, and then the rate
    assert 0.97 * allowed <= let_in <= 1.03 * allowed, let_in / allowed


async def test_tokens_are_shared_as_requests_are() -> None:
    gateways = Gateways(TenantLimits(tokens_per_minute=60_000))
    gateways.settle()
    let_in = await gateways.load((10, 10, 10), 180, tokens=200, used=0.5)
    used = let_in * 100
    assert 0.95 * 240_000 <= used <= 1.03 * 240_000, used / 240_000


async def test_a_flood_in_one_moment_is_a_little_beyond_the_limit_at_most() -> None:
    gateways = Gateways(TenantLimits(requests_per_minute=100))
    gateways.settle()
    for _ in range(500):
        for gateway in range(3):
            await gateways.ask(gateway)
    assert 95 <= sum(gateways.admitted) <= 107
    await gateways.load((100, 100, 100), 60)
    assert sum(gateways.admitted) <= 1.04 * 200


async def test_a_small_limit_is_off_by_one_request_for_each_other_gateway_at_most() -> None:
    gateways = Gateways(TenantLimits(requests_per_minute=3))
    gateways.settle()
    for _ in range(20):
        for gateway in range(3):
            await gateways.ask(gateway)
    assert 3 <= sum(gateways.admitted) <= 5
    # What was too much is paid back.
    await gateways.load((5, 5, 5), 300)
    assert 3 * 6 - 2 <= sum(gateways.admitted) <= 3 * 6 + 2


async def test_without_a_bus_each_goes_on_with_its_share() -> None:
    gateways = Gateways(TenantLimits(requests_per_minute=600))
    gateways.settle()
    gateways.connected = False
    gateways.settle()
    let_in = await gateways.load((20, 20, 20), 180)
    assert 0.97 * 2400 <= let_in <= 1.03 * 2400
    alone = Gateways(TenantLimits(requests_per_minute=600))
    alone.settle()
    alone.connected = False
    alone.settle()
    let_in = await alone.load((60, 0, 0), 180)
    assert 0.97 * 800 <= let_in <= 1.03 * 800
    # The bus is back: within a few seconds the one that is asked has all of it.
    alone.connected = True
    alone.settle()
    before = sum(alone.admitted)
    await alone.load((60, 0, 0), 180)
    assert 0.97 * 1800 <= sum(alone.admitted) - before <= 1.05 * 2400


async def test_one_that_died_leaves_its_share_and_its_places() -> None:
    gateways = Gateways(TenantLimits(concurrent_requests=9))
    gateways.settle()
    for _ in range(4):
        assert await gateways.ask(0) is not None
        gateways.settle()
    got = 0
    for _ in range(20):
        got += await gateways.ask(1) is not None
        for _ in range(20):
            gateways.step()
    assert got == 5
    gateways.limiters[0] = Limiter(gateways.clock, KnownBudgets(), GatewayId("gw-0"))
    gateways.limiters[0].tell = lambda: ()  # it says nothing any more
    heard = gateways.limiters[1].peers
    for _ in range(500):
        gateways._news = [one for one in gateways._news if one[1] != 0]
        gateways.step()
    assert heard.running(f"key/{KEY}") == 0
    assert await gateways.ask(1) is not None


async def test_one_that_was_slow_is_not_charged_twice() -> None:
    gateways = Gateways(TenantLimits(requests_per_minute=6000))
    gateways.settle()
    await gateways.load((50, 1, 1), 60)
    for _ in range(500):
        gateways._news = [one for one in gateways._news if one[1] != 0]
        gateways.step()
    assert len(gateways.limiters[1].peers) == 1
    gateways.settle()
    assert len(gateways.limiters[1].peers) == 2
    # Of 60 seconds' requests all but a few are paid back.
    account = gateways.limiters[1]._accounts[f"key/{KEY}"]
    assert account.requests.owed(gateways.clock.monotonic_s()) < 100


async def test_one_that_starts_hears_what_is_owed() -> None:
    gateways = Gateways(TenantLimits(requests_per_minute=60), count=2)
    gateways.settle()
    await gateways.load((10, 10), 60)
    gateways.limiters.append(Limiter(gateways.clock, KnownBudgets(), GatewayId("gw-2")))
    gateways.admitted.append(0)
    gateways.refused.append(0)
    gateways.settle()
    await gateways.load((10, 10, 10), 1)
    assert gateways.admitted[2] <= 5


@pytest.fixture
async def exchanging(make_context: MakeContext, tmp_path: Path) -> AsyncIterator[list[Limiter]]:
    """Three gateways' limiters on a real bus."""
    limiters: list[Limiter] = []
    exchanges: list[LimitExchange] = []
    for number in range(3):
        context = make_context("gateway", GatewaySettings(run_dir=tmp_path))
        gateway_id = GatewayId(f"gw-{number}")
        limiter = Limiter(context.clock, KnownBudgets(), gateway_id)
        exchange = LimitExchange(
            context.bus, context.clock, context.background, limiter, gateway_id
        )
        await exchange.start()
        limiters.append(limiter)
        exchanges.append(exchange)
    yield limiters
    for exchange in exchanges:
        await exchange.stop()


async def test_totals_go_over_the_bus(exchanging: list[Limiter]) -> None:
    await until(lambda: all(len(limiter.peers) == 2 for limiter in exchanging))
    for limiter in exchanging:
        limiter.look(connected=True)
    tenant = Tenant(project="acme/one", key_limits=TenantLimits(requests_per_minute=5))
    admission = await exchanging[0].admit(KEY, tenant, 1, {"state": {}})
    await until(lambda: exchanging[2].peers.running(f"key/{KEY}") == 1)
    scope: dict[str, Any] = {"state": {}}
    await exchanging[2].admit(KEY, tenant, 1, scope)
    told = dict(noted_headers(scope))
    assert told[b"x-ratelimit-remaining-requests"] == b"3"
    admission.end(1)
    await until(lambda: exchanging[2].peers.running(f"key/{KEY}") == 0)
