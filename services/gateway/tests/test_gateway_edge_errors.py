"""Which errors official clients send again by themselves, what that costs, and that every answer is
counted.
"""

import httpx2
import openai
import pytest

from pilotlight.common.errors import CapacityError, TransientError, all_errors
from pilotlight.gateway.edge.errors import error_headers
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.gateway.testing import API_KEY

pytestmark = pytest.mark.anyio

PROMPT = {"model": "fox", "prompt": "x"}


def official(world, **changes):
    """The client as its users make it: with its own retries."""
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{world.server.port}/v1", api_key=API_KEY, **changes
    )


def counted(world):
    """Answers by route, method, status and code."""
    (family,) = [one for one in world.metrics.collect() if one.name == "pilotlight_http_answers"]
    return {
        tuple(sample.labels[label] for label in ("route", "method", "status", "code")): int(
            sample.value
        )
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_a_request_whose_time_is_over_is_billed_once(world):
    worker = await world.worker()
    worker.script = lambda submit: entries_of(submit, world.ids("The quick brown fox"), finish=None)
    async with official(world) as client:
        assert client.max_retries == 2
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**PROMPT, extra_body={"timeout_s": 1.0})
    assert (caught.value.status_code, caught.value.code) == (503, "deadline_exceeded")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert [(row["status"], row["output_tokens"]) for row in world.usage.rows] == [
        ("deadline_exceeded", len(world.ids("The quick brown fox")))
    ]
    assert len(worker.submits) == 1


async def test_where_there_is_no_room_clients_come_back(make_world):
    world = await make_world(max_requests=1)
    async with official(world) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**PROMPT, n=2)
    headers = caught.value.response.headers
    assert (headers["x-should-retry"], headers["retry-after"]) == ("true", "1")
    assert counted(world)["/v1/completions", "POST", "429", "queue_full"] == 3
    assert world.usage.rows == []


def test_what_an_error_says_of_a_retry_is_what_its_header_says():
    again = {
        kind.code for kind in all_errors() if error_headers(kind())["x-should-retry"] == "true"
    }
    known = {kind.code for kind in all_errors() if issubclass(kind, CapacityError | TransientError)}
    assert known - again == {"deadline_exceeded", "no_worker"}
    assert again < known


async def test_every_answer_is_counted(world):
    worker = await world.worker()
    await world.client.completions.create(**PROMPT)
    await world.http.post("/v1/completions", content=b"{")
    await world.http.post(
        "/v1/chat/completions", json={}, headers={"authorization": "Bearer nobody"}
    )
    await world.http.post("/v1/completions", json={**PROMPT, "model": "none"})
    await world.http.get("/v1/models/some/name")
    await world.http.get("/v1/models/another/name")
    await world.http.get("/nowhere/at/all")
    await world.http.get("/v1/completions")
    await world.http.request("PROPFIND", "/healthz")
    worker.script = lambda submit: entries_of(submit, world.ids("The quick"), finish=None)
    await world.http.post("/v1/completions", json={**PROMPT, "stream": True, "timeout_s": 1.0})
    with pytest.raises(httpx2.ReadTimeout):
        await world.http.post("/v1/completions", json=PROMPT, timeout=0.3)
    completions = "/v1/completions"
    expected = {
        (completions, "POST", "200", ""): 1,
        (completions, "POST", "400", "invalid_request"): 1,
        ("/v1/chat/completions", "POST", "401", "invalid_api_key"): 1,
        (completions, "POST", "404", "model_not_found"): 1,
        ("/v1/models/{name:path}", "GET", "404", "model_not_found"): 2,
        ("none", "GET", "404", "route_not_found"): 1,
        (completions, "GET", "405", "method_not_allowed"): 1,
        ("/healthz", "other", "405", "method_not_allowed"): 1,
        (completions, "POST", "200", "deadline_exceeded"): 1,
        (completions, "POST", "499", "client_gone"): 1,
    }
    await world.until(lambda: sum(counted(world).values()) == sum(expected.values()))
    assert counted(world) == expected
