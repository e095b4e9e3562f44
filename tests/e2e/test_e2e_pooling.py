"""Models that make vectors and scores on a whole system: registered, started by the first request,
and equal to transformers'.
"""

import base64
import struct
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import torch
from embedded_system import DEMO_FOLDER, RunningSystem, running
from pooled_models import save_pooled, save_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from pilotlight.gateway.surfaces.pooling.prompts import AFTER, BEFORE, INSTRUCTION

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a pilot light burns",
    "rain falls on the dog while the fox jumps and the light burns",
    "fox",
]
QUERY = "a light burns"
TOLERANCE = 1e-4
KINDS = {"bert": "mean", "qwen3_backbone": "lasttoken", "bert_cross": None, "qwen3_reranker": None}


def family_of(kind: str) -> str:
    return kind.split("_")[0]


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """Those that are served, as transformers has them."""
    return {}


@pytest.fixture(scope="module")
def system(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, PreTrainedModel]
) -> Iterator[RunningSystem]:
    place = tmp_path_factory.mktemp("pooling")
    place.chmod(0o755)
    for kind, mode in KINDS.items():
        (place / kind).mkdir()
        models[kind] = save_pooled(kind, place / kind, mode=mode)
        save_tokenizer(family_of(kind), place / kind)
    roots = {"PILOTLIGHT_MODEL_ROOTS": f"{place},{DEMO_FOLDER}"}
    with running(place / "home", environment=roots) as started:
        for kind in KINDS:
            started.cli("model", "add", kind, str(place / kind))
        started.cli("model", "add", "demo", str(DEMO_FOLDER))
        yield started


def tokenizer_of(system: RunningSystem, kind: str) -> Tokenizer:
    return Tokenizer.from_file(str(system.home.parent / kind / "tokenizer.json"))


def states_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


def post(system: RunningSystem, path: str, body: dict[str, Any]) -> httpx2.Response:
    bearer = {"Authorization": f"Bearer {system.key('api')}"}
    return httpx2.post(f"{system.url}{path}", json=body, headers=bearer, timeout=90)


@pytest.mark.parametrize("kind", ["bert", "qwen3_backbone"])
def test_vectors_are_those_of_transformers(
    kind: str, system: RunningSystem, models: dict[str, PreTrainedModel]
) -> None:
    tokenizer = tokenizer_of(system, kind)
    with system.openai() as client:
        answer = client.embeddings.create(model=kind, input=TEXTS)
        plain = client.embeddings.create(model=kind, input=TEXTS, encoding_format="float")
        cut = client.embeddings.create(model=kind, input=TEXTS[0], dimensions=16)
    rows = [tokenizer.encode(text).ids for text in TEXTS]
    assert answer.usage.prompt_tokens == sum(map(len, rows))
    assert answer.model == kind
    for got, again, row in zip(answer.data, plain.data, rows, strict=True):
        states = states_of(models[kind], row)
        vector = states.mean(dim=0) if kind == "bert" else states[-1]
        expected = (vector / vector.norm()).tolist()
        assert got.embedding == pytest.approx(expected, abs=TOLERANCE)
        assert again.embedding == pytest.approx(expected, abs=TOLERANCE)
    first = torch.tensor(plain.data[0].embedding)[:16]
    expected = (first / first.norm()).tolist()
    assert cut.data[0].embedding == pytest.approx(expected, abs=TOLERANCE)


def test_token_ids_are_taken_and_base64_is_float32(system: RunningSystem) -> None:
    ids = tokenizer_of(system, "bert").encode(TEXTS[0]).ids
    texts = post(
        system,
        "/v1/embeddings",
        {"model": "bert", "input": [TEXTS[0]], "encoding_format": "base64"},
    ).json()
    data = base64.b64decode(texts["data"][0]["embedding"])
    values = struct.unpack(f"<{len(data) // 4}f", data)
    assert len(values) == 48
    for given in (ids, [ids]):
        rows = post(system, "/v1/embeddings", {"model": "bert", "input": given}).json()
        assert rows["data"][0]["embedding"] == pytest.approx(values, abs=TOLERANCE)


