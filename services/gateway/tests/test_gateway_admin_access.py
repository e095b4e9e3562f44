"""Who may use the admin API, and for how long: every route, keys from files, rotation, the cache of
keys.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import httpx2
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import URL, create_engine, func, select, text, update
from sqlalchemy.pool import NullPool
from starlette.routing import Route

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, Forbidden, SettingsInvalid, Unauthorized
from pilotlight.common.testing import MakeContext
from pilotlight.gateway.admin.gate import MAX_BODY_BYTES, OPEN_PATHS
from pilotlight.gateway.admin.testing import (
    ADMIN_KEY,
    API_KEY,
    AdminWorld,
    admin_world,
    database_away,
)
from pilotlight.gateway.auth import CACHE_S, IN_USE_S, MAX_KEY_CHARS, RENEW_S, Authenticator
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.tenants.keys import ApiKey, KeyRepository

pytestmark = pytest.mark.anyio

OTHER_KEY = "pl-admin-another-key-for-tests"


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings
) -> AsyncIterator[AdminWorld]:
    async with admin_world(make_context("gateway", emptied_settings)) as made:
        yield made


class Keys:
    """An authenticator whose time is set by hand."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.clock = ManualClock()
        self.settings = settings
        self.database = Database(settings, "gateway", self.clock)
        self.authenticator = self.fresh()

    def fresh(self) -> Authenticator:
        """As after a restart."""
        return Authenticator(self.database, self.settings, self.settings, self.clock)

    async def role_of(self, key: str) -> str:
        """What a key is good for."""
        for role in ("admin", "inference"):
            try:
                return (
                    await self.authenticator.require({"authorization": f"Bearer {key}"}, role)
                ).role
            except Forbidden:
                continue
            except Unauthorized:
                return "none"
        raise AssertionError


@pytest.fixture
async def keys(emptied_settings: GatewaySettings, anyio_backend: str) -> AsyncIterator[Keys]:
    made = Keys(emptied_settings)
    await made.authenticator.start()
    yield made
    await made.database.stop()


async def test_every_route_is_closed_unless_it_is_listed(world: AdminWorld) -> None:
    walked: set[str] = set()
    for route in world.app.routes:
        assert isinstance(route, Route | APIRoute), f"{route} would not be walked"
        walked.add(route.path)
        path = (
            route.path.replace("{name:path}", "org/name")
            .replace("{trace_id}", "0" * 32)
            .replace("{node_id}", "node-1")
        )
        path = path.replace("{verification_id}", "node-1.check")
        path = path.replace("{key_id}", "key-0123456789abcdef")
        path = path.replace("{instance_id}", "inst-1").replace("{decision_id}", "dec-1")
        assert "{" not in path, f"{path}: give this test a value"
        for method in sorted(route.methods or ()):
            for key, code in (
                (None, "invalid_api_key"),
                ("Bearer wrong", "invalid_api_key"),
                (f"Basic {ADMIN_KEY}", "invalid_api_key"),
                (f"Bearer {API_KEY}", "forbidden"),
            ):
                # A body that is no JSON: without a key it is not looked at.
                headers = {"content-type": "application/json", "authorization": key or ""}
                answer = await world.http.request(
                    method,
                    path,
                    headers=headers,
                    content=b"{" if method in ("POST", "PATCH") else b"",
                )
                if path in OPEN_PATHS:
                    assert answer.status_code == 200, path
                    continue
                assert answer.status_code == (403 if code == "forbidden" else 401), (
                    method,
                    path,
                    key,
                )
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == code
                    assert answer.json()["error"]["what_to_do"]
            answer = await world.http.request(method, path)
            assert answer.status_code not in (401, 403, 500), (method, path)
    assert walked >= OPEN_PATHS
    assert "/models" in walked


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/docs/oauth2-redirect",
        "/redoc",
        "/models/org/name/warm/",
        "/",
        "//models",
        "/docs/",
    ],
)
async def test_what_is_no_route_is_closed_too(world: AdminWorld, path: str) -> None:
    assert (await world.http.get(path, headers={"authorization": ""})).status_code == 401
    assert (await world.http.get(path)).status_code in (404, 422)


