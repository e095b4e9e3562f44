"""The gateway on a real socket and a real NATS, with scripted workers and without a database."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.engine import URL
from starlette.applications import Starlette

from pilotlight.common.bus import Bus
from pilotlight.common.db.session import Database
from pilotlight.common.service import Component, Context
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.store import ObjectStore, text_key
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.gateway.admin.testing import AdminWorld, admin_world, emptied, settings_in
from pilotlight.gateway.app import (
    TRACED_PATHS,
    Serving,
    build_http,
    build_serving,
    direct_routes,
)
from pilotlight.gateway.batches.wiring import Batches, build_batches
from pilotlight.gateway.edge.bodies import BodyBudget
from pilotlight.gateway.edge.cross_origin import CrossOrigin
from pilotlight.gateway.edge.http import Edge
from pilotlight.gateway.edge.measures import HttpMeasures
from pilotlight.gateway.edge.server import HttpServer
from pilotlight.gateway.limits.limiter import Limiter
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.open_pages import Pages
from pilotlight.gateway.openai.api import Limits, OpenAiApi
from pilotlight.gateway.openai.choice import ExchangeParts
from pilotlight.gateway.openai.names import NamedModels
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.serving.testing import ScriptedWorker, entries_of
from pilotlight.gateway.settings import GatewaySettings, parsed_aliases, parsed_list
from pilotlight.gateway.surfaces.ollama.door import Door
from pilotlight.gateway.surfaces.pooling.embedding import Embedder, PoolingParts
from pilotlight.gateway.surfaces.pooling.prompts import PooledPrompts
from pilotlight.gateway.surfaces.routes import SurfaceParts, surface_routes
from pilotlight.gateway.surfaces.testing import KeptResponses
from pilotlight.gateway.testing import (
    API_KEY,
    RESERVED_HELPERS,
    FixedKeys,
    KnownBudgets,
    KnownModels,
    NoDecisions,
    NotedUsage,
    entry_of,
)
from pilotlight.gateway.texts.texts import Texts, build_texts
from pilotlight.policy.pooling import Pooling
from pilotlight.text.bundle import TextBundle, encode
from pilotlight.text.testing import byte_level_json
from pilotlight.text.tokenizer import TextTokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = "fox"
NO_DATABASE = DatabaseSettings(database_url="postgresql://nobody:none@127.0.0.1:1/none")
ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."


@dataclass(slots=True, kw_only=True)
class World:
    """One running gateway."""

    bus: Bus
    app: Starlette
    serving: Serving
    keys: FixedKeys
    server: HttpServer
    bodies: BodyBudget
    metrics: CollectorRegistry
    usage: NotedUsage
    limiter: Limiter
    measures: Measures
    budgets: KnownBudgets
    responses: KeptResponses
    batches: Batches
    store: ObjectStore
    entry: CatalogEntry
    texts: Texts
    tokenizer: TextTokenizer
    """The model's whole one, which the gateway itself does not have."""
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    workers: list[ScriptedWorker] = field(default_factory=list)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, as a worker would make them."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what arrives over the bus to make this true."""
        await until(condition)

    async def worker(
        self, name: str = "w0", answer: str = ANSWER, *, ready: bool = True
    ) -> ScriptedWorker:
        """Start a worker that answers everything with one text."""
        token_ids = self.ids(answer)
        worker = ScriptedWorker(
            self.bus,
            name,
            f"inst-{name}",
            self.entry.model,
            lambda submit: entries_of(submit, token_ids),
        )
        self.workers.append(worker)
        await worker.start()
        if ready:
            await worker.ready()
        return worker


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
def bundle() -> TextBundle:
    return TextBundle(
        tokenizer_json=byte_level_json(),
        chat_template=TEMPLATE,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


@pytest.fixture
async def make_world(
    make_context: MakeContext, bundle: TextBundle, tmp_path: Path
) -> AsyncIterator[MakeWorld]:
    async with AsyncExitStack() as stack:

        async def make(
            *,
            max_context_tokens: int = 4096,
            text: TextBundle = bundle,
            database: Database | None = None,
            pooling: Pooling | None = None,
            **changes: object,
        ) -> World:
            context = make_context(
                "gateway",
                GatewaySettings(
                    port=0, run_dir=tmp_path, **{"drain_s": 1.0, "text_helpers": 2, **changes}
                ),
            )
            await context.store.put_if_absent(text_key(text.digest()), encode(text))
            entry = entry_of(MODEL, text, context.clock, max_context_tokens=max_context_tokens)
            spec = replace(entry.model.spec, pooling=pooling)
            world = _world(
                context,
                text,
                replace(entry, model=replace(entry.model, spec=spec)),
                database or Database(NO_DATABASE, "gateway", context.clock),
            )
            serving = world.serving
            told: list[Component] = [serving.demand, serving.arrivals]
            components: list[Component] = [
                world.texts,
                serving.fleet,
                serving.relay,
                *told,
                world.server,
                *((world.batches.runner,) if database is not None else ()),
            ]
            for component in components:
                await component.start()
                stack.push_async_callback(component.stop)
            url = f"http://127.0.0.1:{world.server.port}"
            world.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0)
            world.http = httpx2.AsyncClient(
                base_url=url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=30
            )
            stack.push_async_callback(world.client.close)
            stack.push_async_callback(world.http.aclose)
            stack.push_async_callback(_end_workers, world)
            return world

        yield make


