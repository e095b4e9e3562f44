"""Refusals that stand: who asks for the same is told the same, and looked into no more."""

import asyncio
import json
from typing import Any

import pytest

from pilotlight.common.errors import TooManyHeld
from pilotlight.gateway.edge.departure import Receiving
from pilotlight.gateway.edge.refusals import MAX_STANDING, Refusals
from pilotlight.gateway.openai.api import OpenAiApi

pytestmark = pytest.mark.anyio

BODY = {"model": "fox", "prompt": "x", "max_tokens": 99}


class Given(Receiving):
    """A request whose body is there."""

    def __init__(self, body: bytes | None) -> None:
        self._body = body

    def body_there(self) -> bytes | None:
        return self._body


def scope_of(*more: tuple[bytes, bytes], key: bytes = b"Bearer one", path: str = "/v1/x") -> Any:
    return {"path": path, "headers": [(b"host", b"here"), (b"authorization", key), *more]}


async def test_a_refusal_stands_for_its_key_path_and_model_and_for_a_moment(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("pilotlight.gateway.edge.refusals._now_s", lambda: now_s[0])
    refusals, counted = Refusals(), []
    error = TooManyHeld("full", retry_after_s=2.0)
    body = Given(b'{"messages": [{"model": "cat"}], "model": "fox"}')
    assert refusals.again(scope_of(), body) is None
    refusals.note(scope_of(), "fox", error, lambda: counted.append(1))
    again = refusals.again(scope_of(), body)
    assert again is not None
    assert again.error is error
    for other in (b'{"model": "cat"}', b'{"model": 3}', b"{", b'{"a": "\xff"}', b"[" * 5000, None):
        assert refusals.again(scope_of(), Given(other)) is None
    assert refusals.again(scope_of(key=b"Bearer two"), body) is None
    assert refusals.again(scope_of(path="/v1/y"), body) is None
    assert refusals.again(scope_of((b"traceparent", b"00-1")), body) is None
    assert refusals.again(scope_of((b"x-pilotlight-cold-start", b"never")), body) is None
    now_s[0] += 0.06
    assert refusals.again(scope_of(), body) is None
    now_s[0] -= 0.06
    assert refusals.again(scope_of(), body) is None, "it was forgotten"


async def test_a_bounded_number_stands():
    refusals = Refusals()
    for number in range(3 * MAX_STANDING):
        refusals.note(scope_of(), f"m{number}", TooManyHeld("full"), lambda: None)
    assert len(refusals._standing) <= MAX_STANDING


async def test_what_is_refused_again_is_counted_and_has_an_id_of_its_own(make_world, monkeypatch):
    looked: list[str] = []
    asker = OpenAiApi.asker

    async def looking(self: OpenAiApi, *more: Any, **named: Any) -> Any:
        looked.append("")
        return await asker(self, *more, **named)

    monkeypatch.setattr(OpenAiApi, "asker", looking)
    world = await make_world(max_held=1, max_held_per_model=1)
    waiting = asyncio.create_task(world.http.post("/v1/completions", json=BODY))
    await world.until(lambda: world.serving.queue.held == 1)
    monkeypatch.setattr("pilotlight.gateway.edge.refusals.STANDS_S", 3600.0)
    looked.clear()
    answers = [await world.http.post("/v1/completions", json=BODY) for _ in range(4)]
    assert len(looked) == 1
    assert {answer.status_code for answer in answers} == {429}
    assert len({answer.text for answer in answers}) == 1
    assert json.loads(answers[-1].text)["error"]["code"] == "too_many_held"
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4
    assert int(answers[-1].headers["retry-after"]) >= 1
    counted = {"model": "fox", "status": "too_many_held"}
    assert world.metrics.get_sample_value("pilotlight_requests_total", counted) == 4
    told = {
        "route": "/v1/completions", "method": "POST", "status": "429", "code": "too_many_held"
    }  # fmt: skip
    assert world.metrics.get_sample_value("pilotlight_http_answers_total", told) == 4
    await world.worker()
    assert (await waiting).status_code == 200
