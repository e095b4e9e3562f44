"""Names of models, and what headers say: ids, cold starts, ignored fields, other origins."""

import asyncio

import openai
import pytest

from pilotlight.common.errors import SettingsInvalid
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.policy.plan import InstanceState

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = {"model": "fox", "messages": [{"role": "user", "content": "hello"}]}
NAMED = {"model_aliases": "gpt-4o=fox, fox=none, lost=none", "default_model": "gpt-4o"}


async def test_aliases_and_the_default_model(make_world):
    world = await make_world(**NAMED)
    worker = await world.worker()
    for name in ("fox", "gpt-4o"):
        answer = await world.client.chat.completions.create(**{**BODY, "model": name})
        assert answer.model == "fox"
    unnamed = {"messages": BODY["messages"]}
    assert (await world.http.post(CHAT, json=unnamed)).json()["model"] == "fox"
    assert len(worker.submits) == 3
    cards = {card.id: card for card in (await world.client.models.list()).data}
    assert {name: card.root for name, card in cards.items()} == {"fox": "fox", "gpt-4o": "fox"}
    with pytest.raises(openai.NotFoundError):
        await world.client.models.retrieve("lost")


async def test_without_a_default_a_name_is_needed(world):
    refused = await world.http.post(CHAT, json={"messages": BODY["messages"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("value", ["fox", "a=", "=b", "a=b,a=c"])
def test_aliases_that_are_none(value):
    with pytest.raises(SettingsInvalid, match="alias"):
        GatewaySettings(model_aliases=value)


async def test_a_clients_own_request_id(world):
    await world.worker()
    theirs = await world.http.post(CHAT, json=BODY, headers={"x-request-id": "my-id/1"})
    assert theirs.headers["x-request-id"] == "my-id/1"
    own = theirs.headers["x-pilotlight-request-id"]
    assert own.startswith("req-")
    assert world.usage.rows[-1]["request_id"] == own
    for bad in ("x" * 129, "a b", "é", "", "<script>"):
        answer = await world.http.get("/v1/models", headers={"x-request-id": bad.encode()})
        assert answer.headers["x-request-id"].startswith("req-")
        assert "x-pilotlight-request-id" not in answer.headers


async def test_fields_that_nothing_is_done_with_are_named(world):
    await world.worker()
    body = {**BODY, "store": True, "metadata": {}, "strange\nname": 1, "temperature": 0}
    answer = await world.http.post(CHAT, json=body)
    assert answer.headers["x-pilotlight-ignored-fields"] == "store, metadata"
    assert "x-pilotlight-ignored-fields" not in (await world.http.post(CHAT, json=BODY)).headers
    many = {**BODY, **{f"field{number}": 1 for number in range(99)}}
    named = (await world.http.post(CHAT, json=many)).headers["x-pilotlight-ignored-fields"]
    assert len(named.split(", ")) == 16


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            CHAT,
            {"stream": True, "stream_options": {"include_usage": True, "later": 1}, "store": True},
            "store, stream_options.later",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "thinking": {"type": "disabled", "budget_tokens": 1024},
                "tools": [
                    {"name": name, "input_schema": {}, "cache_control": {"type": "ephemeral"}}
                    for name in ("one", "two")
                ],
                "tool_choice": {"type": "none"},
                "metadata": {},
            },
            "metadata, thinking.budget_tokens, tools.cache_control",
        ),
        (
            "/api/chat",
            {"options": {"seed": 1, "num_ctx": 2048, "repeat_last_n": 64}, "keep_alive": "5m"},
            "keep_alive, options.num_ctx, options.repeat_last_n",
        ),
        (
            "/api/generate",
            {"prompt": "hello", "options": {"num_keep": 4, "strange name": 1}},
            "messages, options.num_keep",
        ),
        ("/api/chat", {"options": {"temperature": 0, "num_predict": 9}, "keep_alive": None}, None),
        ("/api/chat", {"options": None}, None),
    ],
)
async def test_fields_within_others_are_named_too(world, path, fields, named):
    await world.worker()
    answer = await world.http.post(path, json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-pilotlight-ignored-fields") == named


async def test_the_state_of_a_model(world):
    async def card():
        found = (await world.http.get("/v1/models/fox")).json()
        return found["state"], found["expected_s"]

    assert await card() == ("cold", None)
    worker = await world.worker(ready=False)
    await worker.ready(InstanceState.FETCHING)
    await world.until(lambda: bool(world.serving.fleet.instances("fox")))
    assert await card() == ("loading", None)
    await worker.ready()
    await world.until(lambda: bool(world.serving.fleet.serving("fox")))
    assert await card() == ("ready", 0.0)
    answer = await world.http.post(CHAT, json=BODY)
    assert answer.headers["x-pilotlight-cold-start"] == "false"
    await worker.ready(InstanceState.GONE)
    await world.until(lambda: not world.serving.fleet.serving("fox"))
    state, expected_s = await card()
    assert state == "cold"
    assert expected_s > 0


async def test_a_cold_start_is_told(world):
    asked = asyncio.create_task(world.http.post(CHAT, json={**BODY, "stream": True}))
    await world.until(lambda: world.serving.queue.held == 1)
    await world.worker()
    assert (await asked).headers["x-pilotlight-cold-start"] == "true"


@pytest.mark.parametrize("asked", ["refuse", "warm-only", "Refuse"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cold_start_is_refused(world, asked, stream):
    body, headers = {**BODY, "stream": stream}, {"x-pilotlight-cold-start": asked}
    refused = await world.http.post(CHAT, json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_cold")
    assert world.serving.queue.demand() == ()
    await world.worker()
    await world.until(lambda: bool(world.serving.fleet.serving("fox")))
    assert (await world.http.post(CHAT, json=body, headers=headers)).status_code == 200


async def test_an_instance_that_loads_is_not_warm(world):
    worker = await world.worker(ready=False)
    await worker.loading()
    await world.until(lambda: bool(world.serving.fleet.open("fox")))
    headers = {"x-pilotlight-cold-start": "warm-only"}
    assert (await world.http.post(CHAT, json=BODY, headers=headers)).status_code == 409
    assert worker.submits == []


async def test_another_word_for_it_is_refused(world):
    headers = {"x-pilotlight-cold-start": "maybe"}
    refused = await world.http.post(CHAT, json=BODY, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "x-pilotlight-cold-start",
    )


ORIGIN = {"origin": "https://app.example.org"}
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def test_pages_of_other_origins(make_world):
    world = await make_world(cors_origins="https://app.example.org")
    await world.worker()
    before = await world.http.request("OPTIONS", CHAT, headers={**ORIGIN, **ASKED})
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert "authorization" in before.headers["access-control-allow-headers"]
    answer = await world.http.post(CHAT, json={**BODY, "stream": True}, headers=ORIGIN)
    assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    assert "access-control-allow-credentials" not in answer.headers
    stranger = {**ASKED, "origin": "https://evil.example.org"}
    refused = await world.http.request("OPTIONS", CHAT, headers=stranger)
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    for closed in ("/admin/v1/models", "/ui/", "/admin", "/ui"):
        told = await world.http.request("OPTIONS", closed, headers={**ORIGIN, **ASKED})
        assert "access-control-allow-origin" not in told.headers


async def test_no_other_origin_unless_it_is_named(world):
    told = await world.http.request("OPTIONS", CHAT, headers={**ORIGIN, **ASKED})
    assert told.status_code == 405
    assert "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize("value", ["app.example.org", "https://a/b", "null"])
def test_origins_that_are_none(value):
    with pytest.raises(SettingsInvalid, match="origin"):
        GatewaySettings(cors_origins=value)


async def test_open_pages_of_other_servers(world):
    for path in ("/health", "/ping"):
        assert (await world.http.get(path, headers={"authorization": ""})).status_code == 200
    assert (await world.http.get("/version")).json()["version"]