@pytest.fixture
def emptied_settings(
    database_settings: DatabaseSettingsOf, module_database: URL, tmp_path: Path
) -> GatewaySettings:
    """Settings of a gateway whose database has nothing of the tests before."""
    emptied(module_database)
    return settings_in(tmp_path, database_settings("gateway").database_url)


@pytest.fixture
async def fresh_admin(
    make_context: MakeContext, emptied_settings: GatewaySettings
) -> AsyncIterator[AdminWorld]:
    """The admin API of such a gateway."""
    async with admin_world(make_context("gateway", emptied_settings)) as made:
        yield made


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    return await make_world()


async def _end_workers(world: World) -> None:
    for worker in world.workers:
        await worker.die()


def _world(
    context: Context[GatewaySettings], bundle: TextBundle, entry: CatalogEntry, database: Database
) -> World:
    settings = context.settings
    serving = build_serving(context, NoDecisions())
    usage, budgets = NotedUsage(), KnownBudgets()
    limiter = Limiter(context.clock, budgets, serving.gateway_id)
    measures = Measures(context.metrics, serving.queue, serving.relay)
    exchanges = ExchangeParts(
        requests=serving.requests,
        starts=serving.starts,
        usage=usage,
        limiter=limiter,
        measures=measures,
        clock=context.clock,
    )
    texts = build_texts(context, RESERVED_HELPERS)
    encoder, responses, keys = PromptEncoder(texts), KeptResponses(), FixedKeys()
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        max_requests=settings.max_requests,
        max_choices=settings.max_choices,
        request_timeout_s=settings.request_timeout_s,
    )
    api = OpenAiApi(
        NamedModels(
            KnownModels([entry]), parsed_aliases(settings.model_aliases), settings.default_model
        ),
        keys,
        exchanges,
        encoder,
        limits,
    )
    surfaces = SurfaceParts(
        api=api,
        encoder=encoder,
        responses=responses,
        clock=context.clock,
        door=Door.of(parsed_list(settings.ollama_clients), settings.public_url),
        pooling=PoolingParts(
            api=api, prompts=PooledPrompts(texts), exchanges=exchanges, limits=limits
        ),
    )
    pages = Pages(
        metrics=context.metrics,
        run_dir=settings.run_dir,
        not_ready=lambda: None,
        metrics_networks=settings.metrics_networks,
    )
    batches = build_batches(
        settings,
        api,
        keys,
        encoder,
        database,
        context.store,
        context.clock,
        context.background,
        serving.gateway_id,
        lambda: (serving.requests.live, serving.queue.held),
        Embedder(surfaces.pooling).whole,
    )
    routes = [*surface_routes(surfaces), *batches.routes.routes()]
    app = build_http(api, routes, pages, Starlette(), Starlette())
    bodies = BodyBudget(settings.bodies_bytes, settings.body_pause_s)
    edge = Edge(
        app, direct_routes(api), TRACED_PATHS, bodies, HttpMeasures(context.metrics, bodies)
    )
    origins = parsed_list(settings.cors_origins)
    server = HttpServer(
        CrossOrigin(edge, origins) if origins else edge,
        serving.queue.close,
        context.background,
        host=settings.host,
        port=settings.port,
        drain_s=settings.drain_s,
    )
    nowhere = openai.AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key=API_KEY)
    return World(
        bus=context.bus,
        app=app,
        serving=serving,
        keys=keys,
        server=server,
        bodies=bodies,
        metrics=context.metrics,
        usage=usage,
        limiter=limiter,
        measures=measures,
        budgets=budgets,
        responses=responses,
        batches=batches,
        store=context.store,
        entry=entry,
        texts=texts,
        tokenizer=TextTokenizer(bundle),
        client=nowhere,
        http=httpx2.AsyncClient(),
    )
