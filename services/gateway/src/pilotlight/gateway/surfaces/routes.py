"""Every route of the other shapes."""

from dataclasses import dataclass

from starlette.routing import Route

from pilotlight.common.clock import Clock
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.surfaces.messages.routes import MESSAGES_PATH, MessageRoutes
from pilotlight.gateway.surfaces.ollama.door import Door
from pilotlight.gateway.surfaces.ollama.routes import (
    CHAT_PATH,
    EMBED_PATH,
    GENERATE_PATH,
    OLD_EMBED_PATH,
    OllamaRoutes,
)
from pilotlight.gateway.surfaces.pooling.embedding import Embedder, PoolingParts
from pilotlight.gateway.surfaces.pooling.routes import (
    EMBEDDINGS_PATH,
    RERANK_PATH,
    SCORE_PATH,
    PoolingRoutes,
)
from pilotlight.gateway.surfaces.responses.routes import RESPONSES_PATH, ResponseRoutes
from pilotlight.gateway.surfaces.responses.store import ResponseStore
from pilotlight.gateway.surfaces.tokens import TokenRoutes

ANSWERING_PATHS = frozenset(
    {
        MESSAGES_PATH,
        RESPONSES_PATH,
        CHAT_PATH,
        GENERATE_PATH,
        EMBED_PATH,
        OLD_EMBED_PATH,
        EMBEDDINGS_PATH,
        RERANK_PATH,
        SCORE_PATH,
    }
)
"""Those whose requests go to the fleet: they are traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceParts:
    """What the other shapes are made with."""

    api: OpenAiApi
    encoder: PromptEncoder
    responses: ResponseStore
    clock: Clock
    door: Door
    pooling: PoolingParts


def surface_routes(parts: SurfaceParts) -> list[Route]:
    """Every route of the other shapes."""
    return [
        *TokenRoutes(parts.api, parts.encoder).routes(),
        *PoolingRoutes(parts.pooling).routes(),
        *MessageRoutes(parts.api).routes(),
        *ResponseRoutes(parts.api, parts.responses).routes(),
        *OllamaRoutes(parts.api, parts.clock, parts.door, Embedder(parts.pooling)).routes(),
    ]