async def test_a_wrong_method_names_the_right_ones(world: AdminWorld) -> None:
    answer = await world.http.put("/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) <= {"GET", "HEAD", "POST"}


@pytest.mark.parametrize(
    "key",
    [
        "",
        "Bearer",
        "Bearer ",
        ADMIN_KEY,
        f"Bearer {ADMIN_KEY}x",
        f"Bearer {'x' * (MAX_KEY_CHARS + 1)}",
        "Bearer é",
    ],
)
async def test_what_is_no_key(world: AdminWorld, key: str) -> None:
    answer = await world.http.get("/models", headers={"authorization": key.encode("latin-1")})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


async def test_a_body_must_arrive_and_be_small(world: AdminWorld) -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b" " * 1024

    for content in (b" " * (MAX_BODY_BYTES + 1), pieces(MAX_BODY_BYTES // 1024 + 1)):
        answer = await world.http.post(
            "/models", content=content, headers={"content-type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    answer = await world.http.post(
        "/models", content=pieces(3), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400


async def test_the_page_of_the_api_has_a_button_for_the_key(world: AdminWorld) -> None:
    described = (await world.http.get("/openapi.json", headers={"authorization": ""})).json()
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert {"/models", "/models/{name}/warm"} <= set(described["paths"])


async def test_keys_are_stored_hashed(keys: Keys) -> None:
    async with keys.database.reading() as connection:
        rows = (await connection.execute(select(tables.api_keys))).mappings().all()
    assert {row["role"] for row in rows} == {"admin", "inference"}
    shown = str([dict(row) for row in rows])
    assert ADMIN_KEY not in shown
    assert API_KEY not in shown


async def test_replacing_a_file_revokes_the_old_key(keys: Keys, tmp_path: Path) -> None:
    assert await keys.role_of(ADMIN_KEY) == "admin"
    (tmp_path / "admin.key").write_text(OTHER_KEY + "\n")
    await keys.fresh().start()
    assert await keys.role_of(OTHER_KEY) == "admin"
    keys.clock.advance(CACHE_S)
    assert await keys.role_of(ADMIN_KEY) == "none"
    assert await keys.role_of(API_KEY) == "inference"
    (tmp_path / "admin.key").write_text(ADMIN_KEY)
    await keys.fresh().start()
    assert await keys.role_of(ADMIN_KEY) == "admin"
    keys.clock.advance(CACHE_S)
    assert await keys.role_of(OTHER_KEY) == "none"


async def test_two_keys_may_change_places(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text(API_KEY)
    (tmp_path / "api.key").write_text(ADMIN_KEY)
    await keys.fresh().start()
    assert (await keys.role_of(API_KEY), await keys.role_of(ADMIN_KEY)) == ("admin", "inference")


async def test_gateways_that_start_together_make_one_row_of_a_key(
    keys: Keys, tmp_path: Path
) -> None:
    (tmp_path / "admin.key").write_text(OTHER_KEY)
    await asyncio.gather(*(keys.fresh().start() for _ in range(4)))
    async with keys.database.reading() as connection:
        valid = (
            select(func.count())
            .select_from(tables.api_keys)
            .where(tables.api_keys.c.revoked_at.is_(None))
        )
        assert (await connection.execute(valid)).scalar_one() == 2
    assert await keys.role_of(OTHER_KEY) == "admin"


@pytest.mark.parametrize(
    "content", ["", "short", "x" * (MAX_KEY_CHARS + 1), b"\xff" * 30, None, API_KEY]
)
async def test_a_file_without_a_good_key_is_named(
    keys: Keys, tmp_path: Path, content: str | bytes | None
) -> None:
    file = tmp_path / "admin.key"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsInvalid, match=r"admin key"):
        await keys.fresh().start()
    assert await keys.role_of(ADMIN_KEY) == "admin"


async def _revoke(keys: Keys) -> None:
    async with keys.database.unit_of_work() as work:
        await work.connection.execute(update(tables.api_keys).values(revoked_at=func.now()))


async def test_a_revoked_key_stops_when_the_cache_forgets(keys: Keys) -> None:
    assert await keys.role_of(ADMIN_KEY) == "admin"
    await _revoke(keys)
    keys.clock.advance(CACHE_S - 0.001)
    assert await keys.role_of(ADMIN_KEY) == "admin"
    keys.clock.advance(0.001)
    assert await keys.role_of(ADMIN_KEY) == "none"


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each look in the database was for."""
    looks: list[int] = []
    by_hashes = KeyRepository.by_hashes

    async def counted(repository: KeyRepository, digests: Collection[str]) -> dict[str, ApiKey]:
        looks.append(len(digests))
        return await by_hashes(repository, digests)

    monkeypatch.setattr(KeyRepository, "by_hashes", counted)
    return looks


async def test_no_request_waits_for_a_key_that_is_in_use(keys: Keys, lookups: list[int]) -> None:
    """Both are looked up together, when they are old enough."""
    for key in (ADMIN_KEY, API_KEY):
        await keys.role_of(key)
    lookups.clear()
    keys.clock.advance(RENEW_S - 0.001)
    await keys.authenticator.renew()
    assert not lookups
    for _ in range(3):
        keys.clock.advance(RENEW_S)
        await keys.authenticator.renew()
    assert lookups == [2, 2, 2]
    keys.clock.advance(CACHE_S - 0.001)
    assert await keys.role_of(ADMIN_KEY) == "admin"
    assert lookups == [2, 2, 2]
    keys.clock.advance(IN_USE_S)
    await keys.authenticator.renew()
    assert lookups == [2, 2, 2], "nobody uses them any more"


async def test_a_look_ahead_finds_what_has_become_of_a_key(keys: Keys) -> None:
    assert await keys.role_of(ADMIN_KEY) == "admin"
    async with keys.database.unit_of_work() as work:
        await work.connection.execute(update(tables.api_keys).values(label="renamed"))
    keys.clock.advance(RENEW_S)
    await keys.authenticator.renew()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert (await keys.authenticator.require(headers, "admin")).label == "renamed"
    await _revoke(keys)
    keys.clock.advance(RENEW_S)
    await keys.authenticator.renew()
    assert await keys.role_of(ADMIN_KEY) == "none"


@pytest.mark.parametrize("late", [1, 100])
async def test_requests_of_one_moment_look_a_key_up_once(
    keys: Keys, lookups: list[int], late: int
) -> None:
    assert await keys.role_of(ADMIN_KEY) == "admin"
    lookups.clear()
    keys.clock.advance(CACHE_S * late)
    await _revoke(keys)
    found = await asyncio.gather(*(keys.role_of(ADMIN_KEY) for _ in range(8)))
    # What was read long ago is not taken for true meanwhile: they wait for the same look.
    assert (len(lookups), found.count("none")) == (1, 1 if late == 1 else 8)
    assert await keys.role_of(ADMIN_KEY) == "none"


async def test_a_valid_key_is_hashed_once_and_is_looked_up_all_the_same(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    hash_of = Authenticator.hash_of

    def counted(authenticator: Authenticator, presented: str) -> str:
        hashed.append(presented)
        return hash_of(authenticator, presented)

    monkeypatch.setattr(Authenticator, "hash_of", counted)
    for key in (ADMIN_KEY, "pl-admin-nobodys-key-of-forty-characters"):
        for _ in range(3):
            await keys.role_of(key)
    assert [hashed.count(ADMIN_KEY), len(hashed)] == [1, 4]
    await _revoke(keys)
    keys.clock.advance(CACHE_S)
    assert await keys.role_of(ADMIN_KEY) == "none"


async def test_known_keys_outlive_the_database(keys: Keys, module_database: URL) -> None:
    assert await keys.role_of(ADMIN_KEY) == "admin"
    keys.clock.advance(CACHE_S * 100)
    with database_away(module_database):
        await keys.authenticator.renew()
        for _ in range(3):
            assert await keys.role_of(ADMIN_KEY) == "admin"
            keys.clock.advance(CACHE_S)
        with pytest.raises(DatabaseUnavailable):
            await keys.role_of(API_KEY)
    await _revoke(keys)
    assert await keys.role_of(ADMIN_KEY) == "none"


@pytest.mark.slow
async def test_known_keys_do_not_wait_for_a_database_that_does_not_answer(
    keys: Keys, module_database: URL
) -> None:
    assert await keys.role_of(ADMIN_KEY) == "admin"
    keys.clock.advance(CACHE_S)
    engine = create_engine(module_database, poolclass=NullPool)
    with engine.begin() as blocking:
        blocking.execute(text("LOCK TABLE gateway.api_keys IN ACCESS EXCLUSIVE MODE"))
        # A statement that waits for the lock ends after ten seconds.
        async with asyncio.timeout(8):
            assert await keys.role_of(ADMIN_KEY) == "admin"
        async with asyncio.timeout(4):
            assert await keys.role_of(ADMIN_KEY) == "admin"
    engine.dispose()


async def test_without_a_pepper_there_is_no_gateway(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "key-pepper").unlink()
    with pytest.raises(SettingsInvalid, match="key-pepper"):
        keys.fresh()


async def test_an_unknown_key_while_the_database_is_away_is_a_503(
    world: AdminWorld, module_database: URL
) -> None:
    with database_away(module_database):
        answer: httpx2.Response = await world.http.get("/workers")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
