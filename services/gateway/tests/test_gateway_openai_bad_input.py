"""Whatever a client sends, it gets the right status and an error in OpenAI's shape: never a 500,
never a hang.
"""

import json

import pytest

from pilotlight.gateway.app import OPEN_PATHS
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.testing import ADMIN_KEY
from pilotlight.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**changes):
    return json.dumps({"model": "fox", "messages": HELLO, **changes})


def text(**changes):
    return json.dumps({"model": "fox", "prompt": "hello", **changes})


CASES = [
    # path, body, status, param
    (CHAT, "", 400, None),
    (CHAT, "{", 400, None),
    (CHAT, "null", 400, None),
    (CHAT, "[]", 400, None),
    (CHAT, '"text"', 400, None),
    (CHAT, "12", 400, None),
    (CHAT, "{}", 400, "messages"),
    (CHAT, '{"model": "fox"}', 400, "messages"),
    (CHAT, '{"messages": [{"role": "user", "content": "x"}]}', 400, "model"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hello"), 400, "messages"),
    (CHAT, chat(messages=[3]), 400, "messages[0]"),
    (CHAT, chat(messages=[{}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "king", "content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0].tool_call_id"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        None,
    ),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, None),
    (
        CHAT,
        chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
        400,
        None,
    ),
    (CHAT, chat(model=""), 400, "model"),
    (CHAT, chat(model=3), 400, "model"),
    (CHAT, chat(model=None), 400, "model"),
    (CHAT, chat(model="x" * 300), 400, "model"),
    (CHAT, chat(model="none"), 404, "model"),
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, chat(temperature=-0.1), 400, "temperature"),
    (CHAT, chat(temperature=2.1), 400, "temperature"),
    (CHAT, chat(temperature=True), 400, "temperature"),
    (
        CHAT,
        '{"model": "fox", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        400,
        None,
    ),
    (
        CHAT,
        '{"model": "fox", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        400,
        "temperature",
    ),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(top_p=1.01), 400, "top_p"),
    (CHAT, chat(top_k=-2), 400, "top_k"),
    (CHAT, chat(top_k=1.5), 400, "top_k"),
    (CHAT, chat(top_k=10**12), 400, "top_k"),
    (CHAT, chat(seed="x"), 400, "seed"),
    (CHAT, chat(seed=2**70), 400, "seed"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    (CHAT, chat(max_tokens="9"), 400, "max_tokens"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens"),
    (
        CHAT,
        '{"model": "fox", "messages": [{"role": "user", "content": "x"}], "max_tokens": '
        + "9" * 5000
        + "}",
        400,
        "max_tokens",
    ),
    (CHAT, chat(max_tokens=5000), 400, "max_tokens"),
    (CHAT, chat(max_completion_tokens=5000), 400, "max_completion_tokens"),
    (CHAT, chat(stop=3), 400, "stop"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(stop=["a", None]), 400, "stop[1]"),
    (CHAT, chat(stop=["x"] * 17), 400, "stop"),
    (CHAT, chat(stop="x" * 2000), 400, "stop"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (
        CHAT,
        chat(stream=True, stream_options={"include_usage": 1}),
        400,
        "stream_options.include_usage",
    ),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(n=17), 400, "n"),
    (CHAT, chat(n=1.5), 400, "n"),
    (CHAT, chat(n="2"), 400, "n"),
    (CHAT, chat(n=10**30), 400, "n"),
    (CHAT, chat(n=2, best_of=2), 400, "best_of"),
    (CHAT, chat(n=True), 400, "n"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (CHAT, chat(response_format="json"), 400, "response_format"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        400,
        "response_format.json_schema.schema",
    ),
    (CHAT, chat(response_format={"type": "json_object"}, guided_regex="a"), 400, "guided_regex"),
    (
        CHAT,
        chat(structured_outputs={"regex": "a", "choice": ["a"]}),
        400,
        "structured_outputs.choice",
    ),
    (CHAT, chat(structured_outputs={"choice": []}), 400, "structured_outputs.choice"),
    (CHAT, chat(guided_json="{"), 400, "guided_json"),
    (CHAT, chat(guided_json="[]"), 400, "guided_json"),
    (CHAT, chat(guided_grammar="x" * 300_000), 400, "guided_grammar"),
    (CHAT, chat(logit_bias={"50": 101}), 400, None),
    (CHAT, chat(logit_bias={"x": 1}), 400, None),
    (CHAT, chat(logit_bias={"1000000": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 1}), 400, "logit_bias"),
    (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    (CHAT, chat(min_p=1.5), 400, "min_p"),
    (CHAT, chat(min_tokens=-1), 400, "min_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=5), 400, "min_tokens"),
    (CHAT, chat(stop_token_ids=[10**6]), 400, "stop_token_ids"),
    (CHAT, chat(stop_token_ids=["x"]), 400, "stop_token_ids[0]"),
    (CHAT, chat(logprobs=1), 400, "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(modalities=["audio"]), 400, "modalities"),
    (CHAT, chat(user=3), 400, "user"),
    (CHAT, chat(ignore_eos="x"), 400, "ignore_eos"),
    (CHAT, b'{"model": "fox", "messages": [{"role": "user", "content": "\xff"}]}', 400, None),
    (CHAT, b'{"model": "\xc3\x28", "messages": []}', 400, None),
    (CHAT, '{"model": "fox", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    (CHAT, chat(messages=HELLO)[:-1] + ', "x": ' + "[" * 100_000 + "}", 400, None),
    (CHAT, '{"messages": ' + "[" * 100_000, 400, None),
    (CHAT, chat() + "x", 400, None),
    (CHAT, "\ufeff" + chat(), 400, None),
    (CHAT, chat(messages=[{"role": "user", "content": "hello fox " * 3000}]), 400, None),
    (TEXT, "{}", 400, "prompt"),
    (TEXT, '{"model": "fox"}', 400, "prompt"),
    (TEXT, text(prompt=None), 400, "prompt"),
    (TEXT, text(prompt=3), 400, "prompt"),
    (TEXT, text(prompt=[]), 400, "prompt"),
    (TEXT, text(prompt=[[]]), 400, "prompt"),
    (TEXT, text(prompt=[[1], []]), 400, "prompt"),
    (TEXT, text(prompt=[[1], 2]), 400, "prompt"),
    (TEXT, text(prompt=["a", [10**6]]), 400, "prompt"),
    (TEXT, text(prompt=["a"] * 17), 400, "prompt"),
    (TEXT, text(prompt=["a", "b"], n=9), 400, "prompt"),
    (TEXT, text(prompt=["a", [5] * 4096]), 400, None),
    (TEXT, text(prompt=["a", 1]), 400, "prompt"),
    (TEXT, text(prompt=[1, "a"]), 400, "prompt"),
    (TEXT, text(prompt=[[1, "a"]]), 400, "prompt[0][1]"),
    (TEXT, text(prompt=[-1]), 400, "prompt"),
    (TEXT, text(prompt=[10**6]), 400, "prompt"),
    (TEXT, text(prompt=[10**30]), 400, "prompt"),
    (TEXT, text(prompt=[True]), 400, "prompt[0]"),
    (TEXT, text(prompt=[1.5]), 400, "prompt[0]"),
    (TEXT, text(prompt=[5] * 4096), 400, None),
    (TEXT, text(prompt=[5] * 100_000), 400, None),
    (TEXT, text(echo="yes"), 400, "echo"),
    (TEXT, text(best_of=2), 400, "best_of"),
    (TEXT, text(suffix="x"), 400, "suffix"),
    (TEXT, text(logprobs=-1), 400, "logprobs"),
    (TEXT, text(logprobs=True), 400, "logprobs"),
    (TEXT, text(logprobs=9), 400, "logprobs"),
]


async def test_bad_bodies(world):
    wrong = []
    for path, body, status, param in CASES:
        data = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        response = await world.http.post(
            path, content=data, headers={"content-type": "application/json"}
        )
        error = response.json()["error"]
        right = (
            set(error) == {"message", "type", "param", "code"}
            and error["type"] == "invalid_request_error"
            and (error["param"] or "the body" if error["code"] == "invalid_request" else "")
            in error["message"]
        )
        if (
            response.status_code != status
            or not right
            or error["param"] not in (param, error["param"] if param is None else param)
        ):
            wrong.append((body[:120], response.status_code, error))
    assert wrong == []
    assert len(CASES) >= 60
    assert world.serving.requests.live == 0


async def test_context_limit_is_named(world):
    response = await world.http.post(TEXT, content=text(prompt=[5] * 5000))
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "4096" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, text(prompt="fox " * 50_000)),
        (CHAT, chat(messages=[{"role": "user", "content": "fox " * 50_000}])),
    ],
)
async def test_a_prompt_far_beyond_the_context_is_not_even_encoded(world, monkeypatch, path, body):
    monkeypatch.delattr(TextTokenizer, "encode")
    response = await world.http.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "4096" in response.json()["error"]["message"]


async def test_body_limit(make_world):
    world = await make_world(max_body_bytes=10_000)
    large = text(prompt="x" * 20_000)
    assert (await world.http.post(TEXT, content=large)).status_code == 413

    async def pieces():
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000].encode()

    response = await world.http.post(TEXT, content=pieces())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


async def test_prompt_beyond_the_wire(make_world):
    world = await make_world(max_context_tokens=10_000_000, max_body_bytes=64 * 1024 * 1024)
    response = await world.http.post(TEXT, content=text(prompt=[399] * 2_200_000))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "message_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "route_not_found"),
        ("GET", "/v2/models", 404, "route_not_found"),
        ("POST", "/v1/moderations", 404, "route_not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions/x", 404, "route_not_found"),
        ("GET", "/v1/../etc/passwd", 404, "route_not_found"),
    ],
)
async def test_routes_and_methods(world, method, path, status, code):
    response = await world.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


async def test_405_names_what_is_allowed(world):
    assert "POST" in (await world.http.get(CHAT)).headers["allow"]


OTHER_SHAPES = ("/api/", "/v1/messages")
"""Routes whose errors look as those of another API."""


async def test_every_route_is_closed_unless_listed_as_open(world):
    paths = set()
    for route in world.app.routes:
        if route.path in ("/admin/v1", "/ui"):
            continue  # tests of their own walk them
        path = route.path.replace("{name:path}", "fox").replace("{response_id}", "resp_1")
        paths.add(path)
        method = min(route.methods - {"HEAD"})
        for key in ("", "Bearer wrong", f"Bearer {ADMIN_KEY}", "Basic eDp5", "Bearer"):
            response = await world.http.request(method, path, headers={"authorization": key})
            if path in OPEN_PATHS:
                assert response.status_code == 200, path
            else:
                assert response.status_code == (403 if ADMIN_KEY in key else 401), path
                assert isinstance(response.json()["error"], str) == path.startswith("/api/")
                if not path.startswith(OTHER_SHAPES):
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert paths >= OPEN_PATHS
    assert len(world.app.routes) > 20


async def test_too_many_headers(world):
    headers = {f"x-{number}": "1" for number in range(150)}
    assert (await world.http.get("/v1/models", headers=headers)).status_code == 400


async def test_accepted_though_unusual(world):
    await world.worker(answer="ok")
    body = chat(
        n=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        parallel_tool_calls=True,
        store=False,
        metadata={"a": "b"},
        user="somebody",
        service_tier="auto",
        unknown_field={"deep": [1, 2]},
        max_tokens=None,
        stop=None,
        top_logprobs=0,
    )
    response = await world.http.post(CHAT, content=body)
    assert response.status_code == 200, response.text
    assert (
        await world.http.post(TEXT, content=text(echo=False, best_of=1, logprobs=None, stop=[]))
    ).status_code == 200


async def test_a_bug_is_told_and_ends_nothing(world, monkeypatch):
    """On the short way of most requests, and on that of all others."""
    monkeypatch.setattr(PromptEncoder, "chat", _raise)
    (route,) = [route for route in world.app.routes if route.path == "/v1/models"]
    route.app = _raise
    for response in (
        await world.http.post(CHAT, content=chat()),
        await world.http.get("/v1/models"),
    ):
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal"
        assert response.headers["x-request-id"]
        assert "KeyError" not in response.text
    assert (await world.http.get("/healthz")).status_code == 200


async def _raise(*_):
    raise KeyError("a bug")


async def test_openapi_document(world):
    document = (await world.http.get("/v1/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["temperature"]
    assert set(schemas["ChatRequest"]["required"]) == {"messages"}
    assert "/v1/chat/completions" in document["paths"]
    streamed = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answer = operation["responses"]["200"]
            kinds = set(answer["content"]) - {"application/json", "application/octet-stream"}
            assert bool(kinds) == ("stream" in answer["description"])
            # Only what is asked for with POST can be streamed.
            assert not kinds or method == "post"
            if kinds:
                streamed.add((path, *kinds))
    assert streamed == {
        ("/v1/chat/completions", "text/event-stream"),
        ("/v1/completions", "text/event-stream"),
        ("/v1/responses", "text/event-stream"),
        ("/v1/messages", "text/event-stream"),
        ("/api/chat", "application/x-ndjson"),
        ("/api/generate", "application/x-ndjson"),
        ("/api/pull", "application/x-ndjson"),
    }
