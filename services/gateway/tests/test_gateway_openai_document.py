"""The API's description, and the page for people, beside the routes that there are."""

import re
from pathlib import Path

import jsonschema
import pytest

from pilotlight.gateway.admin.gate import OPEN_PATHS as OPEN_TO_ADMINS
from pilotlight.gateway.app import OPEN_PATHS, TRACED_PATHS
from pilotlight.gateway.openai.document import openapi_document
from pilotlight.gateway.ui.door import MOUNTED_AT, STATIC
from pilotlight.gateway.ui.door import OPEN_PATHS as OPEN_PAGES_OF_UI

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
MOUNTED = ("/admin/v1", "/ui")


def routes_of(world):
    return {
        (re.sub(r"\{name:path\}", "{model}", route.path), method.lower())
        for route in world.app.routes
        if route.path not in MOUNTED
        for method in route.methods - {"HEAD"}
    }


async def test_every_route_with_a_key_is_described_and_no_other(world):
    described = {
        (path, method)
        for path, operations in openapi_document("1")["paths"].items()
        for method in operations
    }
    assert described == {each for each in routes_of(world) if each[0] not in OPEN_PATHS}


async def test_every_route_is_on_the_page(world):
    page = PAGE.read_text()
    open_routes = page[page.index("## Open routes") :]
    for route, _ in routes_of(world):
        path = route.replace("{model}", "{name}")
        where = open_routes if path in OPEN_PATHS else page
        assert f"`{path}`" in where or f"{path}`" in where, path


async def test_the_page_lists_what_is_open_and_nothing_else():
    section = PAGE.read_text().split("## Open routes\n")[1]
    redirected = {MOUNTED_AT, f"{MOUNTED_AT}/"}
    assert set(re.findall(r"`(/[^`…]*)`", section)) == (
        OPEN_PATHS
        | {f"/admin/v1{path}" for path in OPEN_TO_ADMINS}
        | {f"{MOUNTED_AT}{path}" for path in OPEN_PAGES_OF_UI}
        | {f"{MOUNTED_AT}{STATIC.rstrip('/')}"}
        | redirected
    )


async def test_what_is_answered_by_the_fleet_is_traced():
    streamed = {
        path
        for path, operations in openapi_document("1")["paths"].items()
        for operation in operations.values()
        if "stream" in operation["responses"]["200"]["description"]
    }
    pooled = {"/v1/embeddings", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings"}
    # A pull says what is there.
    assert streamed - {"/api/pull"} == TRACED_PATHS - {"/ui/chat"} - pooled


async def test_schemas_are_schemas():
    document = openapi_document("1")
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/api/chat", {"stream": False, "messages": [{"role": "user", "content": "hello"}]}),
        ("/api/generate", {"stream": False, "prompt": "hello"}),
        ("/api/show", {}),
        ("/api/pull", {"stream": False}),
        ("/api/tags", None),
        ("/api/ps", None),
        ("/v1/models", None),
    ],
)
async def test_answers_are_as_they_are_described(world, path, body):
    await world.worker()
    document = openapi_document("1")
    method = "get" if body is None else "post"
    given = None if body is None else {"model": "fox", **body}
    answer = await world.http.request(method.upper(), path, json=given)
    assert answer.status_code == 200, answer.text
    described = document["paths"][path][method]["responses"]["200"]["content"]
    schema = {**described["application/json"]["schema"], "components": document["components"]}
    jsonschema.validate(answer.json(), schema, cls=jsonschema.Draft202012Validator)
