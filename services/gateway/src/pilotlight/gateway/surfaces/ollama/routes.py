"""Routes of Ollama's API."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pilotlight.common.clock import Clock
from pilotlight.gateway.edge.http import Answering
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.schema.ollama import (
    OllamaChatRequest,
    OllamaDetails,
    OllamaEmbedded,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaModels,
    OllamaPromptRequest,
    OllamaPulled,
    OllamaPullRequest,
    OllamaShown,
    OllamaShowRequest,
    OllamaVector,
    OllamaVersion,
)
from pilotlight.gateway.schema.sizes import check_sizes
from pilotlight.gateway.surfaces.narrated import in_shape, narrated
from pilotlight.gateway.surfaces.ollama.door import Door
from pilotlight.gateway.surfaces.ollama.loading import Loading
from pilotlight.gateway.surfaces.ollama.narrator import OllamaNarrator, error_body
from pilotlight.gateway.surfaces.ollama.request import (
    chat_of,
    chat_of_prompt,
    completion_of,
    embedding_of,
    name_of,
)
from pilotlight.gateway.surfaces.pooling.embedding import Embedder, values_of
from pilotlight.policy.pooling import Task

CHAT_PATH = "/api/chat"
GENERATE_PATH = "/api/generate"
TAGS_PATH = "/api/tags"
PS_PATH = "/api/ps"
SHOW_PATH = "/api/show"
PULL_PATH = "/api/pull"
EMBED_PATH = "/api/embed"
OLD_EMBED_PATH = "/api/embeddings"
VERSION_PATH = "/api/version"
_VERSION = OllamaVersion(version=version("pilotlight-gateway"))


@dataclass(frozen=True, slots=True)
class OllamaRoutes:
    """The handlers."""

    api: OpenAiApi
    clock: Clock
    door: Door
    embedder: Embedder

    @property
    def _loading(self) -> Loading:
        return Loading(self.api, self.clock)

    def routes(self) -> list[Route]:
        """All of them."""
        handlers = {
            CHAT_PATH: ("POST", self.chat),
            GENERATE_PATH: ("POST", self.generate),
            EMBED_PATH: ("POST", self.embed),
            OLD_EMBED_PATH: ("POST", self.embed_prompt),
            SHOW_PATH: ("POST", self.show),
            PULL_PATH: ("POST", self.pull),
            TAGS_PATH: ("GET", self.tags),
            PS_PATH: ("GET", self.running),
            VERSION_PATH: ("GET", self.version),
        }
        return [
            Route(path, in_shape(handler, error_body), methods=[method])
            for path, (method, handler) in handlers.items()
        ]

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        asker = await self._asker(request)
        body = await self.api.read(request, OllamaChatRequest, asker.key)
        if not body.messages:
            return await self._loading.answer(request, asker, body)
        chat = chat_of(body)
        check_sizes(chat)
        conversed = await self.api.converse(request.scope, asker, chat)
        narrator = OllamaNarrator(conversed, asker, self.clock, shape="chat")
        return narrated(conversed, narrator, stream=body.stream)

    async def generate(self, request: Request) -> ASGIApp:
        """Answer a prompt, or go on with a raw one."""
        asker = await self._asker(request)
        body = await self.api.read(request, OllamaGenerateRequest, asker.key)
        if not body.prompt:
            return await self._loading.answer(request, asker, body)
        conversed = (
            await self.api.complete(request.scope, asker, completion_of(body))
            if body.raw
            else await self.api.converse(request.scope, asker, chat_of_prompt(body))
        )
        narrator = OllamaNarrator(conversed, asker, self.clock, shape="generate")
        return narrated(conversed, narrator, stream=body.stream)

    async def embed(self, request: Request) -> ASGIApp:
        """Vectors of texts."""
        asker = await self._asker(request)
        body = await self.api.read(request, OllamaEmbedRequest, asker.key)
        embedded = await self.embedder.begin(request.scope, asker, embedding_of(body))

        async def answer() -> Response:
            vectors = [values_of(vector) for vector in await embedded.vectors()]
            return _json(
                OllamaEmbedded(
                    model=embedded.entry.model.name,
                    embeddings=vectors,
                    total_duration=int((self.clock.monotonic_s() - asker.arrived_s) * 1e9),
                    load_duration=0,
                    prompt_eval_count=embedded.exchange.usage.prompt_tokens,
                )
            )

        return Answering(answer)

    async def embed_prompt(self, request: Request) -> ASGIApp:
        """The vector of one text, as older clients ask for it."""
        asker = await self._asker(request)
        body = await self.api.read(request, OllamaPromptRequest, asker.key)
        asked = OllamaEmbedRequest(model=body.model, input=body.prompt)
        embedded = await self.embedder.begin(request.scope, asker, embedding_of(asked))

        async def answer() -> Response:
            (vector,) = await embedded.vectors()
            return _json(OllamaVector(embedding=values_of(vector)))

        return Answering(answer)

    async def tags(self, request: Request) -> Response:
        """Every model."""
        asker = await self._asker(request)
        return _json(OllamaModels(models=[_model(entry) for entry in self.api.known(asker.key)]))

    async def running(self, request: Request) -> Response:
        """Models that can answer at once."""
        asker = await self._asker(request)
        models: list[OllamaModel] = []
        for entry in self.api.known(asker.key):
            if held_bytes := self.api.device_bytes(entry):
                model = _model(entry)
                keep_s = entry.model.scaling.keep_alive_s
                model.size_vram = held_bytes
                model.expires_at = (self.clock.wall() + timedelta(seconds=keep_s)).isoformat()
                models.append(model)
        return _json(OllamaModels(models=models))

    async def show(self, request: Request) -> Response:
        """What one model is and can do."""
        asker = await self._asker(request)
        body = await self.api.read(request, OllamaShowRequest, asker.key)
        entry = await self.api.entry(name_of(body.model), asker.key)
        text, spec = entry.text, entry.model.spec
        task = {Task.EMBED: "embedding", Task.SCORE: "score"}
        capabilities = [task.get(spec.task, "completion")]
        if text.tools.describes and text.tools.dialect is not None:
            capabilities.append("tools")
        if text.reasoning.tags is not None:
            capabilities.append("thinking")
        family = spec.architecture
        return _json(
            OllamaShown(
                details=_details(entry),
                model_info={
                    "general.architecture": family,
                    f"{family}.context_length": spec.max_context_tokens,
                    f"{family}.block_count": spec.num_layers,
                    f"{family}.embedding_length": spec.hidden_size,
                },
                capabilities=capabilities,
                modified_at=_modified_at(entry),
            )
        )

    async def pull(self, request: Request) -> Response:
        """A registered model is there already: its parameters come when somebody asks it.

        Clients pull before they ask; nothing is fetched for them, and nothing is registered.
        """
        asker = await self._asker(request)
        body = await self.api.read(request, OllamaPullRequest, asker.key)
        await self.api.entry(name_of(body.model or body.name), asker.key)
        done = OllamaPulled(status="success")
        if not body.stream:
            return _json(done)
        lines = [OllamaPulled(status="pulling manifest"), done]
        return Response(
            b"".join(msgspec.json.encode(line) + b"\n" for line in lines),
            media_type="application/x-ndjson",
        )

    async def version(self, request: Request) -> Response:
        """Which release this is."""
        await self._asker(request)
        return _json(_VERSION)

    async def _asker(self, request: Request) -> Asker:
        return await self.api.asker(request, keyless=self.door.keyless(request))


def _model(entry: CatalogEntry) -> OllamaModel:
    name = entry.model.name
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_modified_at(entry),
        size=entry.model.spec.total_bytes,
        digest=entry.model.digest,
        details=_details(entry),
    )


def _details(entry: CatalogEntry) -> OllamaDetails:
    spec = entry.model.spec
    quantized = spec.quantization is not None
    return OllamaDetails(
        family=spec.architecture,
        families=[spec.architecture],
        quantization_level="quantized" if quantized else entry.model.dtype.value,
    )


def _modified_at(entry: CatalogEntry) -> str:
    return datetime.fromtimestamp(entry.created_unix_s, UTC).isoformat()


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
