"""The gateway on a real socket and a real NATS, with scripted workers and without a database."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai
import pytest
from starlette.applications import Starlette

from pilotlight.common.bus import Bus
from pilotlight.common.service import Component, Context
from pilotlight.common.testing import MakeContext, until
from pilotlight.gateway.app import TRACED_PATHS, Pages, Serving, build_http, build_serving
from pilotlight.gateway.catalog import CatalogEntry
from pilotlight.gateway.http import Edge
from pilotlight.gateway.measures import Measures
from pilotlight.gateway.openai.api import Limits, OpenAiApi
from pilotlight.gateway.openai.exchange import ExchangeParts
from pilotlight.gateway.server import HttpServer
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.testing import (
    API_KEY,
    FixedKeys,
    KnownModels,
    NoDecisions,
    NotedUsage,
    ScriptedWorker,
    entries_of,
    entry_of,
)
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_level_json

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = "fox"
ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."


@dataclass(slots=True, kw_only=True)
class World:
    """One running gateway."""

    bus: Bus
    app: Starlette
    serving: Serving
    server: HttpServer
    usage: NotedUsage
    entry: CatalogEntry
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    workers: list[ScriptedWorker] = field(default_factory=list)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, as a worker would make them."""
        return self.entry.text.tokenizer.encode(text, add_special_tokens=False)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what arrives over the bus to make this true."""
        await until(condition)

    async def worker(self, name: str = "w0", answer: str = ANSWER, *, ready: bool = True) -> ScriptedWorker:
        """Start a worker that answers everything with one text."""
        token_ids = self.ids(answer)
        worker = ScriptedWorker(self.bus, name, f"inst-{name}", self.entry.model, lambda submit: entries_of(submit, token_ids))
        self.workers.append(worker)
        await worker.start()
        if ready:
            await worker.ready()
        return worker


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
def bundle() -> TextBundle:
    return TextBundle(
        tokenizer_json=byte_level_json(), chat_template=TEMPLATE, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )


@pytest.fixture
async def make_world(make_context: MakeContext, bundle: TextBundle, tmp_path: Path) -> AsyncIterator[MakeWorld]:
    async with AsyncExitStack() as stack:

        async def make(*, max_context_tokens: int = 4096, **changes: object) -> World:
            context = make_context("gateway", GatewaySettings(port=0, run_dir=tmp_path, drain_s=1.0, **changes))
            world = _world(context, entry_of(MODEL, bundle, context.clock, max_context_tokens=max_context_tokens))
            serving = world.serving
            components: list[Component] = [serving.fleet, serving.relay, serving.demand, world.server]
            for component in components:
                await component.start()
                stack.push_async_callback(component.stop)
            url = f"http://127.0.0.1:{world.server.port}"
            world.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0)
            world.http = httpx2.AsyncClient(base_url=url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=30)
            stack.push_async_callback(world.client.close)
            stack.push_async_callback(world.http.aclose)
            stack.push_async_callback(_end_workers, world)
            return world

        yield make


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    return await make_world()


async def _end_workers(world: World) -> None:
    for worker in world.workers:
        await worker.die()


def _world(context: Context[GatewaySettings], entry: CatalogEntry) -> World:
    settings = context.settings
    serving = build_serving(context, NoDecisions())
    usage = NotedUsage()
    measures = Measures(context.metrics, serving.hold, serving.relay)
    exchanges = ExchangeParts(requests=serving.requests, usage=usage, measures=measures, clock=context.clock)
    api = OpenAiApi(
        KnownModels([entry]),
        FixedKeys(),
        exchanges,
        Limits(
            max_body_bytes=settings.max_body_bytes,
            max_requests=settings.max_requests,
            max_choices=settings.max_choices,
            request_timeout_s=settings.request_timeout_s,
        ),
    )
    pages = Pages(metrics=context.metrics, run_dir=settings.run_dir, not_ready=lambda: None)
    app = build_http(api, pages, Starlette())
    edge = Edge(app, TRACED_PATHS)
    server = HttpServer(edge, serving.hold, context.background, host=settings.host, port=settings.port, drain_s=settings.drain_s)
    nowhere = openai.AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key=API_KEY)
    return World(
        bus=context.bus,
        app=app,
        serving=serving,
        server=server,
        usage=usage,
        entry=entry,
        client=nowhere,
        http=httpx2.AsyncClient(),
    )
