"""The audit log: what was done is in it, with the action or not at all; what was refused is, up to
a bound; no secret ever.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from sqlalchemy import URL, func, select

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.errors import NoRoom
from pilotlight.common.messages.demand import (
    EVICT_SUBJECT,
    WARM_SUBJECT,
    Evict,
    Evicting,
    Warm,
    Warming,
)
from pilotlight.common.testing import MakeContext, until
from pilotlight.gateway.admin.gate import WRITES, action_of
from pilotlight.gateway.admin.testing import (
    ADMIN_KEY,
    API_KEY,
    AdminWorld,
    admin_world,
    checkpoint_files,
    database_away,
    write_folder,
)
from pilotlight.gateway.records import audit as audit_module
from pilotlight.gateway.records.audit import (
    MAX_WAITING,
    RECORDED_PER_MINUTE,
    SYSTEM,
    AuditFilter,
    AuditLog,
)
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.policy.ids import InstanceId

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AdminWorld]:
    monkeypatch.setattr(audit_module, "FLUSH_INTERVAL_S", 0.01)
    async with admin_world(make_context("gateway", emptied_settings, clock=ManualClock())) as made:
        yield made


async def records(world: AdminWorld, **wanted: Any) -> list[dict[str, Any]]:
    answer = await world.http.get("/audit", params=wanted)
    assert answer.status_code == 200, answer.text
    return [one for one in answer.json()["audit"] if one["principal"] != SYSTEM.principal or wanted]


async def recorded(world: AdminWorld, count: int, **wanted: Any) -> list[dict[str, Any]]:
    """Wait until there are this many."""

    async def there() -> bool:
        return len(await records(world, **wanted)) >= count

    await until(there)
    return await records(world, **wanted)


async def test_what_is_done_is_recorded_with_what_changed(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    registered = await world.register(folder, "org/tiny", keep_alive_s=5)
    await world.http.patch("/models/org/tiny", json={"pinned": True})
    await world.http.delete(
        "/models/org/tiny", headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    )
    deleted, changed, added = await records(world)
    assert [one["action"] for one in (added, changed, deleted)] == [
        "model_register",
        "model_change",
        "model_delete",
    ]
    for one in (added, changed, deleted):
        assert (one["entity"], one["outcome"], one["principal"]) == ("org/tiny", "ok", "bootstrap")
        assert one["key_id"].startswith("key-")
        assert one["remote"] == "127.0.0.1"
    assert added["request_id"] == registered.headers["x-request-id"]
    assert added["changes"]["scaling"]["keep_alive_s"] == 5.0
    assert added["changes"]["uri"] == folder.as_uri()
    assert changed["changes"] == {"pinned": {"from": False, "to": True}}
    assert deleted["trace_id"] == "a" * 32


async def test_no_record_without_its_action_and_no_action_without_its_record(
    world: AdminWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> int:
        raise RuntimeError("the record cannot be written")

    folder = write_folder(world.models / "tiny", checkpoint_files())
    with monkeypatch.context() as patch:
        patch.setattr(audit_module, "_insert", broken)
        assert (await world.register(folder, "tiny")).status_code == 500
    assert (await world.http.get("/models")).json() == {"models": []}
    (refused,) = await recorded(world, 1)
    assert (refused["outcome"], refused["status"]) == ("internal", 500)
    assert (await world.register(folder, "tiny")).status_code == 201
    assert (await world.register(folder, "tiny")).status_code == 409
    found = await recorded(world, 3)
    assert [one["outcome"] for one in found] == ["already_exists", "ok", "internal"]
    assert found[0]["entity"] == "tiny"


@pytest.mark.parametrize(
    ("key", "method", "path", "status", "outcome", "principal"),
    [
        (None, "POST", "/models", 401, "invalid_api_key", "nobody"),
        ("wrong", "DELETE", "/models/m", 401, "invalid_api_key", "nobody"),
        (API_KEY, "POST", "/models/m/warm", 403, "forbidden", "nobody"),
        (ADMIN_KEY, "POST", "/models", 422, "unprocessable", "bootstrap"),
        (ADMIN_KEY, "DELETE", "/models/m", 404, "model_not_found", "bootstrap"),
        (ADMIN_KEY, "POST", "/nodes/n/drain", 404, "node_not_found", "bootstrap"),
        (ADMIN_KEY, "PUT", "/models/m", 405, "method_not_allowed", "bootstrap"),
    ],
)
async def test_refused_writes_are_recorded(
    world: AdminWorld,
    key: str | None,
    method: str,
    path: str,
    status: int,
    outcome: str,
    principal: str,
) -> None:
    headers = {"authorization": f"Bearer {key}" if key else ""}
    answer = await world.http.request(
        method, path, headers=headers, json={"name": "m", "uri": 3, "slo": None}
    )
    assert answer.status_code == status
    (one,) = await recorded(world, 1)
    assert (one["outcome"], one["status"], one["principal"]) == (outcome, status, principal)
    assert one["action"] == action_of(method, path)[0]
    assert one["entity"] in ("m", "n", "/models/m") or key != ADMIN_KEY
    assert one["request_id"] == answer.headers["x-request-id"]


async def test_reads_are_not_recorded(world: AdminWorld) -> None:
    for path in ("/models", "/nothing", "/models/none"):
        await world.http.get(path, headers={"authorization": ""})
        await world.http.get(path)
    await world.http.delete("/models/none")
    assert len(await recorded(world, 1)) == 1


async def test_no_secret_is_ever_recorded(world: AdminWorld, module_database: URL) -> None:
    secrets = (ADMIN_KEY, API_KEY, "pl-admin-guessed-key-0123456789")
    for key in secrets:
        await world.http.post(
            "/models",
            headers={"authorization": f"Bearer {key}"},
            json={"name": "m", "token": "s3cret"},
        )
    await recorded(world, 3)
    async with world.database.reading() as connection:
        rows = str((await connection.execute(select(tables.audit))).all())
    for secret in (*secrets, "s3cret", "pepper"):
        assert secret not in rows


async def test_a_flood_is_counted_and_not_written(world: AdminWorld) -> None:
    clock = world.context.clock
    assert isinstance(clock, ManualClock)
    for _ in range(RECORDED_PER_MINUTE + 40):
        await world.http.post("/models", headers={"authorization": ""})
    assert len(await recorded(world, RECORDED_PER_MINUTE)) == RECORDED_PER_MINUTE
    clock.advance(61)
    (summary,) = await recorded(world, 1, action="refusals_not_recorded")
    assert summary["changes"] == {"attempts": 40}
    assert (
        world.context.metrics.get_sample_value(
            "pilotlight_admin_refusals_total", {"code": "invalid_api_key"}
        )
        == 100
    )
    await world.http.post("/models", headers={"authorization": ""})
    assert len(await recorded(world, RECORDED_PER_MINUTE + 1)) == RECORDED_PER_MINUTE + 1


async def test_what_others_do_is_recorded_before_and_after(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    await world.register(folder, "tiny")
    seen: list[str] = []

    async def on_warm(_: Warm) -> Warming:
        seen.extend(one["outcome"] for one in await records(world, action="model_warm"))
        if len(seen) > 1:
            raise NoRoom
        return Warming(instance_id=InstanceId("i"))

    async def on_evict(_: Evict) -> Evicting:
        return Evicting(instance_ids=(InstanceId("i"), InstanceId("j")))

    subscriptions = [
        await world.context.bus.serve(WARM_SUBJECT, Warm, on_warm),
        await world.context.bus.serve(EVICT_SUBJECT, Evict, on_evict),
    ]
    assert (await world.http.post("/models/tiny/warm")).status_code == 202
    assert (await world.http.post("/models/tiny/evict")).status_code == 202
    assert seen == ["asked"]
    warmed, evicted = (
        await records(world, action="model_warm"),
        await records(world, action="model_evict"),
    )
    assert (warmed[0]["outcome"], warmed[0]["changes"]) == ("ok", {"instance_id": "i"})
    assert evicted[0]["changes"] == {"instance_ids": ["i", "j"]}
    assert (await world.http.post("/models/tiny/warm")).status_code == 429
    refused, asked, _ = await recorded(world, 3, action="model_warm")
    assert (asked["outcome"], refused["outcome"], refused["entity"]) == ("asked", "no_room", "tiny")
    assert asked["request_id"] == refused["request_id"]
    for subscription in subscriptions:
        await subscription.end()


async def test_what_is_refused_while_the_database_is_away_is_recorded_later(
    world: AdminWorld, module_database: URL
) -> None:
    await world.http.get("/models")  # the key is known from now on
    with database_away(module_database):
        assert (await world.http.delete("/models/m")).status_code == 503
    (one,) = await recorded(world, 1)
    assert (one["action"], one["outcome"]) == ("model_delete", "database_unavailable")


async def test_what_an_outage_leaves_no_room_for_is_counted(world: AdminWorld) -> None:
    clock = world.context.clock
    assert isinstance(clock, ManualClock)
    audit = AuditLog(world.database, clock, world.context.background, CollectorRegistry())
    for _ in range(4):
        for _ in range(RECORDED_PER_MINUTE):
            audit.refused(SYSTEM, "model_delete", "m", "forbidden", 403)
        clock.advance(61)
    await audit.stop()
    rows = await audit.page(AuditFilter(outcome="forbidden"), 1000)
    summed = await audit.page(AuditFilter(action="refusals_not_recorded"), 1000)
    assert len(rows) + len(summed) == MAX_WAITING
    assert len(rows) + sum(one["changes"]["attempts"] for one in summed) == 4 * RECORDED_PER_MINUTE


async def test_pages_and_filters(world: AdminWorld) -> None:
    for number in range(5):
        await world.http.delete(f"/models/m{number}")
    await recorded(world, 5)
    first = (await world.http.get("/audit", params={"limit": 2, "action": "model_delete"})).json()
    second = (
        await world.http.get(
            "/audit", params={"limit": 4, "action": "model_delete", "before": first["next_before"]}
        )
    ).json()
    assert [one["entity"] for one in (*first["audit"], *second["audit"])] == [
        "m4",
        "m3",
        "m2",
        "m1",
        "m0",
    ]
    assert second["next_before"] is None
    assert [one["entity"] for one in await records(world, entity="m3")] == ["m3"]
    assert await records(world, outcome="ok", entity="m3") == []
    at = first["audit"][0]["at"]
    assert await records(world, until=at, action="model_delete") == []
    assert len(await records(world, since=at, action="model_delete")) == 5
    for wrong in ("limit=0", "before=x", "action=%00", "since=yesterday"):
        answer = await world.http.get(f"/audit?{wrong}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unprocessable"), wrong


async def test_keys_that_come_and_go_are_recorded_once(world: AdminWorld) -> None:
    installed = await records(world, action="key_install")
    assert sorted(one["changes"]["role"] for one in installed) == ["admin", "inference"]
    await world.authenticator.start()
    assert len(await records(world, action="key_install")) == 2
    file = world.context.settings.admin_key_file
    assert file is not None
    await asyncio.to_thread(file.write_text, "pl-admin-another-key-for-tests")
    await world.authenticator.start()
    async with world.database.reading() as connection:
        table = tables.audit
        found = (
            await connection.execute(select(table.c.action, func.count()).group_by(table.c.action))
        ).all()
    assert {row[0]: row[1] for row in found} == {"key_install": 3, "key_revoke": 1}


async def test_every_write_has_a_name_in_the_log(world: AdminWorld) -> None:
    named: set[str] = set()
    for route in world.app.routes:
        if isinstance(route, APIRoute):
            path = route.path.replace("{name:path}", "org/name").replace("{node_id}", "n")
            named |= {action_of(method, path)[0] for method in WRITES & set(route.methods or ())}
    assert "unknown" not in named
    assert len(named) == 17
