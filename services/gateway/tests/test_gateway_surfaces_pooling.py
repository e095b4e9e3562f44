"""Embeddings, rerank and score, with OpenAI's client where it has them."""

import asyncio
import struct

import jsonschema
import openai
import pytest

from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.gateway.openai.document import openapi_document
from pilotlight.policy.pooling import Pooled, Pooling, PoolingMode, Task
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

EMBEDS = Pooling(mode=PoolingMode.LAST, normalize=True)
MATRYOSHKA = Pooling(mode=PoolingMode.MEAN, normalize=True, dimensions=(2, 4))
SCORES = Pooling(mode=PoolingMode.CLS, task=Task.SCORE, sigmoid=True)
TEXTS = ["The quick brown fox", "jumps", "over the lazy dogs, twice", "fox"]


def packed(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


async def pooling_worker(world, *, tells: bool = True, ready: bool = True):
    """Its vector says how long a text is, and its score is higher for longer ones."""
    worker = await world.worker(ready=ready)

    def script(submit) -> list[TokenEntry]:
        tokens = len(submit.prompt_ids)
        scored = world.entry.model.spec.task is Task.SCORE
        vector = packed(1 - 1 / tokens) if scored else packed(tokens, 0.5, -0.25)
        return [
            TokenEntry(
                request_id=submit.request_id,
                attempt=submit.attempt,
                seq=0,
                token_ids=[0],
                finish=FinishReason.LENGTH,
                vector=vector if tells else None,
            )
        ]

    worker.script = script
    return worker


@pytest.fixture
async def embedding(make_world):
    world = await make_world(pooling=EMBEDS, max_context_tokens=64)
    await pooling_worker(world)
    return world


@pytest.fixture
async def scoring(make_world):
    world = await make_world(pooling=SCORES, max_context_tokens=64)
    await pooling_worker(world)
    return world


def lengths(world, texts: list[str]) -> list[int]:
    return [len(world.tokenizer.raw.encode(text).ids) for text in texts]


async def test_openais_client_gets_vectors_in_order(embedding):
    answer = await embedding.client.embeddings.create(model="fox", input=TEXTS)
    counted = lengths(embedding, TEXTS)
    assert [each.embedding for each in answer.data] == [[n, 0.5, -0.25] for n in counted]
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "fox", "embedding")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(counted)
    plain = await embedding.client.embeddings.create(
        model="fox", input=TEXTS, encoding_format="float"
    )
    assert [each.embedding for each in plain.data] == [each.embedding for each in answer.data]


async def test_a_request_asks_for_what_the_model_has(embedding):
    await embedding.client.embeddings.create(model="fox", input="fox", dimensions=4)
    (submit,) = (ran.submit for ran in embedding.workers[0].ran.values())
    assert submit.sampling.pooled == Pooled(mode=PoolingMode.LAST, dimensions=4)
    assert (submit.sampling.max_tokens, submit.sampling.stop_token_ids) == (1, ())


async def test_usage_is_noted_once_with_the_tokens_of_all_texts(embedding):
    await embedding.client.embeddings.create(model="fox", input=TEXTS)
    (row,) = embedding.usage.rows
    assert row["prompt_tokens"] == sum(lengths(embedding, TEXTS))
    assert (row["output_tokens"], row["status"], row["model"]) == (0, "ok", "fox")


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7], [8]]])
async def test_token_ids_are_taken_as_they_are(embedding, given):
    answer = await embedding.client.embeddings.create(model="fox", input=given)
    assert answer.usage.prompt_tokens == (3 if given[0] == 5 else 4)


