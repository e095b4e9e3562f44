"""Pages of the dashboard, without a browser: closed without a session, whole with one, and nothing
in them that a browser would run or load from elsewhere.
"""

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import URL, insert
from starlette.routing import Mount, Route

from pilotlight.common.db import tables
from pilotlight.common.testing import MakeContext
from pilotlight.gateway.admin.testing import (
    ADMIN_KEY,
    API_KEY,
    checkpoint_files,
    database_away,
    write_folder,
)
from pilotlight.gateway.sessions import COOKIE, CSRF_HEADER
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.ui.door import OPEN_PATHS
from pilotlight.gateway.ui.templating import FOLDER
from pilotlight.gateway.ui.testing import UiWorld, ui_world

pytestmark = pytest.mark.anyio

PAGES = ("/", "/models", "/cold-starts", "/traces", "/events", "/keys", "/usage", "/playground")
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", re.IGNORECASE)
VENDOR = FOLDER / "static" / "vendor"


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings
) -> AsyncIterator[UiWorld]:
    async with ui_world(make_context("gateway", emptied_settings)) as made:
        yield made


async def test_every_page_is_closed_unless_it_is_listed(world: UiWorld) -> None:
    walked: set[str] = set()
    for route in world.app.routes:
        if isinstance(route, Mount):
            assert route.path == "/static"
            continue
        assert isinstance(route, Route), f"{route} would not be walked"
        path = re.sub(r"\{[^}]+\}", "x", route.path)
        walked.add(path)
        for method in sorted(route.methods or ()):
            answer = await world.http.request(method, f"/ui{path}")
            if path in OPEN_PATHS:
                assert answer.status_code in (200, 401), (method, path)
            elif method == "GET":
                assert answer.status_code == 303, path
                assert answer.headers["location"].startswith("/ui/sign-in?next=")
            else:
                assert answer.status_code == 401, (method, path)
            assert "'unsafe" not in answer.headers["content-security-policy"]
            assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert walked >= OPEN_PATHS
    assert walked >= set(PAGES)


async def test_signing_in_gives_a_cookie_that_scripts_and_other_sites_do_not_have(
    world: UiWorld,
) -> None:
    refused = await world.sign_in(API_KEY)
    assert refused.status_code == 403
    assert "set-cookie" not in refused.headers
    assert 'role="alert"' in refused.text
    wrong = await world.sign_in("wrong")
    assert (wrong.status_code, "wrong" in wrong.text) == (401, False)
    done = await world.sign_in(wanted="/models?x=1")
    assert (done.status_code, done.headers["location"]) == (303, "/ui/models?x=1")
    cookie = done.headers["set-cookie"]
    assert ADMIN_KEY not in cookie
    for word in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert word in cookie, cookie
    out = await world.http.post("/ui/sign-out")
    assert "Max-Age=0" in out.headers["set-cookie"]


@pytest.mark.parametrize("wanted", ["https://evil.example", "//evil.example", "/\\evil", "x"])
async def test_signing_in_leads_nowhere_else(world: UiWorld, wanted: str) -> None:
    assert (await world.sign_in(wanted=wanted)).headers["location"] == "/ui/"


async def test_a_form_of_another_site_signs_nobody_in_or_out(world: UiWorld) -> None:
    for path in ("/ui/sign-in", "/ui/sign-out"):
        await world.sign_in()
        answer = await world.http.post(
            path, data={"key": ADMIN_KEY}, headers={"sec-fetch-site": "cross-site"}
        )
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


async def test_pages_hold_no_inline_scripts_or_styles(world: UiWorld, tmp_path: Path) -> None:
    await world.admin.register(write_folder(world.admin.models / "tiny", checkpoint_files()), "t/m")
    await world.sign_in()
    for path in (
        *PAGES,
        "/models/t/m",
        "/parts/models/t/m",
        "/events?kind=decisions",
        "/events?kind=evictions",
        "/parts/events?kind=audit",
        "/sign-in",
    ):
        answer = await world.http.get(f"/ui{path}")
        assert answer.status_code == 200, (path, answer.text[:300])
        assert INLINE.search(answer.text) is None, (path, INLINE.search(answer.text))
        assert "http://" not in re.sub(r'xmlns="[^"]+"', "", answer.text), path
        assert answer.headers["cache-control"] == "no-store"
    page = (await world.http.get("/ui/models/t/m")).text
    assert "model_register" in (await world.http.get("/ui/events")).text
    assert "LlamaForCausalLM" in page


async def test_what_others_wrote_is_shown_as_text(world: UiWorld) -> None:
    await world.sign_in("<script>alert(1)</script>")
    world.admin.audit.refused(
        _actor("<b>label</b>"), "<img src=x onerror=alert(1)>", "<i>", "forbidden", 403
    )
    await world.admin.audit.stop()
    await world.admin.audit.start()
    await world.sign_in()
    page = (await world.http.get("/ui/events")).text
    assert "&lt;img src=x" in page
    assert "<img src=x" not in page
    assert "<b>label" not in page


