"""Routes of ``/v1``: check the key, read the body, hand over."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.common.clock import Clock
from pilotlight.common.errors import ModelNotFound, QueueFull
from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.auth import KeyInfo, Role
from pilotlight.gateway.edge.http import read_body
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.answer import Answer
from pilotlight.gateway.openai.chat import ChatShapes
from pilotlight.gateway.openai.completions import CompletionShapes
from pilotlight.gateway.openai.conversation import conversation_of
from pilotlight.gateway.openai.document import openapi_document
from pilotlight.gateway.openai.exchange import Choice, Exchange, ExchangeParts
from pilotlight.gateway.openai.parameters import (
    Options,
    count_choices,
    limit_of,
    options_of,
    sampling_of,
    seed_of_choice,
)
from pilotlight.gateway.openai.prompt import PromptEncoder, prompts_of
from pilotlight.gateway.openai.tools import NO_TOOLS, ToolUse, tool_use_of
from pilotlight.gateway.schema.replies import ModelCard, ModelList
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest
from pilotlight.gateway.serving.token_request import TokenRequest
from pilotlight.policy.ids import RequestId

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
    tools: ToolUse = NO_TOOLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may take."""

    max_body_bytes: int
    max_requests: int
    """Answers that are made at a time, those of all requests."""
    max_choices: int
    """Answers to one request."""
    request_timeout_s: float
    """From its arrival to its last token."""


class OpenAiApi:
    """The handlers of ``/v1``."""

    def __init__(
        self,
        models: Models,
        keys: Keys,
        exchanges: ExchangeParts,
        encoder: PromptEncoder,
        limits: Limits,
    ) -> None:
        self._models = models
        self._keys = keys
        self._exchanges = exchanges
        self._clock: Clock = exchanges.clock
        self._limits = limits
        self._encoder = encoder
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
        body = await self._encoder.read(
            await read_body(request, self._limits.max_body_bytes, key.key_id),
            ChatRequest,
            key.key_id,
        )
        entry = await self._entry(body.model)
        options = options_of(body)
        tools = tool_use_of(body, entry.text)
        asked = _Asked(
            RequestId(request.state.request_id), entry, body, options, key, arrived_s, tools
        )
        count_choices(body, 1, self._limits.max_choices)
        conversation = conversation_of(body, entry.text.tools, tools)
        exchange = self._exchange(
            asked, [await self._encoder.chat(entry, conversation, key.key_id)]
        )
        return exchange.response(
            ChatShapes(asked.request_id, body.model, self._now_unix_s(), options, tools)
        )

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        arrived_s = self._clock.monotonic_s()
        key = await self._keys.require(request.headers, "inference")
        body = await self._encoder.read(
            await read_body(request, self._limits.max_body_bytes, key.key_id),
            CompletionRequest,
            key.key_id,
        )
        entry = await self._entry(body.model)
        options = options_of(body)
        asked = _Asked(RequestId(request.state.request_id), entry, body, options, key, arrived_s)
        prompts = prompts_of(body.prompt)
        count_choices(body, len(prompts), self._limits.max_choices)
        exchange = self._exchange(
            asked, [await self._encoder.completion(entry, prompt, key.key_id) for prompt in prompts]
        )
        return exchange.response(
            CompletionShapes(asked.request_id, body.model, self._now_unix_s(), options)
        )

    async def models(self, request: Request) -> Response:
        """Every model."""
        await self._keys.require(request.headers, "inference")
        entries = [
            entry for name in self._models.names() if (entry := self._models.get(name)) is not None
        ]
        return _json(ModelList(data=[_model_card(entry) for entry in entries]))

    async def model(self, request: Request) -> Response:
        """One model; names may hold slashes."""
        await self._keys.require(request.headers, "inference")
        return _json(_model_card(await self._entry(request.path_params["name"])))

    async def openapi(self, _: Request) -> Response:
        """The API's description: open."""
        return Response(self._document, media_type="application/json")

    def _exchange(self, asked: _Asked, prompts: Sequence[list[int]]) -> Exchange:
        choices: list[Choice] = []
        for prompt_ids in prompts:
            choices += self._choices(asked, prompt_ids, first_index=len(choices))
        if self._exchanges.requests.live + len(choices) > self._limits.max_requests:
            raise QueueFull(
                f"this gateway serves {self._exchanges.requests.live} requests, of {self._limits.max_requests} at most",
                retry_after_s=BUSY_RETRY_AFTER_S,
            )
        return Exchange(self._exchanges, choices, asked.options, asked.key.key_id)

    def _choices(self, asked: _Asked, prompt_ids: list[int], first_index: int) -> list[Choice]:
        """The answers to one prompt."""
        entry, options = asked.entry, asked.options
        sampling = sampling_of(
            asked.body,
            entry.model,
            len(prompt_ids),
            entry.text.eos_token_ids,
            self._rng,
            asked.tools,
        )
        first = TokenRequest(
            request_id=asked.request_id,
            model=entry.model,
            prompt_ids=prompt_ids,
            sampling=sampling,
            arrived_s=asked.arrived_s,
            trace_parent=current_traceparent(keep=True),
            shorten=limit_of(asked.body) is None,
            deadline_s=asked.arrived_s
            + min(asked.body.timeout_s or math.inf, self._limits.request_timeout_s),
        )
        choices: list[Choice] = []
        for number in range(asked.body.n or 1):
            index = first_index + number
            request = replace(
                first,
                request_id=RequestId(f"{asked.request_id}-{index}") if index else asked.request_id,
                sampling=replace(sampling, seed=seed_of_choice(sampling.seed, number)),
            )
            answer = Answer(
                entry.text,
                options.stops,
                asked.tools,
                logprobs=options.logprobs,
                include_stop=options.include_stop,
            )
            choices.append(Choice(index, self._exchanges, request, answer))
        return choices

    async def _entry(self, name: str) -> CatalogEntry:
        entry = await self._models.find(name)
        if entry is None:
            raise ModelNotFound(f"there is no model {name[:200]!r}", param="model")
        return entry

    def _now_unix_s(self) -> int:
        return int(self._clock.wall().timestamp())


def _model_card(entry: CatalogEntry) -> ModelCard:
    """What clients see of a model."""
    return ModelCard(
        id=entry.model.name,
        created=entry.created_unix_s,
        max_model_len=entry.model.spec.max_context_tokens,
    )


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