async def test_many_texts_run_a_bounded_number_at_a_time(embedding):
    texts = ["fox " * (1 + index % 5) for index in range(200)]
    answer = await embedding.client.embeddings.create(model="fox", input=texts)
    assert [each.embedding[0] for each in answer.data] == lengths(embedding, texts)
    assert len({ran.submit.request_id for ran in embedding.workers[0].ran.values()}) == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["fox", 5]}, "input"),
        ({"input": ["fox", [5]]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[10**6]]}, "input"),
        ({"input": ["fox"] * 2049}, "input"),
        ({"input": "fox " * 100}, "input"),
        ({"input": [[5] * 65]}, "input"),
        ({"input": "fox", "dimensions": 9}, "dimensions"),
        ({"input": "fox", "dimensions": 0}, "dimensions"),
        ({"input": "fox", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "fox", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "fox", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(embedding, fields, param):
    refused = await embedding.http.post("/v1/embeddings", json={"model": "fox", **fields})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"].startswith(param)
    assert embedding.workers[0].ran == {}


async def test_the_limit_is_named_and_texts_are_cut_where_asked(embedding):
    body = {"model": "fox", "input": ["fox", "fox " * 100]}
    refused = await embedding.http.post("/v1/embeddings", json=body)
    message = refused.json()["error"]["message"]
    assert "input[1]" in message
    assert "64 tokens" in message
    for asked, left in ((-1, 64), (7, 7), (1000, 64)):
        cut = await embedding.http.post(
            "/v1/embeddings", json={**body, "truncate_prompt_tokens": asked}
        )
        assert cut.json()["data"][1]["embedding"][0] == left


async def test_only_the_lengths_that_the_model_was_trained_for_are_given(make_world):
    world = await make_world(pooling=MATRYOSHKA)
    await pooling_worker(world)
    await world.client.embeddings.create(model="fox", input="fox", dimensions=2)
    with pytest.raises(openai.BadRequestError, match="2, 4"):
        await world.client.embeddings.create(model="fox", input="fox", dimensions=3)


async def test_documents_come_back_the_best_first(scoring):
    body = {"model": "fox", "query": "brown", "documents": TEXTS}
    ranked = (await scoring.http.post("/v1/rerank", json=body)).json()
    tokens = lengths(scoring, TEXTS)
    expected = sorted(range(4), key=lambda index: -tokens[index])
    assert [each["index"] for each in ranked["results"]] == expected
    assert all(set(each) == {"index", "relevance_score"} for each in ranked["results"])
    two = {**body, "top_n": 2, "return_documents": True}
    two["documents"] = [{"text": text} for text in TEXTS]
    best = (await scoring.http.post("/v1/rerank", json=two)).json()["results"]
    assert [each["document"]["text"] for each in best] == [TEXTS[index] for index in expected[:2]]


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [("a", "b", 1), ("a", ["b", "c"], 2), (["a"], ["b", "c"], 2), (["a", "b"], ["c", "d"], 2)],
)
async def test_pairs_are_scored(scoring, first, second, pairs):
    body = {"model": "fox", "text_1": first, "text_2": second}
    scored = (await scoring.http.post("/v1/score", json=body)).json()
    assert [each["index"] for each in scored["data"]] == list(range(pairs))
    assert scored["usage"]["prompt_tokens"] == sum(
        len(ran.submit.prompt_ids) for ran in scoring.workers[0].ran.values()
    )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}),
        ("/v1/rerank", {"query": "", "documents": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 100]}),
        ("/v1/rerank", {"query": "a " * 90, "documents": ["b"], "truncate_prompt_tokens": 20}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
        ("/v1/score", {"text_1": "a", "text_2": []}),
    ],
)
async def test_what_cannot_be_scored_is_refused(scoring, path, fields):
    refused = await scoring.http.post(path, json={"model": "fox", **fields})
    assert refused.status_code == 400, refused.text


async def test_a_model_is_asked_for_what_it_is_for(world, scoring, embedding):
    chat = {"model": "fox", "messages": [{"role": "user", "content": "hello"}]}
    vectors = {"model": "fox", "input": "hello"}
    rank = {"model": "fox", "query": "a", "documents": ["b"]}
    asked = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"model": "fox", "prompt": "hello"},
        "/v1/messages": {**chat, "max_tokens": 5},
        "/v1/responses": {"model": "fox", "input": "hello"},
        "/api/chat": chat,
        "/v1/embeddings": vectors,
        "/v1/rerank": rank,
        "/v1/score": {"model": "fox", "text_1": "a", "text_2": "b"},
    }
    own = {
        Task.GENERATE: set(list(asked)[:5]),
        Task.EMBED: {"/v1/embeddings"},
        Task.SCORE: {"/v1/rerank", "/v1/score"},
    }
    for each in (world, scoring, embedding):
        task = each.entry.model.spec.task
        for path in asked.keys() - own[task]:
            refused = await each.http.post(path, json=asked[path])
            assert refused.status_code == 400, (task, path)
            assert f"task {task}" in refused.text
        card = (await each.http.get("/v1/models/fox")).json()
        assert card["task"] == task