def scores_by_transformers(
    kind: str, system: RunningSystem, model: PreTrainedModel, documents: list[str]
) -> list[float]:
    tokenizer, scores = tokenizer_of(system, kind), []
    for text in documents:
        with torch.inference_mode():
            if kind == "bert_cross":
                pair = tokenizer.encode(QUERY, text)
                given = {"input_ids": pair.ids, "token_type_ids": pair.type_ids}
                logit = model(**{name: torch.tensor([row]) for name, row in given.items()}).logits
                scores.append(float(logit.sigmoid()))
                continue
            asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {text}"
            ids: list[int] = []
            for part in (BEFORE, asked, AFTER):
                ids += tokenizer.encode(part, add_special_tokens=False).ids
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            answers = [tokenizer.token_to_id(word) for word in ("no", "yes")]
            scores.append(float(logits[answers].softmax(dim=-1)[1]))
    return scores


@pytest.mark.parametrize("kind", ["bert_cross", "qwen3_reranker"])
def test_documents_are_ranked_as_by_transformers(
    kind: str, system: RunningSystem, models: dict[str, PreTrainedModel]
) -> None:
    expected = scores_by_transformers(kind, system, models[kind], TEXTS)
    body = {"model": kind, "query": QUERY, "documents": TEXTS, "return_documents": True}
    ranked = post(system, "/v1/rerank", body).json()
    assert [each["index"] for each in ranked["results"]] == sorted(
        range(len(TEXTS)), key=lambda index: -expected[index]
    )
    for each in ranked["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-3)
        assert each["document"] == {"text": TEXTS[each["index"]]}
    best = post(system, "/v1/rerank", {**body, "top_n": 1}).json()
    # Alone or beside others a text is rounded differently.
    (first,) = best["results"]
    assert first == ranked["results"][0] | {"relevance_score": first["relevance_score"]}
    assert first["relevance_score"] == pytest.approx(expected[first["index"]], abs=1e-3)
    scored = post(system, "/v1/score", {"model": kind, "text_1": QUERY, "text_2": TEXTS}).json()
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-3)


def test_models_say_what_they_are_for_and_refuse_the_rest(system: RunningSystem) -> None:
    with system.openai() as client:
        tasks = {card.id: card.model_dump()["task"] for card in client.models.list()}
        assert tasks == {
            "bert": "embed",
            "qwen3_backbone": "embed",
            "bert_cross": "score",
            "qwen3_reranker": "score",
            "demo": "generate",
        }
        with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
            client.chat.completions.create(
                model="bert", messages=[{"role": "user", "content": "hello"}]
            )
        with pytest.raises(openai.BadRequestError, match="/v1/chat/completions"):
            client.embeddings.create(model="demo", input="hello")
        with pytest.raises(openai.BadRequestError, match="/v1/rerank"):
            client.embeddings.create(model="bert_cross", input="hello")


def test_texts_are_cut_where_that_is_asked_for(system: RunningSystem) -> None:
    body = {"model": "bert", "input": ["fox " * 200]}
    refused = post(system, "/v1/embeddings", body)
    assert refused.status_code == 400
    assert "maximum context length is 130 tokens" in refused.json()["error"]["message"]
    cut = post(system, "/v1/embeddings", {**body, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 130
    short = post(system, "/v1/embeddings", {**body, "truncate_prompt_tokens": 12}).json()
    whole = post(system, "/v1/embeddings", {"model": "bert", "input": "fox " * 10}).json()
    assert short["data"][0]["embedding"] == pytest.approx(
        whole["data"][0]["embedding"], abs=TOLERANCE
    )


def test_many_texts_come_back_in_order(system: RunningSystem) -> None:
    texts = [" ".join(["fox"] * (1 + index % 7)) for index in range(300)]
    with system.openai() as client:
        many = client.embeddings.create(model="bert", input=texts)
        few = client.embeddings.create(model="bert", input=texts[:7])
    assert [each.index for each in many.data] == list(range(300))
    for index, each in enumerate(many.data):
        assert each.embedding == pytest.approx(few.data[index % 7].embedding, abs=TOLERANCE)
