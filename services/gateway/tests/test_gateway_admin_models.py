"""Models over the admin API: registered, listed, changed, warmed, evicted, deleted."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import URL, select

from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json
from pilotlight.common.errors import DeadlineExceeded, ModelNotFound
from pilotlight.common.messages.demand import (
    EVICT_SUBJECT,
    WARM_SUBJECT,
    Evict,
    Evicting,
    Warm,
    Warming,
)
from pilotlight.common.store import manifest_key, text_key
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.gateway.admin.testing import (
    AdminWorld,
    admin_world,
    checkpoint_files,
    database_away,
    emptied,
    settings_in,
    write_folder,
)
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model
from pilotlight.text.bundle import TextBundle
from pilotlight.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.anyio
EMBER = Path(__file__).parents[3] / "models" / "ember-7m"


@pytest.fixture
def world(fresh_admin: AdminWorld) -> AdminWorld:
    return fresh_admin


async def test_a_good_folder_is_registered_and_can_be_served_at_once(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    answer = await world.register(folder, "org/tiny", keep_alive_s=5, max_instances=3, pinned=True)
    assert answer.status_code == 201
    body = answer.json()
    assert body["name"] == "org/tiny"
    assert body["uri"] == folder.as_uri()
    assert body["slo"] == {"ttft_ms": 1000.0, "tpot_ms": 50.5, "attainment": 0.99}
    assert body["scaling"] == {"min_instances": 0, "max_instances": 3, "keep_alive_s": 5.0}
    assert body["pinned"] is True
    assert body["dtype"] == "bfloat16"
    assert body["spec"]["architecture"] == "LlamaForCausalLM"
    assert body["created_at"] == body["updated_at"]
    for key in (manifest_key(body["digest"]), text_key(body["text_digest"])):
        assert await world.context.store.exists(key)
    assert (await world.http.get("/models/org/tiny")).json() == body
    assert (await world.http.get("/models")).json() == {"models": [body]}
    entry = world.catalog.get("org/tiny")
    assert entry is not None
    tokenizer = TextTokenizer(TextBundle(tokenizer_json=(folder / "tokenizer.json").read_text()))
    assert (
        entry.text.tokenizer.decode(tokenizer.encode("hello world", add_special_tokens=False))
        == "hello world"
    )
    async with world.database.reading() as connection:
        (event,) = (await connection.execute(select(tables.outboxes["gateway"]))).all()
        row = (await connection.execute(select(tables.models.c.body))).scalar_one()
    assert "engine" not in body, "no client chooses it yet"
    assert row.pop("engine") == "native"
    assert from_row_json(row, Model) == entry.model, "a row of an earlier release"
    assert (event.kind, event.entity, event.data) == (
        "model_registered",
        "org/tiny",
        {"digest": body["digest"]},
    )


@pytest.mark.slow
async def test_the_demo_model_is_registered(
    make_context: MakeContext,
    database_settings: DatabaseSettingsOf,
    module_database: URL,
    tmp_path: Path,
) -> None:
    emptied(module_database)
    settings = settings_in(tmp_path, database_settings("gateway").database_url)
    settings = settings.model_copy(update={"model_roots": str(EMBER)})
    async with admin_world(make_context("gateway", settings)) as world:
        answer = await world.register(EMBER, "ember-7m")
        assert (answer.status_code, answer.json()["name"]) == (201, "ember-7m")


async def test_two_names_share_one_text(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    for name in ("one", "two"):
        assert (await world.register(folder, name)).status_code == 201
    one, two = world.catalog.get("one"), world.catalog.get("two")
    assert one is not None
    assert two is not None
    assert one.text is two.text


async def test_a_name_is_taken_once(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    answers = await asyncio.gather(*(world.register(folder) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409]
    refusal = next(answer for answer in answers if answer.status_code == 409).json()["error"]
    assert (refusal["code"], refusal["param"]) == ("already_exists", "name")
    assert "tiny" in refusal["message"]
    assert "another name" in refusal["what_to_do"]


async def test_changes_are_kept_and_what_is_left_out_stays(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    before = (await world.register(folder, "org/tiny")).json()
    answer = await world.http.patch(
        "/models/org/tiny", json={"pinned": True, "max_instances": 4, "keep_alive_s": 7}
    )
    assert answer.status_code == 200
    after = answer.json()
    assert after["pinned"] is True
    assert after["scaling"] == {"min_instances": 0, "max_instances": 4, "keep_alive_s": 7.0}
    assert after["slo"] == before["slo"]
    assert after["created_at"] == before["created_at"]
    assert after["updated_at"] > before["updated_at"]
    assert (await world.http.get("/models/org/tiny")).json() == after
    answer = await world.http.patch(
        "/models/org/tiny", json={"slo": {"ttft_ms": 5, "tpot_ms": 6, "attainment": 0.5}}
    )
    assert answer.json()["slo"] == {"ttft_ms": 5.0, "tpot_ms": 6.0, "attainment": 0.5}
    entry = world.catalog.get("org/tiny")
    assert entry is not None
    assert entry.model.slo.ttft_ms == 5.0


async def test_changes_at_the_same_moment_are_all_kept(world: AdminWorld) -> None:
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    changes: list[dict[str, object]] = [
        {"pinned": True},
        {"max_instances": 9},
        {"keep_alive_s": 3},
        {"min_instances": 1},
    ]
    answers = await asyncio.gather(
        *(world.http.patch("/models/tiny", json=change) for change in changes)
    )
    assert {answer.status_code for answer in answers} == {200}
    model = (await world.http.get("/models/tiny")).json()
    assert model["pinned"] is True
    assert model["scaling"] == {"min_instances": 1, "max_instances": 9, "keep_alive_s": 3.0}


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"min_instances": 5}, 422, "max_instances"),
        ({"slo": {"ttft_ms": 0, "tpot_ms": 1}}, 422, "slo.ttft_ms"),
        ({"slo": {"tpot_ms": -1}}, 422, "slo.tpot_ms"),
        ({"name": "other"}, 422, "name"),
        ({"uri": "file:///x"}, 422, "uri"),
        ({"pinned": "yes"}, 422, "pinned"),
        ({"keep_alive_s": "60"}, 422, "keep_alive_s"),
        ([], 422, "body"),
    ],
)
async def test_bad_changes_change_nothing(
    world: AdminWorld, change: object, status: int, word: str
) -> None:
    before = (await world.register(write_folder(world.models / "tiny", checkpoint_files()))).json()
    answer = await world.http.patch("/models/tiny", json=change)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]
    assert (await world.http.get("/models/tiny")).json() == before


async def test_a_deleted_model_is_gone(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    await world.register(folder, "org/tiny")
    answer = await world.http.delete("/models/org/tiny")
    assert (answer.status_code, answer.content) == (204, b"")
    assert world.catalog.get("org/tiny") is None
    for method, path in (
        ("GET", "/models/org/tiny"),
        ("DELETE", "/models/org/tiny"),
        ("PATCH", "/models/org/tiny"),
        ("POST", "/models/org/tiny/warm"),
        ("POST", "/models/org/tiny/evict"),
    ):
        answer = await world.http.request(method, path, json={} if method == "PATCH" else None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), (
            method,
            path,
        )
    assert (await world.register(folder, "org/tiny")).status_code == 201


async def test_warm_and_evict_ask_the_scheduler(world: AdminWorld) -> None:
    asked: list[object] = []

    async def warm(message: Warm) -> Warming:
        asked.append(message.model)
        return Warming(instance_id=InstanceId("inst-1"))

    async def evict(message: Evict) -> Evicting:
        asked.append(message.model)
        return Evicting(instance_ids=(InstanceId("inst-1"), InstanceId("inst-2")))

    # A name that ends like an action must not be taken for one.
    await world.register(write_folder(world.models / "tiny", checkpoint_files()), "org/warm")
    serving = [
        await world.context.bus.serve(WARM_SUBJECT, Warm, warm),
        await world.context.bus.serve(EVICT_SUBJECT, Evict, evict),
    ]
    answer = await world.http.post("/models/org/warm/warm")
    assert (answer.status_code, answer.json()) == (202, {"instance_id": "inst-1"})
    answer = await world.http.post("/models/org/warm/evict")
    assert (answer.status_code, answer.json()) == (202, {"instance_ids": ["inst-1", "inst-2"]})
    assert asked == ["org/warm", "org/warm"]
    assert (await world.http.get("/models/org/warm")).status_code == 200
    for subscription in serving:
        await subscription.end()


@pytest.mark.parametrize("action", ["warm", "evict"])
async def test_without_a_scheduler_it_is_said_at_once(world: AdminWorld, action: str) -> None:
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    async with asyncio.timeout(5):
        answer = await world.http.post(f"/models/tiny/{action}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        503,
        "control_plane_unavailable",
    )
    assert "pilotlight logs scheduler" in answer.json()["error"]["what_to_do"]


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (DeadlineExceeded("too late"), 503, "control_plane_unavailable"),
        (ModelNotFound("no such model"), 404, "model_not_found"),
    ],
)
async def test_what_the_scheduler_refuses_reaches_the_client(
    world: AdminWorld, refusal: Exception, status: int, code: str
) -> None:
    async def warm(_: Warm) -> Warming:
        raise refusal

    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    serving = await world.context.bus.serve(WARM_SUBJECT, Warm, warm)
    answer = await world.http.post("/models/tiny/warm")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    await serving.end()


async def test_a_database_that_is_away_is_a_503_and_warm_models_stay(
    world: AdminWorld, module_database: URL
) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    await world.register(folder)
    with database_away(module_database):
        for method, path, body in (
            ("GET", "/models", None),
            ("GET", "/models/tiny", None),
            ("POST", "/models", world.body(folder, "second")),
            ("PATCH", "/models/tiny", {"pinned": True}),
            ("DELETE", "/models/tiny", None),
            ("POST", "/models/tiny/warm", None),
            ("GET", "/instances", None),
            ("GET", "/cold-starts", None),
            ("GET", "/decisions", None),
            ("GET", f"/traces/{'0' * 32}", None),
        ):
            answer = await world.http.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                503,
                "database_unavailable",
            ), (method, path)
        assert world.catalog.get("tiny") is not None
        assert (await world.http.get("/workers")).json() == {"workers": []}
    assert (await world.register(folder, "second")).status_code == 201
