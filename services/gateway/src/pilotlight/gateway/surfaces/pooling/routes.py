"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.edge.http import Answering
from pilotlight.gateway.openai.names import for_task
from pilotlight.gateway.openai.told import tell_readiness
from pilotlight.gateway.schema.pooling import (
    Document,
    EmbeddingRequest,
    Ranked,
    Reranked,
    RerankRequest,
    Score,
    ScoreRequest,
    Scores,
)
from pilotlight.gateway.surfaces.pooling.embedding import Embedder, PoolingParts, values_of
from pilotlight.gateway.surfaces.pooling.pooled import PooledExchange
from pilotlight.policy.pooling import Task

EMBEDDINGS_PATH = "/v1/embeddings"
RERANK_PATH = "/v1/rerank"
SCORE_PATH = "/v1/score"


class PoolingRoutes:
    """The handlers."""

    def __init__(self, parts: PoolingParts) -> None:
        self._parts = parts
        self._api = parts.api
        self._embedder = Embedder(parts)

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(EMBEDDINGS_PATH, self.embeddings, methods=["POST"]),
            Route(RERANK_PATH, self.rerank, methods=["POST"]),
            Route(SCORE_PATH, self.score, methods=["POST"]),
        ]

    async def embeddings(self, request: Request) -> ASGIApp:
        """Vectors of texts."""
        asker = await self._api.asker(request)
        body = await self._api.read(request, EmbeddingRequest, asker.key)
        embedded = await self._embedder.begin(request.scope, asker, body)

        async def answer() -> Response:
            return Response(await embedded.whole(), media_type="application/json")

        return Answering(answer)

    async def rerank(self, request: Request) -> ASGIApp:
        """Documents by how relevant they are to a query."""
        asker = await self._api.asker(request)
        body = await self._api.read(request, RerankRequest, asker.key)
        entry = for_task(await self._api.entry(body.model, asker.key), Task.SCORE)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        parts = self._parts
        prompts = await parts.prompts.of_pairs(
            entry,
            [(body.query, text) for text in texts],
            asker.key.key_id,
            param="documents",
            truncate=body.truncate_prompt_tokens,
            instruction=body.instruction,
        )
        exchange = PooledExchange(
            parts.exchanges, parts.limits, asker, entry, prompts, request.scope
        )
        tell_readiness(request.scope, parts.exchanges.starts.readiness(entry.model))

        async def answer() -> Response:
            scores = [values_of(vector)[0] for vector in await exchange.vectors(body.timeout_s)]
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            results = [
                Ranked(
                    index=index,
                    relevance_score=scores[index],
                    document=Document(text=texts[index])
                    if body.return_documents
                    else msgspec.UNSET,
                )
                for index in order[: body.top_n]
            ]
            return _json(
                Reranked(
                    id=f"rerank-{asker.request_id}",
                    model=entry.model.name,
                    results=results,
                    usage=exchange.usage,
                )
            )

        return Answering(answer)

    async def score(self, request: Request) -> ASGIApp:
        """How well pairs of texts go together."""
        asker = await self._api.asker(request)
        body = await self._api.read(request, ScoreRequest, asker.key)
        entry = for_task(await self._api.entry(body.model, asker.key), Task.SCORE)
        parts = self._parts
        prompts = await parts.prompts.of_pairs(
            entry,
            _pairs(body.text_1, body.text_2),
            asker.key.key_id,
            param="text_2",
            truncate=body.truncate_prompt_tokens,
            instruction=body.instruction,
        )
        exchange = PooledExchange(
            parts.exchanges, parts.limits, asker, entry, prompts, request.scope
        )
        tell_readiness(request.scope, parts.exchanges.starts.readiness(entry.model))

        async def answer() -> Response:
            vectors = await exchange.vectors(body.timeout_s)
            return _json(
                Scores(
                    id=f"score-{asker.request_id}",
                    created=self._api.now_unix_s(),
                    model=entry.model.name,
                    data=[
                        Score(index=index, score=values_of(vector)[0])
                        for index, vector in enumerate(vectors)
                    ],
                    usage=exchange.usage,
                )
            )

        return Answering(answer)


def _pairs(first: str | list[str], second: str | list[str]) -> Sequence[tuple[str, str]]:
    """One first text with each second one, or the texts of both in turn."""
    firsts = [first] if isinstance(first, str) else first
    seconds = [second] if isinstance(second, str) else second
    if not seconds or len(firsts) not in (1, len(seconds)):
        raise BadRequest(
            f"{len(firsts)} texts and {len(seconds)}: text_1 is one, or as many as text_2",
            param="text_1",
        )
    return list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