def _actor(principal: str):
    from pilotlight.gateway.records.audit import Actor

    return Actor(principal=principal)


async def test_what_is_not_there_is_a_page_that_says_so(world: UiWorld) -> None:
    await world.sign_in()
    for path, code in (
        ("/nodes/none", "node_not_found"),
        ("/models/none", "model_not_found"),
        ("/cold-starts/none", "not_found"),
        ("/traces/" + "0" * 32, "trace_not_found"),
        ("/nothing", "route_not_found"),
    ):
        answer = await world.http.get(f"/ui{path}")
        assert (answer.status_code, code in answer.text) == (404, True), path
        assert "<html" in answer.text


async def test_the_database_is_away(world: UiWorld, module_database: URL) -> None:
    await world.sign_in()
    with database_away(module_database):
        shown = await world.http.get("/ui/")
        failed = await world.http.get("/ui/events")
    assert shown.status_code == 200
    assert (failed.status_code, "database_unavailable" in failed.text) == (503, True)


async def test_the_playground_asks_by_its_session_and_token(world: UiWorld) -> None:
    await world.sign_in()
    answer = await world.http.post("/ui/chat", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    page = (await world.http.get("/ui/playground")).text
    found = re.search(r'name="csrf-token" content="(\w+)"', page)
    assert found is not None
    asked = await world.http.post("/ui/chat", json={}, headers={CSRF_HEADER: found[1]})
    assert asked.json()["role"] == "inference"
    # A session is no key of the public API's.
    assert COOKIE in world.http.cookies


async def test_a_request_is_found_by_its_id(world: UiWorld, module_database: URL) -> None:
    at = world.admin.context.clock.wall()
    span = {
        "span_id": "s",
        "parent_id": "",
        "name": "POST /v1/completions",
        "service": "gateway",
        "start_at": at,
        "end_at": at,
        "status": "ok",
    }
    async with world.admin.database.unit_of_work() as work:
        await work.connection.execute(
            insert(tables.spans),
            [
                {**span, "trace_id": "a" * 32, "attributes": {"request_id": "req-one"}},
                {**span, "trace_id": "b" * 32, "attributes": {}},
            ],
        )
    await world.sign_in()
    found = await world.http.get("/ui/traces?id=req-one")
    assert found.headers["location"] == f"/ui/traces/{'a' * 32}"
    assert "POST /v1/completions" in (await world.http.get(found.headers["location"])).text
    missing = await world.http.get("/ui/traces?id=req-two")
    assert (missing.status_code, 'role="alert"' in missing.text) == (200, True)
    listed = (await world.http.get("/ui/traces")).text
    assert ("req-one" in listed, "b" * 32 in listed) == (True, False)


async def test_static_files_are_there_and_nothing_beside_them(world: UiWorld) -> None:
    for file in sorted((FOLDER / "static").rglob("*")):
        if file.is_file():
            answer = await world.http.get(f"/ui/static/{file.relative_to(FOLDER / 'static')}")
            assert answer.status_code == 200, file
            assert answer.content == file.read_bytes()
            assert "etag" in answer.headers
            assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("../pages.py", "%2e%2e/pages.py", "vendor/", "none.js"):
        assert (await world.http.get(f"/ui/static/{path}")).status_code in (303, 404), path


def test_vendored_files_are_those_that_are_named() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| ([\w.]+) \| ([\d.]+) \| \w+, `([\w.]+)` \| (\w{64}) \|$",
        (VENDOR / "README.md").read_text(),
        re.MULTILINE,
    )
    assert {file for file, *_ in rows} == {
        file.name for file in VENDOR.iterdir() if file.suffix in (".js", ".css")
    }
    for file, _, _, licence, digest in rows:
        assert hashlib.sha256((VENDOR / file).read_bytes()).hexdigest() == digest, file
        assert len((VENDOR / licence).read_text()) > 500


def test_scripts_and_styles_load_nothing_from_elsewhere() -> None:
    for file in [*(FOLDER / "static").glob("*.js"), *(FOLDER / "static").glob("*.css")]:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.search(r"https?://|innerHTML|eval\(|@import", text) is None, file.name


async def test_the_page_of_a_model_that_is_deleted_says_so(world: UiWorld) -> None:
    """It asks for its part again and again: a browser names each 404 on the console."""
    await world.admin.register(write_folder(world.admin.models / "tiny", checkpoint_files()), "t/m")
    await world.sign_in()
    assert (await world.http.get("/ui/models/t/m")).status_code == 200
    assert (await world.admin.http.delete("/models/t/m")).is_success
    part = await world.http.get("/ui/parts/models/t/m")
    assert (part.status_code, "t/m is not registered any more" in part.text) == (200, True)
    assert (await world.http.get("/ui/models/t/m")).status_code == 404
