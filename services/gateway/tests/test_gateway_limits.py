"""Limits of keys and projects as clients meet them: headers, refusals, ends."""

import asyncio
from typing import Any

import httpx2
import pytest

from pilotlight.common.testing import until
from pilotlight.gateway.limits.limiter import duration
from pilotlight.gateway.testing import LIMITED_KEY
from pilotlight.policy.tenants import Tenant, TenantLimits

pytestmark = pytest.mark.anyio

HEADERS = {"authorization": f"Bearer {LIMITED_KEY}"}
BODY = {"model": "fox", "prompt": "hello", "max_tokens": 4}


def limited(world: Any, **limits: int) -> None:
    world.keys.tenant = Tenant(project="acme/one", key_limits=TenantLimits(**limits))


async def ask(world: Any, path: str = "/v1/completions", **body: Any) -> httpx2.Response:
    return await world.http.post(path, json={**BODY, **body}, headers=HEADERS)


async def test_requests_per_minute(world) -> None:
    await world.worker()
    limited(world, requests_per_minute=3)
    left = [(await ask(world)).headers["x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == ["2", "1", "0"]
    refused = await ask(world)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
    assert error["message"].startswith("Rate limit reached for this key on requests per min (RPM)")
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-should-retry"] == "true"
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    # What was refused is nobody's usage.
    assert len(world.usage.rows) == 3


@pytest.mark.parametrize(("per_minute", "code"), [(1, "rate_limit_exceeded"), (9, "too_many_held")])
async def test_while_a_line_is_full_a_key_above_its_rate_is_told_of_that(
    make_world, per_minute: int, code: str
) -> None:
    world = await make_world(max_held=1, max_held_per_model=1)
    limited(world, requests_per_minute=per_minute)
    waiting = asyncio.create_task(ask(world))
    await until(lambda: world.serving.queue.held == 1)
    for _ in range(2):
        refused = await ask(world)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, code)
    counted = {"model": "fox", "status": "too_many_held"}
    told = world.metrics.get_sample_value("pilotlight_requests_total", counted) or 0
    assert told == (2 if code == "too_many_held" else 0)
    if per_minute == 1:
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    await world.worker()
    assert (await waiting).status_code == 200


async def test_a_key_without_limits_hears_of_none(world) -> None:
    await world.worker()
    answer = await world.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tokens_per_minute_count_what_was_used(world) -> None:
    await world.worker(answer="ab")
    limited(world, tokens_per_minute=100)
    first = await ask(world, max_tokens=60)
    usage = first.json()["usage"]["total_tokens"]
    assert usage < 20
    # At its beginning the estimate was taken; it ended with less.
    assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 40
    second = await ask(world, max_tokens=60)
    assert second.status_code == 200, second.text
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert 100 - 60 - 2 * usage <= left <= 40 - usage + 1


async def test_tokens_that_are_not_there_are_refused(world) -> None:
    limited(world, tokens_per_minute=100)
    waiting = asyncio.create_task(ask(world, max_tokens=60))
    await until(lambda: world.serving.queue.held == 1)
    refused = await ask(world, max_tokens=60)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "tokens"
    assert int(refused.headers["retry-after"]) >= 1
    await world.worker()
    assert (await waiting).status_code == 200


async def test_what_can_never_be_let_in_is_not_to_be_tried_again(world) -> None:
    limited(world, tokens_per_minute=100)
    refused = await ask(world, max_tokens=1000)
    assert refused.status_code == 413
    assert refused.headers["x-should-retry"] == "false"
    assert refused.json()["error"]["param"] == "max_tokens"


async def test_a_project_limits_all_its_keys_together(world) -> None:
    await world.worker()
    world.keys.tenant = Tenant(
        project="acme/one",
        key_limits=TenantLimits(requests_per_minute=10),
        project_limits=TenantLimits(requests_per_minute=2),
    )
    answers = [await ask(world) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert "the project acme/one" in answers[2].json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_places_are_free_again_when_a_request_ends_or_its_client_leaves(
    world, *, stream: bool
) -> None:
    limited(world, concurrent_requests=1)
    waiting = asyncio.create_task(ask(world, stream=stream))
    await until(lambda: world.serving.queue.held == 1)
    refused = await ask(world)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    waiting.cancel()
    await until(lambda: world.serving.queue.held == 0)
    await world.worker()
    for _ in range(2):
        assert (await ask(world, stream=stream)).status_code == 200


async def test_a_budget_that_is_used_up_is_a_quota(world) -> None:
    await world.worker(answer="ab")
    limited(world, tokens_per_month=50)
    world.budgets.used_before["key/key-limited"] = 49
    last = await ask(world)
    assert last.status_code == 200
    refused = await ask(world)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers


async def test_limits_hold_in_every_shape(world) -> None:
    await world.worker()
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        ("/api/chat", {"messages": messages}),
    ):
        limited(world, requests_per_minute=1)
        world.keys.tenant = Tenant(project=path, project_limits=TenantLimits(requests_per_minute=1))
        asked = {"model": "fox", **body}
        answers = [await world.http.post(path, json=asked, headers=HEADERS) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429], (path, answers[1].text)
        assert "retry-after" in answers[1].headers


async def test_a_stream_is_refused_before_it_begins(world) -> None:
    await world.worker()
    limited(world, requests_per_minute=1)
    assert (await ask(world, stream=True)).status_code == 200
    refused = await ask(world, stream=True)
    assert refused.status_code == 429
    assert refused.headers["content-type"] == "application/json"


async def test_new_limits_hold_at_once_and_what_is_owed_stays(world) -> None:
    await world.worker()
    limited(world, requests_per_minute=2)
    for _ in range(2):
        await ask(world)
    limited(world, requests_per_minute=10)
    answer = await ask(world)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (200, "7")


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [duration(seconds) for seconds in (0, 0.0171, 1, 1.5, 60, 360.4)] == [
        "0ms",
        "17ms",
        "1s",
        "1.5s",
        "1m0s",
        "6m0s",
    ]
