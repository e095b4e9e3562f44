"""Requests of Ollama's clients that ask nothing: they load a model, or unload it."""

import asyncio

import pytest

from pilotlight.gateway.surfaces.ollama.loading import is_no_time

pytestmark = pytest.mark.anyio

WAYS = [("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []}), ("/api/chat", {})]


async def post(world, path, **body):
    return await world.http.post(path, json={"model": "fox:latest", **body})


def is_done(answer, path, reason):
    body = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert (body["model"], body["done"], body["done_reason"]) == ("fox", True, reason)
    if path == "/api/chat":
        assert body["message"] == {"role": "assistant", "content": ""}
    else:
        assert body["response"] == ""


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_a_cold_model_is_loaded_by_asking_it(world, path, body):
    loading = asyncio.create_task(post(world, path, **body))
    await world.until(lambda: world.serving.queue.held == 1)
    assert not loading.done()
    worker = await world.worker()
    answer = await loading
    is_done(answer, path, "load")
    assert answer.headers["x-pilotlight-cold-start"] == "true"
    assert [submit.sampling.max_tokens for submit in worker.submits] == [1]
    # One that is loaded is not asked again.
    is_done(await post(world, path, **body, keep_alive="5m"), path, "load")
    assert len(worker.submits) == 1


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_what_is_loaded_is_not_unloaded_for_one_client(world, path, body):
    is_done(await post(world, path, **body, keep_alive=0), path, "unload")
    await world.worker()
    await world.until(lambda: bool(world.serving.fleet.serving("fox")))
    refused = await post(world, path, **body, keep_alive="0s")
    assert refused.status_code == 403
    assert "stays loaded" in refused.json()["error"]
    assert world.serving.fleet.serving("fox")


async def test_a_cold_start_that_a_client_refuses_loads_nothing(world):
    headers = {"x-pilotlight-cold-start": "refuse"}
    answer = await world.http.post("/api/generate", json={"model": "fox"}, headers=headers)
    assert answer.status_code == 409
    assert (await world.http.post("/api/generate", json={"model": "none"})).status_code == 404


@pytest.mark.parametrize("keep_alive", [0, 0.0, -0.0, "0", "0s", "0.0m", "-0h"])
def test_no_time(keep_alive):
    assert is_no_time(keep_alive)


@pytest.mark.parametrize("keep_alive", [None, False, -1, 1, 0.5, "5m", "", "0.1s", "s", [], {}])
def test_some_time(keep_alive):
    assert not is_no_time(keep_alive)
