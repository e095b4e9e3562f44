"""What the admin API refuses of a request: values, names, bodies, paths; at once, with the right
status, saying what to do, and leaving nothing behind.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pilotlight.gateway.admin.testing import (
    SLO,
    AdminWorld,
    checkpoint_files,
    nothing_is_registered,
    refused,
    write_folder,
)
from pilotlight.gateway.models.schemas import MAX_NAME_CHARS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(fresh_admin: AdminWorld) -> AsyncIterator[AdminWorld]:
    yield fresh_admin
    await nothing_is_registered(fresh_admin)


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    *[
        ({"slo": {**SLO, "ttft_ms": value}}, "slo.ttft_ms")
        for value in (0, -1, 1e300, "1000", True, None, [1], 10**400, 1e-400)
    ],
    *[({"slo": {**SLO, "tpot_ms": value}}, "slo.tpot_ms") for value in (0, -0.0, "50")],
    *[
        ({"slo": {**SLO, "attainment": value}}, "slo.attainment")
        for value in (0, 1.01, -1, "1", False)
    ],
    ({"slo": {"ttft_ms": 1}}, "slo.tpot_ms"),
    ({"slo": {**SLO, "ttft": 1}}, "slo.ttft"),
    ({"slo": None}, "slo"),
    ({"slo": []}, "slo"),
    ({"unknown": 1}, "unknown"),
    ({"Name": "x"}, "Name"),
    ({"dtype": "int8"}, "dtype"),
    ({"dtype": None}, "dtype"),
    ({"min_instances": -1}, "min_instances"),
    ({"min_instances": 1.5}, "min_instances"),
    ({"min_instances": 10**30}, "min_instances"),
    ({"min_instances": "1"}, "min_instances"),
    ({"max_instances": 0}, "max_instances"),
    ({"max_instances": True}, "max_instances"),
    ({"min_instances": 3, "max_instances": 2}, "min_instances"),
    ({"keep_alive_s": -1}, "keep_alive_s"),
    ({"keep_alive_s": 1e12}, "keep_alive_s"),
    ({"pinned": 1}, "pinned"),
    ({"pinned": "true"}, "pinned"),
    ({"revision": "main"}, "revision"),
    ({"revision": "x" * 201}, "revision"),
    ({"uri": ""}, "uri"),
    ({"uri": "x" * 2049}, "uri"),
    ({"uri": 7}, "uri"),
    ({"uri": None}, "uri"),
]


async def test_values_that_will_not_do(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    for changes, param in BAD_VALUES:
        answer = await world.register(folder, **changes)
        refused(answer, 422, "unprocessable")
        assert answer.json()["error"]["param"] == param, changes


async def test_numbers_that_are_none(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    good = json.dumps(world.body(folder, keep_alive_s=60, slo={"ttft_ms": 1000, "tpot_ms": 50}))
    for field in ('"ttft_ms": 1000', '"keep_alive_s": 60'):
        for literal in ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 5000):
            content = good.replace(field, f"{field.partition(' ')[0]} {literal}")
            assert literal in content
            answer = await world.http.post(
                "/models", content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (400, 422), (field, literal[:10], answer.text)
            assert answer.json()["error"]["message"]


BAD_NAMES = ["", " ", "a b", "-a", ".hidden", "a/", "/a", "a//b", "a/../b", "..", "a/.", "é", "a\n", "a\0", "a\ud800", "a?b", "a%2Fb",
    "a" * (MAX_NAME_CHARS + 1)]  # fmt: skip


async def test_names_that_will_not_do(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    for name in BAD_NAMES:
        content = json.dumps(world.body(folder, name))
        answer = await world.http.post(
            "/models", content=content, headers={"content-type": "application/json"}
        )
        refused(answer, 422, "unprocessable", "name")


GOOD_NAMES = ["a", "Qwen/Qwen2.5-0.5B_x", "a/b/c", "0", "a" * MAX_NAME_CHARS]


async def test_names_that_will_do(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    for name in GOOD_NAMES:
        assert (await world.register(folder, name)).status_code == 201
        assert (await world.http.get(f"/models/{name}")).json()["name"] == name
        assert (await world.http.delete(f"/models/{name}")).status_code == 204


BAD_BODIES = [
    (b"", 422),
    (b"{", 400),
    (b"{'name': 1}", 400),
    (b"\xff\xfe\x00", 400),
    (b"\xef\xbb\xbf{}", 422),
    (b"null", 422),
    (b"[]", 422),
    (b'[{"name": "a"}]', 422),
    (b'"text"', 422),
    (b"7", 422),
    (b"{}", 422),
    (b"[" * 60_000, 400),
    (b'{"slo":' * 8_000 + b"1" + b"}" * 8_000, 400),
    (b'{"name": "a",}', 400),
]


async def test_bodies_that_will_not_do(world: AdminWorld) -> None:
    for content, status in BAD_BODIES:
        async with asyncio.timeout(5):
            answer = await world.http.post(
                "/models", content=content, headers={"content-type": "application/json"}
            )
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]


NO_JSON = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "nonsense"]


async def test_a_body_that_is_not_said_to_be_json(world: AdminWorld) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    content = json.dumps(world.body(folder))
    for content_type in NO_JSON:
        answer = await world.http.post(
            "/models", content=content, headers={"content-type": content_type}
        )
        refused(answer, 422, "unprocessable", "Content-Type: application/json")


BAD_PATHS = [
        "/models/a%00b", "/models/%ff", "/models/a%20b", "/models/", "/models/" + "x" * 300,
        "/traces/abc", "/traces/%00", f"/traces/{'g' * 32}", f"/traces/{'A' * 32}",
        "/instances?limit=0", "/instances?limit=1001", "/instances?limit=x", "/instances?limit=", "/decisions?limit=-1",
        "/audit?until=0.5", "/audit?since=1700000000", "/usage?since=1e9", "/usage?until=2026-01-31", "/usage?until=2026-01-31T12:00:00",
        "/decisions?model=%00", "/cold-starts?model=a%00b", "/cold-starts?limit=1e3", f"/decisions?limit={'9' * 5000}",
    ]  # fmt: skip


async def test_paths_and_queries_that_will_not_do(world: AdminWorld) -> None:
    for path in BAD_PATHS:
        answer = await world.http.get(path)
        refused(answer, 422, "unprocessable")
        if path.startswith("/models/"):
            for method, action in (
                ("DELETE", ""),
                ("POST", "/warm"),
                ("POST", "/evict"),
                ("PATCH", ""),
            ):
                answer = await world.http.request(
                    method, path + action, json={} if method == "PATCH" else None
                )
                refused(answer, 422, "unprocessable")


async def test_a_405_names_every_method_of_its_path(world: AdminWorld) -> None:
    for path, methods in (
        ("/models", "GET, POST"),
        ("/models/a/b", "DELETE, GET, PATCH"),
        ("/models/a/b/warm", "POST"),
        ("/nodes/n/drain", "DELETE, POST"),
        ("/projects/a/b/limits", "PUT"),
    ):
        answer = await world.http.options(path)
        refused(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == methods, path


async def test_what_is_not_there_is_a_404(world: AdminWorld) -> None:
    refused(await world.http.get("/models/none"), 404, "model_not_found", "none")
    refused(await world.http.get(f"/traces/{'0' * 32}"), 404, "trace_not_found", "0" * 32)
    for path in (
        "/instances",
        "/decisions?model=none",
        "/cold-starts?model=none",
        "/nodes",
        "/workers",
    ):
        answer = await world.http.get(path)
        assert (answer.status_code, next(iter(answer.json().values()))) == (200, [])


@pytest.mark.parametrize("path", ["/models/a%0Ab", "/%0A", "/models/a/warm%0A"])
async def test_a_line_break_in_a_path_is_answered_here(world: AdminWorld, path: str) -> None:
    refused(await world.http.get(path), 404, "route_not_found")
