"""Keys that are for some models, or for some routes."""

from typing import Any

import httpx2
import pytest

from pilotlight.gateway.testing import CHAT_KEY, ELSEWHERE_KEY

pytestmark = pytest.mark.anyio

MODEL = "fox"
MESSAGES = [{"role": "user", "content": "hello"}]
ASKING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/embeddings", {"input": "hello"}),
    ("/v1/rerank", {"query": "hello", "documents": ["world"]}),
    ("/v1/score", {"text_1": "hello", "text_2": "world"}),
    ("/api/chat", {"messages": MESSAGES}),
    ("/api/generate", {"prompt": "hello"}),
    ("/api/show", {}),
    ("/api/pull", {}),
)


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def told(answer: httpx2.Response) -> str:
    """The body without the request's id."""
    return answer.text.replace(answer.headers["x-request-id"], "")


@pytest.mark.parametrize(("path", "body"), ASKING, ids=[path for path, _ in ASKING])
async def test_a_model_beyond_the_scope_is_not_there(
    world, path: str, body: dict[str, Any]
) -> None:
    asked = {"model": MODEL, **body}
    answer = await world.http.post(path, json=asked, headers=headers(ELSEWHERE_KEY))
    unknown = await world.http.post(
        path, json={**asked, "model": "nowhere"}, headers=headers(ELSEWHERE_KEY)
    )
    assert answer.status_code == unknown.status_code == 404, answer.text
    # Nothing tells a model of another tenant from one that there is not.
    assert told(answer).replace(MODEL, "nowhere") == told(unknown)
    assert not world.usage.rows


async def test_models_beyond_the_scope_are_not_listed(world) -> None:
    for path, models in (("/v1/models", "data"), ("/api/tags", "models"), ("/api/ps", "models")):
        answer = await world.http.get(path, headers=headers(ELSEWHERE_KEY))
        assert (answer.status_code, answer.json()[models]) == (200, []), path
    assert len((await world.http.get("/v1/models")).json()["data"]) == 1
    one = await world.http.get(f"/v1/models/{MODEL}", headers=headers(ELSEWHERE_KEY))
    assert one.status_code == 404


async def test_a_key_for_some_routes_is_refused_on_others(world) -> None:
    await world.worker()
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    answer = await world.http.post("/v1/chat/completions", json=body, headers=headers(CHAT_KEY))
    assert answer.status_code == 200, answer.text
    for path, asked in ASKING[1:]:
        refused = await world.http.post(
            path, json={"model": MODEL, **asked}, headers=headers(CHAT_KEY)
        )
        assert refused.status_code == 403, path
    assert (await world.http.get("/v1/models", headers=headers(CHAT_KEY))).status_code == 403
