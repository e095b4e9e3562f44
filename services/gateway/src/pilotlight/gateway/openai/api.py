"""Routes of ``/v1``: check the key, read the body, hand over."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.common.clock import Clock
from pilotlight.common.errors import ModelNotFound, QueueFull
from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.auth import KeyInfo, Role
from pilotlight.gateway.catalog import CatalogEntry
from pilotlight.gateway.http import read_body
from pilotlight.gateway.openai.answer import Answer
from pilotlight.gateway.openai.chat import ChatShapes
from pilotlight.gateway.openai.completions import CompletionShapes
from pilotlight.gateway.openai.document import openapi_document
from pilotlight.gateway.openai.exchange import Exchange, ExchangeParts
from pilotlight.gateway.openai.models import model_card
from pilotlight.gateway.openai.parameters import Options, decode_body, limit_of, options_of, sampling_of
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.openai.types import ChatRequest, CompletionRequest, ModelList
from pilotlight.gateway.requests import TokenRequest
from pilotlight.policy.types import RequestId

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
OPENAPI_PATH = "/v1/openapi.json"
API_VERSION = "1"
BUSY_RETRY_AFTER_S = 1.0


class Models(Protocol):
    """Which models there are (``Catalog``)."""

    def get(self, name: str) -> CatalogEntry | None:
        """One model, or None."""
        ...

    async def find(self, name: str) -> CatalogEntry | None:
        """As ``get``; looks again before it says None."""
        ...

    def names(self) -> tuple[str, ...]:
        """Every model's name, sorted."""
        ...


class Keys(Protocol):
    """Who may ask (``Authenticator``)."""

    async def require(self, headers: Mapping[str, str], role: Role) -> KeyInfo:
        """Whose request it is.

        Raises:
            Unauthorized, Forbidden: it may not be answered.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    request_id: RequestId
    entry: CatalogEntry
    body: ChatRequest | CompletionRequest
    options: Options
    key: KeyInfo
    arrived_s: float


class OpenAiApi:
    """The handlers of ``/v1``."""

    def __init__(
        self,
        models: Models,
        keys: Keys,
        exchanges: ExchangeParts,
        *,
        max_body_bytes: int,
        max_requests: int,
    ) -> None:
        self._models = models
        self._keys = keys
        self._exchanges = exchanges
        self._clock: Clock = exchanges.clock
        self._max_body_bytes = max_body_bytes
        self._max_requests = max_requests
        self._encoder = PromptEncoder()
        self._rng = random.SystemRandom()
        self._document = msgspec.json.encode(openapi_document(API_VERSION))

    def routes(self) -> list[Route]:
        """Everything below ``/v1``."""
        return [
            Route(CHAT_PATH, self.chat, methods=["POST"]),
            Route(COMPLETIONS_PATH, self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route(OPENAPI_PATH, self.openapi, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        arrived_s = self._clock.monotonic_s()
        key = await self._keys.require(request.headers, "inference")
        body = decode_body(await read_body(request, self._max_body_bytes), ChatRequest)
        entry = await self._entry(body.model)
        options = options_of(body)
        asked = _Asked(RequestId(request.state.request_id), entry, body, options, key, arrived_s)
        exchange = self._exchange(asked, await self._encoder.chat(entry, body.messages))
        return exchange.response(ChatShapes(asked.request_id, body.model, self._now_unix_s(), options))

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        arrived_s = self._clock.monotonic_s()
        key = await self._keys.require(request.headers, "inference")
        body = decode_body(await read_body(request, self._max_body_bytes), CompletionRequest)
        entry = await self._entry(body.model)
        options = options_of(body)
        asked = _Asked(RequestId(request.state.request_id), entry, body, options, key, arrived_s)
        exchange = self._exchange(asked, await self._encoder.completion(entry, body.prompt))
        return exchange.response(CompletionShapes(asked.request_id, body.model, self._now_unix_s(), options))

    async def models(self, request: Request) -> Response:
        """Every model."""
        await self._keys.require(request.headers, "inference")
        entries = [entry for name in self._models.names() if (entry := self._models.get(name)) is not None]
        return _json(ModelList(data=[model_card(entry) for entry in entries]))

    async def model(self, request: Request) -> Response:
        """One model; names may hold slashes."""
        await self._keys.require(request.headers, "inference")
        return _json(model_card(await self._entry(request.path_params["name"])))

    async def openapi(self, _: Request) -> Response:
        """The API's description: open."""
        return Response(self._document, media_type="application/json")

    def _exchange(self, asked: _Asked, prompt_ids: list[int]) -> Exchange:
        entry, options = asked.entry, asked.options
        sampling = sampling_of(asked.body, entry.model, len(prompt_ids), entry.text.eos_token_ids, self._rng)
        if self._exchanges.requests.live >= self._max_requests:
            raise QueueFull(f"this gateway already serves {self._max_requests} requests", retry_after_s=BUSY_RETRY_AFTER_S)
        token_request = TokenRequest(
            request_id=asked.request_id,
            model=entry.model,
            prompt_ids=prompt_ids,
            sampling=sampling,
            arrived_s=asked.arrived_s,
            trace_parent=current_traceparent(keep=True),
            shorten=limit_of(asked.body) is None,
        )
        answer = Answer(entry.text, options.stops, len(prompt_ids), logprobs=options.logprobs)
        return Exchange(self._exchanges, token_request, answer, options, asked.key.key_id)

    async def _entry(self, name: str) -> CatalogEntry:
        entry = await self._models.find(name)
        if entry is None:
            raise ModelNotFound(f"there is no model {name[:200]!r}", param="model")
        return entry

    def _now_unix_s(self) -> int:
        return int(self._clock.wall().timestamp())


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
