"""Ollama's API: what its clients send, and what they read."""

import json
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.surfaces.ollama.door import Door
from pilotlight.policy.request import FinishReason
from pilotlight.text.tools.testing import bundle_of

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "It tells.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def bundle():
    return bundle_of("hermes")


async def post(world, path="/api/chat", **body):
    fields = {"model": "fox", "messages": HELLO} if path == "/api/chat" else {"model": "fox"}
    return await world.http.post(path, json={**fields, **body})


def lines_of(response):
    return [json.loads(line) for line in response.text.splitlines()]


def prompt_of(world, worker):
    return world.entry.text.tokenizer.decode(
        worker.submits[-1].prompt_ids, skip_special_tokens=False
    )


async def test_a_chat_is_a_stream_unless_it_is_told(world):
    await world.worker()
    response = await post(world)
    assert response.headers["content-type"] == "application/x-ndjson"
    *parts, last = lines_of(response)
    assert "".join(part["message"]["content"] for part in parts) == ANSWER
    assert {part["done"] for part in parts} == {False}
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] == len(world.ids(ANSWER))
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0


async def test_a_chat_in_one_piece(world):
    worker = await world.worker()
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 3,
        "num_predict": 9,
        "repeat_penalty": 1.3,
        "num_ctx": 2048,
    }
    answer = (await post(world, stream=False, model="fox:latest", options=options)).json()
    assert answer["model"] == "fox"
    assert answer["message"]["role"] == "assistant"
    assert ANSWER.startswith(answer["message"]["content"])
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 9)
    assert answer["prompt_eval_count"] == len(worker.submits[0].prompt_ids)
    sampling = worker.submits[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 3)
    assert (sampling.max_tokens, sampling.repetition_penalty) == (9, 1.3)


async def test_a_prompt(world):
    worker = await world.worker()
    response = await post(world, "/api/generate", prompt="hello", system="be brief")
    *parts, last = lines_of(response)
    assert "".join(part["response"] for part in parts) == ANSWER
    assert (last["done"], last["response"]) == (True, "")
    prompt = prompt_of(world, worker)
    assert prompt.index("be brief") < prompt.index("hello")
    whole = (await post(world, "/api/generate", prompt="hello", stream=False)).json()
    assert whole["response"] == ANSWER


async def test_a_raw_prompt_goes_through_no_template(world):
    worker = await world.worker()
    await post(world, "/api/generate", prompt="once upon", raw=True)
    assert worker.submits[0].prompt_ids == world.tokenizer.encode(
        "once upon", add_special_tokens=True
    )
    assert worker.submits[0].sampling.max_tokens == 128


async def test_the_form_of_an_answer(world):
    worker = await world.worker(answer="{}")
    await post(world, format="json")
    assert worker.submits[-1].sampling.grammar.kind.value == "json_schema"
    await post(world, format={"type": "object", "properties": {}})
    assert "properties" in worker.submits[-1].sampling.grammar.text
    await post(world, format="")
    assert worker.submits[-1].sampling.grammar is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called(world, stream):
    await world.worker(answer="Let me see. " + CALL)
    response = await post(world, tools=[TOOL], stream=stream)
    messages = [line["message"] for line in lines_of(response)]
    (call,) = [call for message in messages for call in message.get("tool_calls", ())]
    assert call["function"] == {"name": "get_weather", "arguments": {"city": "Köln"}}


async def test_what_tools_answered_finds_its_call_without_ids(world):
    worker = await world.worker()
    calls = [
        {"function": {"name": name, "arguments": {"city": city}}}
        for name, city in (("get_weather", "Köln"), ("get_time", "Bonn"))
    ]
    turns = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "get_time", "content": "noon"},
        {"role": "tool", "content": "It rains."},
    ]
    assert (await post(world, messages=turns, tools=[TOOL])).status_code == 200
    prompt = prompt_of(world, worker)
    places = [prompt.index(part) for part in ("Köln", "Bonn", "noon", "It rains.")]
    assert places == sorted(places)
    refused = await post(world, messages=[*turns, {"role": "tool", "content": "more"}])
    assert refused.status_code == 400