async def test_an_engine_that_makes_no_vectors_is_an_error(make_world):
    world = await make_world(pooling=EMBEDS)
    await pooling_worker(world, tells=False)
    with pytest.raises(openai.InternalServerError, match="makes no vectors"):
        await world.client.embeddings.create(model="fox", input=TEXTS)
    assert world.usage.rows[0]["status"] != "ok"


async def test_of_many_texts_one_waits_for_a_cold_start(make_world):
    world = await make_world(pooling=EMBEDS)
    asking = asyncio.create_task(world.client.embeddings.create(model="fox", input=TEXTS * 20))
    await world.until(lambda: world.serving.queue.held > 0)
    assert world.serving.queue.held == 1
    worker = await pooling_worker(world)
    answer = await asking
    assert len(answer.data) == len(worker.ran) == 80


async def test_answers_are_as_they_are_described(scoring, embedding):
    document = openapi_document("1")
    asked = (
        (embedding, "/v1/embeddings", {"input": TEXTS}),
        (embedding, "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
        (scoring, "/v1/rerank", {"query": "a", "documents": TEXTS, "return_documents": True}),
        (scoring, "/v1/score", {"text_1": "a", "text_2": TEXTS}),
    )
    for world, path, body in asked:
        answer = await world.http.post(path, json={"model": "fox", **body})
        described = document["paths"][path]["post"]["responses"]["200"]["content"]
        schema = {**described["application/json"]["schema"], "components": document["components"]}
        jsonschema.validate(answer.json(), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
async def test_a_large_body_is_read_by_a_helper(scoring, embedding, path):
    text = "fox " * 30_000
    body = {
        "/v1/embeddings": {"input": text},
        "/v1/rerank": {"query": "a", "documents": [text]},
        "/v1/score": {"text_1": "a", "text_2": text},
    }[path]
    world = embedding if path == "/v1/embeddings" else scoring
    asked = {"model": "fox", "truncate_prompt_tokens": -1, **body}
    answer = await world.http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 64


async def test_ollamas_clients_get_the_vectors_of_texts_and_of_one(embedding):
    counted = lengths(embedding, TEXTS)
    body = {"model": "fox:latest", "input": TEXTS, "options": {"seed": 1}, "keep_alive": "5m"}
    answer = (await embedding.http.post("/api/embed", json=body)).json()
    assert answer["embeddings"] == [[n, 0.5, -0.25] for n in counted]
    assert (answer["model"], answer["prompt_eval_count"]) == ("fox", sum(counted))
    assert answer["total_duration"] > 0 == answer["load_duration"]
    one = await embedding.http.post("/api/embed", json={"model": "fox", "input": TEXTS[0]})
    assert one.json()["embeddings"] == [[counted[0], 0.5, -0.25]]
    old = await embedding.http.post("/api/embeddings", json={"model": "fox", "prompt": TEXTS[0]})
    assert old.json() == {"embedding": [counted[0], 0.5, -0.25]}
    assert [row["prompt_tokens"] for row in embedding.usage.rows] == [
        sum(counted),
        counted[0],
        counted[0],
    ]
    shown = await embedding.http.post("/api/show", json={"model": "fox"})
    assert shown.json()["capabilities"][0] == "embedding"


async def test_ollamas_clients_have_long_texts_cut_unless_they_say_no(embedding):
    body = {"model": "fox", "input": "fox " * 500}
    cut = await embedding.http.post("/api/embed", json=body)
    assert cut.json()["embeddings"] == [[64, 0.5, -0.25]]
    refused = await embedding.http.post("/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400
    assert "context_length_exceeded" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/embed", {"model": "fox", "input": []}, 400),
        ("/api/embed", {"model": "fox", "input": [""]}, 400),
        ("/api/embed", {"model": "fox", "input": [[1, 2]]}, 400),
        ("/api/embed", {"model": "fox"}, 400),
        ("/api/embed", {"model": "nobody", "input": "a"}, 404),
        ("/api/embeddings", {"model": "fox", "prompt": ""}, 400),
        ("/api/embeddings", {"model": "nobody", "prompt": "a"}, 404),
    ],
)
async def test_what_ollamas_clients_are_refused(embedding, path, body, status):
    answer = await embedding.http.post(path, json=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]


async def test_a_chat_model_makes_no_vectors_for_ollamas_clients(world):
    answer = await world.http.post("/api/embed", json={"model": "fox", "input": "a"})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
