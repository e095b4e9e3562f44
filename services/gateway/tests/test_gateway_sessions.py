"""Sessions: what a cookie proves, for how long, and what it does not let other sites do."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, update

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.errors import Forbidden, Unauthorized
from pilotlight.common.testing import MakeContext
from pilotlight.gateway.admin.testing import (
    ADMIN_KEY,
    API_KEY,
    AdminWorld,
    admin_world,
)
from pilotlight.gateway.auth import CACHE_S
from pilotlight.gateway.sessions import COOKIE, CSRF_HEADER, SESSION_S, Sessions, cookie_of
from pilotlight.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings, clock: ManualClock
) -> AsyncIterator[AdminWorld]:
    async with admin_world(make_context("gateway", emptied_settings, clock=clock)) as made:
        yield made


def with_cookie(cookie: str, **more: str) -> dict[str, str]:
    return {"cookie": f"theme=dark; {COOKIE}={cookie}", "authorization": "", **more}


async def test_an_admin_key_begins_a_session_and_no_other_does(world: AdminWorld) -> None:
    sessions = world.parts.sessions
    found = await sessions.find(with_cookie(await sessions.begin(f" {ADMIN_KEY}\n")))
    assert (found.key.role, found.key.label) == ("admin", "bootstrap")
    with pytest.raises(Forbidden):
        await sessions.begin(API_KEY)
    for wrong in ("", "x", ADMIN_KEY + "x", "x" * 1000):
        with pytest.raises(Unauthorized):
            await sessions.begin(wrong)


async def test_no_part_of_a_session_can_be_changed(world: AdminWorld, clock: ManualClock) -> None:
    sessions = world.parts.sessions
    cookie = await sessions.begin(ADMIN_KEY)
    digest, ends, nonce, signature = cookie.split(".")
    other = "0" * len(digest)
    for forged in (
        "",
        "...",
        f"{digest}.{ends}.{nonce}.",
        f"{other}.{ends}.{nonce}.{signature}",
        f"{digest}.{int(ends) + 1}.{nonce}.{signature}",
        f"{digest}.{ends}.{nonce}0.{signature}",
        f"{digest}.{ends}.{nonce}.{signature[:-1]}",
        cookie + "x",
    ):
        with pytest.raises(Unauthorized):
            await sessions.find(with_cookie(forged))
    await sessions.find(with_cookie(cookie))
    clock.advance(SESSION_S)
    with pytest.raises(Unauthorized, match="over"):
        await sessions.find(with_cookie(cookie))


async def test_a_session_is_good_at_every_gateway_of_the_installation(world: AdminWorld) -> None:
    cookie = await world.parts.sessions.begin(ADMIN_KEY)
    other = Sessions(world.authenticator, world.context.clock)
    assert await other.find(with_cookie(cookie)) == await world.parts.sessions.find(
        with_cookie(cookie)
    )


async def test_a_session_ends_with_its_key(world: AdminWorld, clock: ManualClock) -> None:
    cookie = await world.parts.sessions.begin(ADMIN_KEY)
    async with world.database.unit_of_work() as work:
        await work.connection.execute(update(tables.api_keys).values(revoked_at=func.now()))
    clock.advance(CACHE_S)
    with pytest.raises(Unauthorized):
        await world.parts.sessions.find(with_cookie(cookie))


async def test_the_admin_api_takes_a_session_and_changes_only_with_its_token(
    world: AdminWorld,
) -> None:
    sessions = world.parts.sessions
    cookie, another = await sessions.begin(ADMIN_KEY), await sessions.begin(ADMIN_KEY)
    token = (await sessions.find(with_cookie(cookie))).csrf_token
    foreign = (await sessions.find(with_cookie(another))).csrf_token
    assert token != foreign
    assert (await world.http.get("/models", headers=with_cookie(cookie))).status_code == 200
    for wrong in ({}, {CSRF_HEADER: ""}, {CSRF_HEADER: foreign}, {CSRF_HEADER: token + "0"}):
        answer = await world.http.post("/models", headers=with_cookie(cookie, **wrong), json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    passed = await world.http.post(
        "/models", headers=with_cookie(cookie, **{CSRF_HEADER: token}), json={}
    )
    assert passed.json()["error"]["code"] == "unprocessable"
    forged = await world.http.get("/models", headers=with_cookie(cookie[:-1]))
    assert forged.status_code == 401
    # A key that was sent counts, whatever the cookie says.
    wrong_key = {**with_cookie(cookie), "authorization": f"Bearer {API_KEY}"}
    assert (await world.http.get("/models", headers=wrong_key)).status_code == 403


@given(st.text(max_size=200))
def test_any_header_of_cookies_can_be_read(text: str) -> None:
    assert isinstance(cookie_of({"cookie": text}), str)
    assert cookie_of({"cookie": f"a=b; {COOKIE}=found"}) == "found"
