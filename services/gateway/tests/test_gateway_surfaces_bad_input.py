"""Bodies that mean no good, on every route of the other shapes: a 4xx, and never a 5xx."""

import json

import pytest

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hello"}
BODIES = {
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "hello", "documents": ["world"]},
    "/v1/score": {"text_1": "hello", "text_2": "world"},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
    "/api/show": {},
    "/api/pull": {"stream": False},
}
DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"\xff\xfe",
    b'{"model": "\xff"}',
    b'{"model": 7}',
    b'{"model": "fox", "messages": 3, "input": 3, "prompt": 3, "tokens": 3}',
    b'{"model": "fox", "messages": [[]], "input": [[]], "prompt": [], "tokens": ["x"]}',
    # Ollama's clients load a model by a body without a prompt.
    b'{"model": "fox", "messages": [{"role": "nobody"}], "input": [{"role": "nobody"}], "prompt": {}}',
    f'{{"model": "fox", "messages": {DEEP}, "input": {DEEP}, "tokens": {DEEP}, "prompt": {DEEP}}}'.encode(),
    f'{{"model": {DEEP}}}'.encode(),
]
WRONG = [None, 7, -1, 1e300, 10**30, "x", "", [], [None], {}, {"type": "x"}, True, "x" * 100_000]


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_no_request(world, path):
    for body in HOSTILE:
        response = await world.http.post(path, content=body)
        # A model's name is all that these routes look at.
        if path in ("/api/show", "/api/pull") and response.status_code == 200:
            continue
        assert 400 <= response.status_code < 500, (body[:60], response.text)
        assert response.json()["error"]


@pytest.mark.parametrize("path", BODIES)
async def test_fields_of_the_wrong_kind(world, path):
    await world.worker(answer="{}")
    names = (await world.http.get("/v1/openapi.json")).json()
    schema = names["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    kind = schema["$ref"].rpartition("/")[2]
    for name in names["components"]["schemas"][kind]["properties"]:
        for value in WRONG:
            body = {"model": "fox", **BODIES[path], name: value}
            if body.get("stream"):
                continue
            response = await world.http.post(path, content=json.dumps(body))
            assert response.status_code < 500, (name, value, response.text)
