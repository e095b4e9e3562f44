"""Organizations, projects and keys by the admin API: from their making to their end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select, text

from pilotlight.common.db import tables
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.errors import Forbidden, Unauthorized
from pilotlight.common.testing import MakeContext, until
from pilotlight.gateway import auth
from pilotlight.gateway.admin.testing import AdminWorld, admin_world, refused
from pilotlight.gateway.auth import Authenticator, KeyInfo
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.tenants.following import KeyFollower
from pilotlight.gateway.tenants.keys import ApiKey, KeyRepository, Role

pytestmark = pytest.mark.anyio

WAIT_S = 30.0


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AdminWorld]:
    """A gateway that remembers keys for longer than any test waits, and tells of changes."""
    monkeypatch.setattr(auth, "CACHE_S", 10 * WAIT_S)
    async with admin_world(make_context("gateway", emptied_settings)) as made:
        async with made.database.unit_of_work() as work:
            await work.connection.execute(
                text("DELETE FROM gateway.projects WHERE name <> 'default/default'")
            )
            await work.connection.execute(
                text("DELETE FROM gateway.organizations WHERE name <> 'default'")
            )
        outbox = Outbox(made.database, made.context)
        await outbox.start()
        yield made
        await outbox.stop()


class Another(Authenticator):
    """Another gateway's, which says when it was told to forget."""

    told: asyncio.Event

    def forget(self, *, key_id: str | None = None, project: str | None = None) -> None:
        """As there."""
        super().forget(key_id=key_id, project=project)
        self.told.set()


@asynccontextmanager
async def another_gateway(
    world: AdminWorld, emptied_settings: GatewaySettings
) -> AsyncGenerator[tuple[Authenticator, asyncio.Event]]:
    """What another gateway of the installation knows of keys, and whether it was told anew."""
    clock = world.context.clock
    other = Another(world.database, emptied_settings, emptied_settings, clock)
    other.told = asyncio.Event()
    follower = KeyFollower(world.context, KeyRepository(world.database, clock), other)
    await follower.start()
    yield other, other.told
    await follower.stop()


async def make(world: AdminWorld, **body: Any) -> dict[str, Any]:
    """A new key."""
    answer = await world.http.post("/keys", json={"label": "one", **body})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def who(world: AdminWorld, key: str, role: Role = "inference") -> KeyInfo:
    """Whose request one with this key is."""
    return await world.authenticator.require({"authorization": f"Bearer {key}"}, role)


async def make_project(world: AdminWorld, name: str, **scope: Any) -> None:
    organization = name.partition("/")[0]
    assert (await world.http.post("/organizations", json={"name": organization})).status_code == 201
    assert (await world.http.post("/projects", json={"name": name, **scope})).status_code == 201


async def test_a_key_is_shown_once_and_stored_hashed(world: AdminWorld) -> None:
    made = await make(world)
    assert (await who(world, made["key"])).key_id == made["key_id"]
    listed = (await world.http.get("/keys")).json()["keys"]
    assert listed[0]["label"] == "one"
    async with world.database.reading() as connection:
        rows = (await connection.execute(select(tables.api_keys))).mappings().all()
        audited = (await connection.execute(select(tables.audit))).mappings().all()
    for shown in (listed, rows, audited):
        assert made["key"] not in str(shown)
    assert "hash" not in str(listed)


async def test_a_revoked_key_ends_on_every_gateway_by_an_event(
    world: AdminWorld, emptied_settings: GatewaySettings
) -> None:
    made = await make(world)
    headers = {"authorization": f"Bearer {made['key']}"}
    async with another_gateway(world, emptied_settings) as (other, told):
        await other.require(headers, "inference")
        assert (await world.http.delete(f"/keys/{made['key_id']}")).status_code == 204
        async with asyncio.timeout(WAIT_S):
            await told.wait()
        with pytest.raises(Unauthorized):
            await other.require(headers, "inference")
    refused(await world.http.delete(f"/keys/{made['key_id']}"), 404, "not_found", made["key_id"])
    assert made["key_id"] not in (await world.http.get("/keys")).text
    assert made["key_id"] in (await world.http.get("/keys?revoked=true")).text


