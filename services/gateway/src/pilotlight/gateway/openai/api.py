"""Routes of ``/v1``: check the key, read the body, hand over."""

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from pilotlight.common.clock import Clock
from pilotlight.common.errors import ModelNotFound, QueueFull
from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.auth import KeyInfo
from pilotlight.gateway.edge.client_headers import plain_headers
from pilotlight.gateway.edge.reading import read_body
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.answer import Answer
from pilotlight.gateway.openai.asker import Asker, Keys
from pilotlight.gateway.openai.chat import ChatShapes
from pilotlight.gateway.openai.choice import Choice, ExchangeParts
from pilotlight.gateway.openai.completions import CompletionShapes
from pilotlight.gateway.openai.conversation import conversation_of
from pilotlight.gateway.openai.document import openapi_document
from pilotlight.gateway.openai.early import check_room
from pilotlight.gateway.openai.echo import NOTHING_TOLD, PromptTelling, telling_of
from pilotlight.gateway.openai.exchange import Exchange
from pilotlight.gateway.openai.names import Models, for_task
from pilotlight.gateway.openai.parameters import (
    Options,
    count_choices,
    limit_of,
    options_of,
    sampling_of,
    seed_of_choice,
)
from pilotlight.gateway.openai.prompt import PromptEncoder, prompts_of
from pilotlight.gateway.openai.reasoning import NO_REASONING, ReasoningUse, reasoning_use
from pilotlight.gateway.openai.structured import grammar_of
from pilotlight.gateway.openai.told import cold_start_of, model_card, tell_ignored, tell_readiness
from pilotlight.gateway.openai.tools import NO_TOOLS, ToolUse, tool_use_of
from pilotlight.gateway.schema.replies import ModelList
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest
from pilotlight.gateway.serving.starts import Readiness
from pilotlight.gateway.serving.token_request import TokenRequest
from pilotlight.policy.ids import RequestId
from pilotlight.policy.pooling import Task

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
OPENAPI_PATH = "/v1/openapi.json"
API_VERSION = "1"
BUSY_RETRY_AFTER_S = 1.0

B = TypeVar("B", bound=msgspec.Struct)


class _Asked(msgspec.Struct, frozen=True):
    asker: Asker
    entry: CatalogEntry
    body: ChatRequest | CompletionRequest
    options: Options
    tools: ToolUse = NO_TOOLS
    reasoning: ReasoningUse = NO_REASONING
    told: tuple[PromptTelling, ...] = ()
    """What is said of each prompt; of none, where it is empty."""


