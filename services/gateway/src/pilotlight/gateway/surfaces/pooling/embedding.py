"""Vectors of texts, whichever route asks for them."""

import base64
import struct
from dataclasses import dataclass

import msgspec
from starlette.types import Scope

from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.api import Limits, OpenAiApi
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.choice import ExchangeParts
from pilotlight.gateway.openai.names import for_task
from pilotlight.gateway.openai.told import tell_readiness
from pilotlight.gateway.schema.pooling import Embedding, EmbeddingRequest, Embeddings
from pilotlight.gateway.surfaces.pooling.pooled import PooledExchange
from pilotlight.gateway.surfaces.pooling.prompts import PooledPrompts
from pilotlight.policy.pooling import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParts:
    """What makes vectors and scores."""

    api: OpenAiApi
    prompts: PooledPrompts
    exchanges: ExchangeParts
    limits: Limits


@dataclass(frozen=True, slots=True)
class Embedded:
    """A request for vectors that nothing is in the way of."""

    entry: CatalogEntry
    body: EmbeddingRequest
    exchange: PooledExchange

    async def vectors(self) -> list[bytes]:
        """Of each text, in order; raises what ``PooledExchange.vectors`` does."""
        return await self.exchange.vectors(self.body.timeout_s)

    async def whole(self) -> bytes:
        """The body of the answer, in OpenAI's shape; raises as ``vectors``."""
        as_text = self.body.encoding_format == "base64"
        data = [
            Embedding(
                index=index,
                embedding=base64.b64encode(vector).decode() if as_text else values_of(vector),
            )
            for index, vector in enumerate(await self.vectors())
        ]
        name = self.entry.model.name
        return msgspec.json.encode(Embeddings(data=data, model=name, usage=self.exchange.usage))


@dataclass(frozen=True, slots=True)
class Embedder:
    """Begins requests for vectors."""

    parts: PoolingParts

    async def begin(self, scope: Scope, asker: Asker, body: EmbeddingRequest) -> Embedded:
        """Find the model and encode the texts.

        Raises:
            PilotlightError: the model is not there, or the texts are not what it takes, or there is
                no place.
        """
        parts, key = self.parts, asker.key
        entry = for_task(await parts.api.entry(body.model, key), Task.EMBED)
        prompts = await parts.prompts.of_inputs(entry, body, key.key_id)
        exchange = PooledExchange(parts.exchanges, parts.limits, asker, entry, prompts, scope)
        tell_readiness(scope, parts.exchanges.starts.readiness(entry.model))
        return Embedded(entry, body, exchange)

    async def whole(self, scope: Scope, asker: Asker, body: EmbeddingRequest) -> bytes:
        """The whole answer; raises what ``begin`` and ``Embedded.whole`` do."""
        return await (await self.begin(scope, asker, body)).whole()


def values_of(vector: bytes) -> list[float]:
    """The numbers of a vector, as engines send it."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