async def test_a_rotated_key_hands_over(world: AdminWorld) -> None:
    old = await make(world, models=["fox"])
    answer = await world.http.post(f"/keys/{old['key_id']}/rotate", json={"overlap_s": 3600})
    new = answer.json()
    assert (answer.status_code, new["models"], new["label"]) == (201, ["fox"], "one")
    assert (await who(world, old["key"])).key_id == old["key_id"]
    assert (await who(world, new["key"])).key_id == new["key_id"]
    newest = (await world.http.post(f"/keys/{new['key_id']}/rotate", json={})).json()
    assert (await who(world, newest["key"])).key_id == newest["key_id"]
    with pytest.raises(Unauthorized):
        await world.authenticator.require_hashed(
            world.authenticator.hash_of(new["key"] + "x"), "inference"
        )
    shown = {one["key_id"]: one for one in (await world.http.get("/keys?revoked=1")).json()["keys"]}
    assert shown[old["key_id"]]["expires_at"] is not None
    assert shown[new["key_id"]]["revoked_at"] is not None


async def test_a_rotated_admin_key_says_what_it_is(world: AdminWorld) -> None:
    old = await make(world, role="admin", admin_role="operator")
    new = (await world.http.post(f"/keys/{old['key_id']}/rotate", json={})).json()
    assert new["key"].startswith("pl-admin-")
    assert (await who(world, new["key"], "admin")).admin_role == "operator"


async def test_an_expired_key_is_refused(world: AdminWorld) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    made = await make(world, expires_at=past.isoformat())
    with pytest.raises(Unauthorized, match="expired"):
        await who(world, made["key"])


async def test_a_key_stays_within_its_project(
    world: AdminWorld, emptied_settings: GatewaySettings
) -> None:
    await make_project(world, "acme/search", models=["acme/*"])
    made = await make(world, project="acme/search", models=["acme/a", "other"])
    access = (await who(world, made["key"])).access
    assert access.allows_model("acme/a")
    assert not access.allows_model("other")
    headers = {"authorization": f"Bearer {made['key']}"}
    async with another_gateway(world, emptied_settings) as (other, told):
        await other.require(headers, "inference")
        answer = await world.http.patch("/projects/acme/search", json={"models": ["other"]})
        assert (answer.status_code, answer.json()["models"]) == (200, ["other"])
        async with asyncio.timeout(WAIT_S):
            await told.wait()
        access = (await other.require(headers, "inference")).access
    assert access.allows_model("other")
    assert not access.allows_model("acme/a")


async def test_roles_of_admin_keys(world: AdminWorld) -> None:
    reach: dict[str, list[int]] = {}
    for role in ("viewer", "operator", "owner"):
        made = await make(world, role="admin", admin_role=role)
        headers = {"authorization": f"Bearer {made['key']}"}
        reach[role] = [
            (await world.http.get("/keys", headers=headers)).status_code,
            (await world.http.delete("/models/none", headers=headers)).status_code,
            (
                await world.http.post("/organizations", json={"name": role}, headers=headers)
            ).status_code,
            (await world.http.post("/keys", json={"label": "x"}, headers=headers)).status_code,
        ]
        with pytest.raises(Forbidden):
            await who(world, made["key"])
    assert reach == {
        "viewer": [200, 403, 403, 403],
        "operator": [200, 404, 403, 403],
        "owner": [200, 404, 201, 201],
    }
    assert (await make(world, role="admin"))["admin_role"] == "viewer"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/keys", {"label": "a", "project": "no/where"}, 404, "not_found"),
        ("/keys", {"label": "bootstrap"}, 422, "unprocessable"),
        ("/keys", {"label": "a", "role": "admin", "models": ["x"]}, 422, "unprocessable"),
        ("/keys", {"label": "a", "admin_role": "owner"}, 422, "unprocessable"),
        ("/keys", {"label": "a", "models": ["a*b"]}, 422, "unprocessable"),
        ("/keys", {"label": "a", "expires_at": "2027-01-01T00:00:00"}, 422, "unprocessable"),
        ("/keys", {"label": "a", "wrong": 1}, 422, "unprocessable"),
        ("/organizations", {"name": "default"}, 409, "already_exists"),
        ("/projects", {"name": "no/where"}, 404, "not_found"),
        ("/projects", {"name": "default/default"}, 409, "already_exists"),
        ("/projects", {"name": "default"}, 422, "unprocessable"),
    ],
)
async def test_what_cannot_be_made(
    world: AdminWorld, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    refused(await world.http.post(path, json=body), status, code)


async def test_keys_from_files_are_left_to_the_files(world: AdminWorld) -> None:
    listed = (await world.http.get("/keys")).json()["keys"]
    assert {one["project"] for one in listed} == {"default/default"}
    for one in listed:
        refused(await world.http.delete(f"/keys/{one['key_id']}"), 409, "conflict", "file")
        answer = await world.http.post(f"/keys/{one['key_id']}/rotate", json={})
        refused(answer, 409, "conflict", "file")


async def test_gateways_install_the_keys_from_files_one_after_the_other(world: AdminWorld) -> None:
    keys = KeyRepository(world.database, world.context.clock)
    digest = "5" * 64
    key = ApiKey(key_id="key-5", prefix="pl-admin-5", hash=digest, role="admin", label="installed")
    waits = text(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )

    async def waiting() -> int:
        async with world.database.reading() as connection:
            return (await connection.execute(waits)).scalar_one()

    async with world.database.unit_of_work() as work:
        # Another gateway's, which has not looked for the row yet.
        await work.connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtext(:table))"),
            {"table": tables.api_keys.fullname},
        )
        both = [asyncio.create_task(keys.ensure_bootstrap(key)) for _ in range(2)]

        async def both_wait() -> bool:
            return await waiting() == len(both)

        await until(both_wait)
    await asyncio.gather(*both)
    listed = (await world.http.get("/keys")).json()["keys"]
    assert [one["label"] for one in listed].count("installed") == 1
    async with world.database.reading() as connection:
        installed = select(tables.audit).where(tables.audit.c.entity == key.key_id)
        assert len((await connection.execute(installed)).all()) == 1