class Conversed(msgspec.Struct, frozen=True):
    """A conversation, or prompts, about to be answered."""

    exchange: Exchange
    entry: CatalogEntry
    options: Options
    tools: ToolUse


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
        self._rng = random.Random()
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

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        asker = await self.asker(request)
        body = await self.read(request, ChatRequest, asker.key)
        conversed = await self.converse(request.scope, asker, body)
        return conversed.exchange.response(
            ChatShapes(
                asker.request_id,
                conversed.entry.model.name,
                self.now_unix_s(),
                conversed.options,
                conversed.tools,
            )
        )

    async def completions(self, request: Request) -> ASGIApp:
        """Continue a prompt."""
        asker = await self.asker(request)
        body = await self.read(request, CompletionRequest, asker.key)
        completed = await self.complete(request.scope, asker, body)
        return completed.exchange.response(
            CompletionShapes(
                asker.request_id,
                completed.entry.model.name,
                self.now_unix_s(),
                completed.options,
            )
        )

    async def models(self, request: Request) -> Response:
        """Every model that the key may use."""
        key = await self._key(request)
        cards = [
            model_card(name, entry, self.readiness(entry))
            for name in self._models.names()
            if (entry := self._models.get(name)) is not None
            and key.access.allows_model(entry.model.name)
        ]
        return _json(ModelList(data=cards))

    async def model(self, request: Request) -> Response:
        """One model; names may hold slashes."""
        key = await self._key(request)
        name: str = request.path_params["name"]
        if not name:
            raise ModelNotFound("a model's name is missing in the path", param="model")
        entry = await self.entry(name, key)
        return _json(model_card(name, entry, self.readiness(entry)))

    async def openapi(self, _: Request) -> Response:
        """The API's description: open."""
        return Response(self._document, media_type="application/json")

    async def asker(
        self,
        request: Request,
        headers: Mapping[str, str] | None = None,
        *,
        keyless: KeyInfo | None = None,
    ) -> Asker:
        """Whose request it is, before its body is read.

        Args:
            request: as it came.
            headers: with the key, where it is not in the request's own.
            keyless: who it is without any key; None: it needs one.

        Raises:
            Unauthorized, Forbidden, DatabaseUnavailable: it may not be answered.
            BadRequest: a header makes no sense.
        """
        arrived_s = self._clock.monotonic_s()
        theirs = plain_headers(request.scope)
        key = keyless or await self._key(request, headers or theirs)
        return Asker(
            request_id=RequestId(request.scope["state"]["request_id"]),
            key=key,
            arrived_s=arrived_s,
            cold_start=cold_start_of(theirs),
        )

    async def read(self, request: Request, as_type: type[B], key: KeyInfo) -> B:
        """A request's body, decoded strictly.

        Raises:
            CallerError, CapacityError: what ``read_body`` and ``PromptEncoder.read`` raise.
        """
        raw = await read_body(request, self._limits.max_body_bytes, key.key_id)
        body = await self._encoder.read(raw, as_type, key.key_id)
        tell_ignored(request.scope, raw, as_type)
        return body

    async def converse(self, scope: Scope, asker: Asker, body: ChatRequest) -> Conversed:
        """Begin to answer a conversation.

        Raises:
            CallerError: it cannot be answered.
            CapacityError, TransientError: not now.
        """
        entry = for_task(await self.entry(body.model, asker.key), Task.GENERATE)
        wait_s = self._encoder.wait_s(asker.key.key_id)
        check_room(self._exchanges, asker, entry, wait_s, scope)
        options = options_of(body)
        tools = tool_use_of(body, entry.text)
        count_choices(body, 1, self._limits.max_choices)
        with self._exchanges.requests.preparing(entry.model.name):
            prompt_ids = await self.prompt_of(entry, body, tools, asker.key)
        held = tools.grammar is not None or grammar_of(body) is not None
        reasoning = reasoning_use(entry.text, prompt_ids, held=held)
        asked = _Asked(asker, entry, body, options, tools, reasoning)
        return Conversed(self._exchange(scope, asked, [prompt_ids]), entry, options, tools)

    async def complete(self, scope: Scope, asker: Asker, body: CompletionRequest) -> Conversed:
        """Begin to continue prompts.

        Raises:
            CallerError: they cannot be continued.
            CapacityError, TransientError: not now.
        """
        entry = for_task(await self.entry(body.model, asker.key), Task.GENERATE)
        wait_s = self._encoder.wait_s(asker.key.key_id)
        check_room(self._exchanges, asker, entry, wait_s, scope)
        options = options_of(body)
        prompts = prompts_of(body.prompt)
        count_choices(body, len(prompts), self._limits.max_choices)
        key_id = asker.key.key_id
        with self._exchanges.requests.preparing(entry.model.name):
            encoded = [await self._encoder.completion(entry, prompt, key_id) for prompt in prompts]
        tokenizer = entry.text.tokenizer
        told = tuple(
            telling_of(body, prompt, ids, tokenizer)
            for prompt, ids in zip(prompts, encoded, strict=True)
        )
        asked = _Asked(asker, entry, body, options, told=told)
        return Conversed(self._exchange(scope, asked, encoded), entry, options, NO_TOOLS)

    async def prompt_of(
        self, entry: CatalogEntry, body: ChatRequest, tools: ToolUse, key: KeyInfo
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            entry: the model.
            body: with the messages.
            tools: what the template is told of them.
            key: whose request it is.

        Raises:
            CallerError: the model does not take it.
            QueueFull, TextUnavailable: not now.
        """
        conversation = conversation_of(body, entry.text, tools)
        return await self._encoder.chat(entry, conversation, key.key_id)

    def known(self, key: KeyInfo) -> list[CatalogEntry]:
        """Every registered model that a key may use, by name."""
        entries = (self._models.get(name) for name in self._models.names())
        by_name = {
            entry.model.name: entry
            for entry in entries
            if entry is not None and key.access.allows_model(entry.model.name)
        }
        return list(by_name.values())

    def device_bytes(self, entry: CatalogEntry) -> int:
        """What a model's instances that take requests hold on devices; 0: there is none."""
        return sum(
            placement.device_bytes
            for instance in self._exchanges.starts.serving(entry.model)
            for placement in instance.placements
        )

    def readiness(self, entry: CatalogEntry) -> Readiness:
        """Whether a model can answer at once."""
        return self._exchanges.starts.readiness(entry.model)

    async def entry(self, name: str, key: KeyInfo) -> CatalogEntry:
        """A model by a name that requests may use.

        Raises:
            ModelNotFound: there is none, as far as this key may know.
            BadRequest: there is no name, and no default.
        """
        entry = await self._models.find(name)
        if entry is None or not key.access.allows_model(entry.model.name):
            raise ModelNotFound(f"there is no model {name[:200]!r}", param="model")
        return entry

    async def _key(self, request: Request, headers: Mapping[str, str] | None = None) -> KeyInfo:
        """Whose key it is; the key is for this route."""
        key = await self._keys.require(headers or plain_headers(request.scope), "inference")
        return key.for_route(request.scope["path"])

    def now_s(self) -> float:
        """The time that passes."""
        return self._clock.monotonic_s()

    def now_unix_s(self) -> int:
        """The time of day."""
        return int(self._clock.wall().timestamp())

    def _exchange(self, scope: Scope, asked: _Asked, prompts: Sequence[list[int]]) -> Exchange:
        choices: list[Choice] = []
        for place, prompt_ids in enumerate(prompts):
            telling = asked.told[place] if asked.told else NOTHING_TOLD
            choices += self._choices(asked, prompt_ids, telling, first_index=len(choices))
        if self._exchanges.requests.live + len(choices) > self._limits.max_requests:
            raise QueueFull(
                f"this gateway serves {self._exchanges.requests.live} requests, of {self._limits.max_requests} at most",
                retry_after_s=BUSY_RETRY_AFTER_S,
            )
        tell_readiness(scope, self.readiness(asked.entry))
        return Exchange(self._exchanges, choices, asked.options, asked.asker, scope)

    def _choices(
        self, asked: _Asked, prompt_ids: list[int], telling: PromptTelling, first_index: int
    ) -> list[Choice]:
        """The answers to one prompt; all of them tell the same of it."""
        entry, options = asked.entry, asked.options
        sampling = sampling_of(
            asked.body,
            entry.model,
            len(prompt_ids),
            entry.text.eos_token_ids,
            self._rng,
            options,
            asked.tools,
        )
        first = TokenRequest(
            request_id=asked.asker.request_id,
            model=entry.model,
            prompt_ids=array("I", prompt_ids),
            sampling=sampling,
            arrived_s=asked.asker.arrived_s,
            cold_start=asked.asker.cold_start,
            trace_parent=current_traceparent(keep=True),
            share=asked.asker.key.tenant.share,
            key_id=asked.asker.key.key_id,
            shorten=limit_of(asked.body) is None,
            deadline_s=asked.asker.arrived_s
            + min(asked.body.timeout_s or math.inf, self._limits.request_timeout_s),
            # What may end an answer before its engine does is looked for in each token.
            whole=not (options.stream or options.stops or asked.tools.dialect),
        )
        choices: list[Choice] = []
        for number in range(asked.body.n or 1):
            index = first_index + number
            request = first
            if index:
                request = msgspec.structs.replace(
                    first,
                    request_id=RequestId(f"{asked.asker.request_id}-{index}"),
                    sampling=replace(sampling, seed=seed_of_choice(sampling.seed, number)),
                )
            answer = Answer(
                entry.text,
                options.stops,
                asked.tools,
                asked.reasoning,
                logprobs=options.logprobs,
                include_stop=options.include_stop,
                telling=telling,
            )
            choices.append(Choice(index, self._exchanges, request, answer))
        return choices


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