async def test_lists_of_models(world):
    (model,) = (await world.http.get("/api/tags")).json()["models"]
    assert (model["name"], model["digest"]) == ("fox", world.entry.model.digest)
    assert (await world.http.get("/api/ps")).json() == {"models": []}
    await world.worker()
    await world.until(lambda: bool(world.serving.fleet.serving("fox")))
    (running,) = (await world.http.get("/api/ps")).json()["models"]
    assert (running["name"], running["size_vram"]) == ("fox", 1000)
    shown = (await post(world, "/api/show")).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert (await world.http.get("/api/version")).json()["version"]


async def test_a_registered_model_needs_no_pull(world):
    for name in ("model", "name"):
        answer = await world.http.post("/api/pull", json={name: "fox:latest"})
        assert answer.headers["content-type"] == "application/x-ndjson"
        said = [json.loads(line)["status"] for line in answer.text.splitlines()]
        assert said == ["pulling manifest", "success"]
    whole = await world.http.post("/api/pull", json={"model": "fox", "stream": False})
    assert whole.json() == {"status": "success"}
    unknown = await world.http.post("/api/pull", json={"model": "owl"})
    assert unknown.status_code == 404
    assert "owl" in unknown.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/chat", {"messages": [{**HELLO[0], "images": ["x"]}]}, "images"),
        ("/api/chat", {"options": {"mirostat": 2}}, "mirostat"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"think": True}, "enable_thinking"),
        ("/api/chat", {"model": "none"}, "model_not_found"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "raw"),
    ],
)
async def test_refused_with_a_sentence(world, path, body, said):
    response = await post(world, path, **body)
    assert response.status_code in (400, 404)
    assert said in response.json()["error"]


async def test_a_stream_that_fails_ends_with_an_error(world):
    def script(submit):
        begun = world.ids("some text")
        failure = TokenEntry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            seq=len(begun),
            token_ids=[],
            finish=FinishReason.ERROR,
            code="invalid_request",
            message="cannot run this",
        )
        return [*entries_of(submit, begun, finish=None), failure]

    worker = await world.worker()
    worker.script = script
    assert "cannot run this" in lines_of(await post(world))[-1]["error"]


async def test_addresses_that_need_no_key(make_world):
    world = await make_world(ollama_clients="127.0.0.1, 10.0.0.0/8")
    await world.worker()
    del world.http.headers["authorization"]
    assert (await post(world, stream=False)).status_code == 200
    assert world.usage.rows[-1]["key_id"] == "ollama"
    assert (await world.http.get("/api/tags")).status_code == 200
    # What a page in a browser could send, and a key that is wrong, get in no more than elsewhere.
    for headers in (
        {"origin": "https://evil.example.org"},
        {"host": "evil.example.org"},
        {"authorization": "Bearer wrong"},
    ):
        assert (await world.http.get("/api/tags", headers=headers)).status_code == 401
    assert (await world.http.get("/v1/models")).status_code == 401
    assert (await world.http.post("/v1/messages", json={})).status_code == 401


def keyless(address, host="localhost:8000", clients=("127.0.0.1", "10.0.0.0/8", "fd00::/8")):
    door = Door.of(clients, "https://models.example.org:8443/")
    client = None if address is None else SimpleNamespace(host=address)
    request = SimpleNamespace(headers=Headers({"host": host}), client=client)
    return door.keyless(request) is not None


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::ffff:10.1.2.3", "fd00::1"])
def test_known_addresses(address):
    assert keyless(address)
    assert not keyless(address, clients=())


@pytest.mark.parametrize("address", ["127.0.0.2", "11.0.0.1", "fe80::1", "", "somewhere", None])
def test_other_addresses(address):
    assert not keyless(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]:8000", "LOCALHOST", "models.example.org:8443", "10.0.0.1:1"]
)
def test_own_names(host):
    assert keyless("127.0.0.1", host)


@pytest.mark.parametrize("host", ["", "evil.example.org", "localhost.evil.org:80", "[", "a@b"])
def test_foreign_names(host):
    assert not keyless("127.0.0.1", host)


def test_addresses_that_are_none():
    with pytest.raises(SettingsInvalid, match="OLLAMA_CLIENTS"):
        GatewaySettings(ollama_clients="10.0.0.0/40")
