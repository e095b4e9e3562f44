"""The dashboard's pages of keys and usage, without a browser."""

import re
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy import insert

from pilotlight.common.db import tables
from pilotlight.common.testing import MakeContext
from pilotlight.gateway.admin.testing import checkpoint_files, write_folder
from pilotlight.gateway.sessions import CSRF_HEADER
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.ui.tenant_pages import ROWS_SHOWN
from pilotlight.gateway.ui.testing import UiWorld, ui_world

pytestmark = pytest.mark.anyio

BODY_ROWS = re.compile(r"<tr><td>\d{4}-")


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings
) -> AsyncIterator[UiWorld]:
    async with ui_world(make_context("gateway", emptied_settings)) as made:
        yield made


async def make_key(world: UiWorld, **more: object) -> dict[str, str]:
    answer = await world.admin.http.post("/keys", json={"label": "one", **more})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def use(world: UiWorld, key_id: str, model: str, days_ago: int, number: int = 1) -> None:
    """Rows of usage: 10 and 3 tokens, half a second of a device each."""
    at = world.admin.context.clock.wall() - timedelta(days=days_ago)
    row = {
        "at": at,
        "model": model,
        "key_id": key_id,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "status": "ok",
        "device_s": 0.5,
    }
    rows = [{**row, "request_id": f"req-{model}-{days_ago}-{each}"} for each in range(number)]
    async with world.admin.database.unit_of_work() as work:
        await work.connection.execute(insert(tables.usage), rows)


async def page_of(world: UiWorld, query: str) -> str:
    answer = await world.http.get(f"/ui/usage?{query}")
    assert answer.status_code == 200, answer.text[:300]
    return answer.text


def tiles(page: str) -> list[str]:
    return re.findall(r"<dt>[^<]+</dt><dd>([^<]+)</dd>", page)


async def test_usage_is_shown_added_up_and_filtered(world: UiWorld) -> None:
    key = await make_key(world, label="search team")
    await use(world, key["key_id"], "fox", 0, 2)
    await use(world, key["key_id"], "owl", 1)
    await use(world, "ollama", "fox", 40)
    await world.sign_in()
    whole = await page_of(world, "")
    assert tiles(whole) == ["3", "30", "9", "1.50 s", "0.0 ms", "0.0 ms"]
    assert len(BODY_ROWS.findall(whole)) == 2
    assert "search team" in whole
    of_fox = await page_of(world, f"model=fox&key_id={key['key_id']}&project=default/default")
    assert tiles(of_fox)[0] == "2"
    today = world.admin.context.clock.wall().date()
    long = await page_of(world, f"from={today - timedelta(days=50)}&to={today}")
    assert tiles(long)[0] == "4"
    yesterday = today - timedelta(days=1)
    assert tiles(await page_of(world, f"from={yesterday}&to={yesterday}"))[0] == "1"
    assert "Nothing was used" in await page_of(world, "model=none")


async def test_a_models_page_has_what_it_cost(world: UiWorld) -> None:
    key = await make_key(world)
    for name in ("t/fox", "t/owl"):
        folder = write_folder(world.admin.models / name, checkpoint_files())
        await world.admin.register(folder, name)
    await use(world, key["key_id"], "t/fox", 0, 2)
    await use(world, key["key_id"], "t/fox", 40)
    at = world.admin.context.clock.wall()
    idle = {"instance_id": "inst-1", "worker_id": "w-1", "at": at, "model": "t/fox"}
    async with world.admin.database.unit_of_work() as work:
        await work.connection.execute(insert(tables.idle_times), [{**idle, "device_s": 3.0}])
    await world.sign_in()
    page = (await world.http.get("/ui/models/t/fox")).text
    cost = page.partition("What it cost")[2].partition("</section>")[0]
    assert tiles(cost) == ["4.00 s", "1.00 s", "0.0 ms", "3.00 s", "2", "26"]
    assert "2.00 s a request" in page
    assert 'href="/ui/usage?model=t/fox"' in page
    assert "It took no device time." in (await world.http.get("/ui/models/t/owl")).text


