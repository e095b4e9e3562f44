"""Limits by the admin API, and how soon gateways follow what was said of a key."""

import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text

from pilotlight.common.db.outbox import Outbox
from pilotlight.common.errors import Unauthorized
from pilotlight.common.testing import MakeContext
from pilotlight.common.waiting import pause
from pilotlight.gateway import auth
from pilotlight.gateway.admin.testing import AdminWorld, admin_world, refused
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.tenants import following
from pilotlight.gateway.tenants.following import KeyFollower
from pilotlight.gateway.tenants.keys import KeyRepository
from pilotlight.policy.tenants import NO_LIMITS, TenantLimits

pytestmark = pytest.mark.anyio

WAIT_S = 30.0
LIMITS = {
    "requests_per_minute": 60,
    "tokens_per_minute": 1000,
    "concurrent_requests": None,
    "tokens_per_month": 10**9,
}


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AdminWorld]:
    """A gateway that remembers keys for longer than any test waits."""
    monkeypatch.setattr(auth, "CACHE_S", 10 * WAIT_S)
    async with admin_world(make_context("gateway", emptied_settings)) as made:
        async with made.database.unit_of_work() as work:
            for statement in (
                "DELETE FROM gateway.projects WHERE name <> 'default/default'",
                "DELETE FROM gateway.organizations WHERE name <> 'default'",
                "DELETE FROM gateway.usage",
            ):
                await work.connection.execute(text(statement))
        yield made


@asynccontextmanager
async def telling(world: AdminWorld) -> AsyncGenerator[None]:
    """Events leave."""
    outbox = Outbox(world.database, world.context)
    await outbox.start()
    yield
    await outbox.stop()


@asynccontextmanager
async def another_gateway(
    world: AdminWorld, emptied_settings: GatewaySettings
) -> AsyncGenerator[Authenticator]:
    """What another gateway of the installation knows of keys."""
    clock = world.context.clock
    other = Authenticator(world.database, emptied_settings, emptied_settings, clock)
    follower = KeyFollower(world.context, KeyRepository(world.database, clock), other)
    await follower.start()
    yield other
    await follower.stop()


async def make(world: AdminWorld, **body: Any) -> dict[str, Any]:
    """A new key."""
    answer = await world.http.post("/keys", json={"label": "one", **body})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def until_refused_s(world: AdminWorld, other: Authenticator) -> float:
    """Seconds from the answer to a revocation to another gateway's first refusal."""
    made = await make(world)
    headers = {"authorization": f"Bearer {made['key']}"}
    await other.require(headers, "inference")
    assert (await world.http.delete(f"/keys/{made['key_id']}")).status_code == 204
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < WAIT_S:
        try:
            await other.require(headers, "inference")
        except Unauthorized:
            return time.perf_counter() - began_s
        await pause(0.005)
    raise AssertionError("the key still works")


async def test_a_revoked_key_is_refused_elsewhere_within_a_second(
    world: AdminWorld, emptied_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LOOK_S", 10 * WAIT_S)
    async with telling(world), another_gateway(world, emptied_settings) as other:
        took_s = [await until_refused_s(world, other) for _ in range(5)]
    # The middle one: a busy machine may hold one of them up.
    assert statistics.median(took_s) < 1.0, took_s


async def test_and_also_where_no_event_tells_of_it(
    world: AdminWorld, emptied_settings: GatewaySettings
) -> None:
    async with another_gateway(world, emptied_settings) as other:
        took_s = [await until_refused_s(world, other) for _ in range(5)]
    assert statistics.median(took_s) < 1.0, took_s


async def test_limits_are_followed_elsewhere(
    world: AdminWorld, emptied_settings: GatewaySettings
) -> None:
    made = await make(world)
    headers = {"authorization": f"Bearer {made['key']}"}
    async with telling(world), another_gateway(world, emptied_settings) as other:
        assert (await other.require(headers, "inference")).tenant.key_limits == NO_LIMITS
        answer = await world.http.put(f"/keys/{made['key_id']}/limits", json=LIMITS)
        assert (answer.status_code, answer.json()["limits"]) == (200, LIMITS)
        answer = await world.http.put(
            "/projects/default/default/limits", json={"concurrent_requests": 7, "weight": 2.5}
        )
        assert (answer.status_code, answer.json()["weight"]) == (200, 2.5)
        began_s = time.perf_counter()
        tenant = (await other.require(headers, "inference")).tenant
        while tenant.weight != 2.5 or not tenant.key_limits.any:
            assert time.perf_counter() - began_s < WAIT_S
            await pause(0.01)
            tenant = (await other.require(headers, "inference")).tenant
    assert tenant.project == "default/default"
    assert tenant.key_limits == TenantLimits(**LIMITS)
    assert tenant.project_limits == TenantLimits(concurrent_requests=7)
    listed = (await world.http.get("/keys")).json()["keys"]
    assert listed[0]["limits"] == LIMITS
    project = (await world.http.get("/projects")).json()["projects"][0]
    assert project["limits"]["concurrent_requests"] == 7
    # Said anew, whole.
    answer = await world.http.put("/projects/default/default/limits", json={})
    assert answer.json()["limits"] == dict.fromkeys(LIMITS)
    assert answer.json()["weight"] == 1.0


async def test_a_rotated_key_keeps_its_limits(world: AdminWorld) -> None:
    old = await make(world)
    await world.http.put(f"/keys/{old['key_id']}/limits", json=LIMITS)
    new = (await world.http.post(f"/keys/{old['key_id']}/rotate", json={})).json()
    assert new["limits"] == LIMITS
    info = await world.authenticator.require({"authorization": f"Bearer {new['key']}"}, "inference")
    assert info.tenant.key_limits == TenantLimits(**LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        {"requests_per_minute": 0},
        {"requests_per_minute": 1.5},
        {"tokens_per_minute": -1},
        {"weight": 2},
        {"requests_per_hour": 1},
    ],
    ids=str,
)
async def test_what_is_no_limit_is_refused(world: AdminWorld, body: dict[str, Any]) -> None:
    made = await make(world)
    answer = await world.http.put(f"/keys/{made['key_id']}/limits", json=body)
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("weight", [0, 101, -1])
async def test_weights_are_bounded(world: AdminWorld, weight: float) -> None:
    answer = await world.http.put("/projects/default/default/limits", json={"weight": weight})
    assert answer.status_code == 422, answer.text


async def test_nobody_elses_limits_are_set(world: AdminWorld) -> None:
    admin = await make(world, role="admin")
    for path in (f"/keys/{admin['key_id']}/limits", "/keys/key-0123456789abcdef/limits"):
        refused(await world.http.put(path, json={}), 404, "not_found", "inference key")
    refused(
        await world.http.put("/projects/no/where/limits", json={}), 404, "not_found", "no/where"
    )


async def test_a_key_from_a_file_has_limits_too(world: AdminWorld) -> None:
    listed = (await world.http.get("/keys")).json()["keys"]
    own = next(one for one in listed if one["role"] == "inference")
    answer = await world.http.put(f"/keys/{own['key_id']}/limits", json=LIMITS)
    assert answer.json()["limits"] == LIMITS