async def test_the_last_use_of_a_key_is_noted(world: AdminWorld) -> None:
    keys = KeyRepository(world.database, world.context.clock)
    follower = KeyFollower(world.context, keys, world.authenticator)
    made = await make(world)
    await who(world, made["key"])
    await follower.note()
    listed = {one["key_id"]: one for one in (await world.http.get("/keys")).json()["keys"]}
    assert listed[made["key_id"]]["last_used_at"] is not None


async def test_usage_is_added_up_by_day_key_and_model(world: AdminWorld) -> None:
    await make_project(world, "acme/search")
    made = await make(world, project="acme/search")
    days = (datetime(2026, 1, 30, 23, 59, tzinfo=UTC), datetime(2026, 1, 31, 0, 1, tzinfo=UTC))
    rows = [
        {
            "at": at,
            "model": model,
            "key_id": key_id,
            "request_id": f"req-{number}",
            "prompt_tokens": 10,
            "output_tokens": number,
            "status": "ok" if number else "queue_full",
        }
        for number, (at, model, key_id) in enumerate(
            [
                (days[0], "fox", made["key_id"]),
                (days[0], "fox", made["key_id"]),
                (days[1], "fox", made["key_id"]),
                (days[1], "owl", "ollama"),
            ]
        )
    ]
    async with world.database.unit_of_work() as work:
        await work.connection.execute(insert(tables.usage), rows)
    since = {"since": "2026-01-01T00:00:00Z"}
    found = (await world.http.get("/usage", params=since)).json()["usage"]
    assert [
        (one["day"], one["model"], one["requests"], one["failed"], one["output_tokens"])
        for one in found
    ] == [
        ("2026-01-30", "fox", 2, 1, 1),
        ("2026-01-31", "fox", 1, 0, 2),
        ("2026-01-31", "owl", 1, 0, 3),
    ]
    assert [one["project"] for one in found] == ["acme/search", "acme/search", ""]
    of_project = {**since, "project": "acme/search", "format": "csv"}
    csv = await world.http.get("/usage", params=of_project)
    assert csv.headers["content-type"].startswith("text/csv")
    lines = csv.text.splitlines()
    assert lines[0].startswith("day,project,key_id,label,model,requests")
    assert len(lines) == 3
    last = {**since, "until": "2026-01-31T00:00:00Z"}
    assert len((await world.http.get("/usage", params=last)).json()["usage"]) == 1
    assert (await world.http.get("/usage")).json() == {"usage": []}