async def test_the_csv_of_the_page_has_its_rows(world: UiWorld) -> None:
    key = await make_key(world)
    await use(world, key["key_id"], "fox", 0)
    await use(world, key["key_id"], "owl", 0)
    await world.sign_in()
    page = await page_of(world, "model=owl")
    link = re.search(r'href="(/admin/v1/usage\?[^"]+)"', page)
    assert link is not None
    csv = await world.http.get(link[1].replace("&amp;", "&"))
    assert csv.headers["content-type"].startswith("text/csv")
    assert [line.split(",")[4] for line in csv.text.splitlines()[1:]] == ["owl"]


async def test_a_long_table_is_cut_and_its_sums_are_whole(world: UiWorld) -> None:
    for number in range(ROWS_SHOWN + 1):
        await use(world, "k", f"model-{number:04d}", 0)
    await world.sign_in()
    page = await page_of(world, "")
    assert len(BODY_ROWS.findall(page)) == ROWS_SHOWN
    assert (tiles(page)[0], "model-0000" in page) == (str(ROWS_SHOWN + 1), False)
    assert "the CSV has all" in page


@pytest.mark.parametrize(
    "query",
    [
        "from=yesterday",
        "to=2026-13-01",
        "from=0001-01-01",
        "to=9999-12-31",
        "from=2026-02-02&to=2026-02-01",
        "model=%00",
        "key_id=<b>x</b>",
        "project=%ff",
    ],
)
async def test_a_filter_that_is_none_is_told(world: UiWorld, query: str) -> None:
    await world.sign_in()
    page = await page_of(world, query)
    assert 'role="alert"' in page
    assert "<b>x" not in page


async def test_keys_are_shown_but_not_the_keys_themselves(world: UiWorld) -> None:
    made = await make_key(world, label="one", models=["team/*"])
    gone = await make_key(world, label="gone")
    await world.admin.http.put(f"/keys/{made['key_id']}/limits", json={"tokens_per_minute": 7000})
    assert (await world.admin.http.delete(f"/keys/{gone['key_id']}")).status_code == 204
    await world.sign_in()
    page = (await world.http.get("/ui/keys")).text
    for word in ("one", made["prefix"], "team/*", "tokens per minute 7,000", "pill-valid"):
        assert word in page, word
    assert (made["key"] in page, "gone" in page) == (False, False)
    every = (await world.http.get("/ui/keys?revoked=true")).text
    assert ("gone" in every, "pill-revoked" in every) == (True, True)
    # Keys from files end with their files.
    assert page.count("data-confirm") == 1


async def test_only_an_owner_is_offered_to_make_and_to_end_keys(world: UiWorld) -> None:
    viewer = await make_key(world, role="admin", admin_role="viewer", label="viewer")
    await make_key(world)
    await world.sign_in()
    owners = (await world.http.get("/ui/keys")).text
    assert ('id="make"' in owners, "/admin/v1/keys/" in owners) == (True, True)
    await world.sign_in(viewer["key"])
    viewers = (await world.http.get("/ui/keys")).text
    assert ("one" in viewers, 'id="make"' in viewers) == (True, False)
    assert "/admin/v1/keys" not in viewers


async def test_who_may_only_look_asks_no_model(world: UiWorld) -> None:
    """A chat in the playground starts one."""
    for role, status in (("viewer", 403), ("operator", 200)):
        key = await make_key(world, role="admin", admin_role=role, label=role)
        await world.sign_in(key["key"])
        page = (await world.http.get("/ui/playground")).text
        found = re.search(r'name="csrf-token" content="(\w+)"', page)
        assert found is not None
        asked = await world.http.post("/ui/chat", json={}, headers={CSRF_HEADER: found[1]})
        assert asked.status_code == status, asked.text
    assert asked.json()["role"] == "inference"
