"""Puts the gateway together."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from pilotlight.common.db.measures import measure
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.retention import PruneMetrics, Pruner
from pilotlight.common.db.session import Database
from pilotlight.common.errors import PilotlightError
from pilotlight.common.ids import new_gateway_id
from pilotlight.common.phase_reports import reported_phases
from pilotlight.common.service import Application, Component, Context
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.gateway.admin.app import AdminParts, build_admin
from pilotlight.gateway.admin.drains import DrainRepository
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.edge.bodies import BodyBudget
from pilotlight.gateway.edge.http import Edge, on_bug, on_error, on_http_error
from pilotlight.gateway.edge.measures import HttpMeasures
from pilotlight.gateway.edge.server import HttpServer
from pilotlight.gateway.models.catalog import Catalog
from pilotlight.gateway.models.registration import Registration
from pilotlight.gateway.openai.api import CHAT_PATH, COMPLETIONS_PATH, Limits, OpenAiApi
from pilotlight.gateway.openai.exchange import ExchangeParts
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.presence import Presence
from pilotlight.gateway.records import scrape
from pilotlight.gateway.records.audit import AuditLog
from pilotlight.gateway.records.display import DecisionReader
from pilotlight.gateway.records.retention import retention
from pilotlight.gateway.records.spans import SpanStore
from pilotlight.gateway.records.usage import UsageRecorder
from pilotlight.gateway.serving.arrivals import ArrivalPublisher
from pilotlight.gateway.serving.demand import DemandPublisher
from pilotlight.gateway.serving.explain import Decisions, Explainer
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.relay import Relay
from pilotlight.gateway.serving.requests import RequestParts, Requests
from pilotlight.gateway.serving.route import Router
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.texts.texts import build_texts
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.ids import GatewayId

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/v1/openapi.json"})
"""Routes without a key; a test walks all others."""
TRACED_PATHS = frozenset({CHAT_PATH, COMPLETIONS_PATH})


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The way of a request through this gateway, without HTTP and without a database."""

    gateway_id: GatewayId
    fleet: Fleet
    queue: PendingQueue
    relay: Relay
    demand: DemandPublisher
    arrivals: ArrivalPublisher
    requests: Requests


def build_serving(context: Context[GatewaySettings], decisions: Decisions) -> Serving:
    """Everything from an accepted request to its tokens."""
    settings, bus, clock, background = (
        context.settings,
        context.bus,
        context.clock,
        context.background,
    )
    gateway_id = new_gateway_id()
    fleet = Fleet(bus, clock, background)
    router = Router(fleet, clock)
    bounds = QueueBounds(
        total_requests=settings.max_held, model_requests=settings.max_held_per_model
    )
    queue = PendingQueue(router, clock, bounds)
    fleet.on_change(queue.pump)
    fleet.on_source_changed(queue.refuse)
    relay = Relay(bus, clock, background, fleet, gateway_id)
    arrivals = ArrivalPublisher(
        bus, clock, background, gateway_id, context.incarnation, context.metrics
    )
    parts = RequestParts(
        gateway_id=gateway_id,
        clock=clock,
        fleet=fleet,
        router=router,
        queue=queue,
        arrivals=arrivals,
        relay=relay,
        phases=reported_phases(bus, clock, background, context.service),
        explainer=Explainer(fleet, decisions, clock, lambda: bus.unwritable),
        hold_timeout_s=settings.hold_timeout_s,
        hold_slo_factor=settings.hold_slo_factor,
    )
    demand = DemandPublisher(queue, bus, background, gateway_id)
    return Serving(
        gateway_id=gateway_id,
        fleet=fleet,
        queue=queue,
        relay=relay,
        demand=demand,
        arrivals=arrivals,
        requests=Requests(parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What the open routes tell."""

    metrics: CollectorRegistry
    run_dir: Path
    not_ready: Callable[[], str | None]
    metrics_dir: Path | None = None

    def routes(self) -> list[Route]:
        """Health, readiness and metrics."""
        return [
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics_page),
        ]

    async def healthz(self, _: Request) -> Response:
        """The event loop turns."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """Requests can be served, or why not."""
        reason = self.not_ready()
        return (
            PlainTextResponse("ready\n")
            if reason is None
            else PlainTextResponse(f"{reason}\n", 503)
        )

    async def metrics_page(self, _: Request) -> Response:
        """Metrics of every service on this machine."""
        page = await scrape.collect(self.metrics, self.run_dir, os.getpid(), self.metrics_dir)
        return Response(page, headers={"content-type": scrape.CONTENT_TYPE})


def build_http(api: OpenAiApi, pages: Pages, admin: ASGIApp) -> Starlette:
    """Every route of the gateway."""
    app = Starlette(
        routes=[*pages.routes(), *api.routes(), Mount("/admin/v1", app=admin)],
        exception_handlers={
            PilotlightError: on_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    # A redirect for a slash too much would be a second meaning for every route.
    app.router.redirect_slashes = False
    return app


def build_server(
    context: Context[GatewaySettings], serving: Serving, api: OpenAiApi, admin: ASGIApp
) -> HttpServer:
    """What listens, and says whether it is ready.

    Args:
        context: settings, metrics and background of the service.
        serving: its queue is closed before connections are.
        api: the OpenAI-compatible routes.
        admin: the admin API, as an application of its own.
    """
    settings = context.settings

    def not_ready() -> str | None:
        return unready(server, context)

    pages = Pages(
        metrics=context.metrics,
        run_dir=settings.run_dir,
        not_ready=not_ready,
        metrics_dir=settings.metrics_dir,
    )
    bodies = BodyBudget(settings.bodies_bytes, settings.body_pause_s)
    server = HttpServer(
        Edge(
            build_http(api, pages, admin),
            TRACED_PATHS,
            bodies,
            HttpMeasures(context.metrics, bodies),
        ),
        serving.queue.close,
        context.background,
        host=settings.host,
        port=settings.port,
        share_port=settings.share_port,
        drain_s=settings.drain_s,
    )
    return server


def unready(server: HttpServer, context: Context[GatewaySettings]) -> str | None:
    """Why requests cannot be served now; None when they can."""
    if server.draining:
        return "the gateway is stopping"
    return context.bus.unwritable if context.bus.connected else "NATS cannot be reached"


async def build(context: Context[GatewaySettings]) -> Application:
    """The gateway's components, in order of start."""
    settings, clock, background = context.settings, context.clock, context.background
    database = Database(settings, "gateway", clock)
    outbox = Outbox(database, context)
    measure(database, outbox, context.metrics)
    authenticator = Authenticator(database, settings, settings, clock)
    texts = build_texts(context)
    catalog = Catalog(database, context, texts)
    registration = Registration(database, context, Sources(settings, Patience()), catalog, texts)
    usage = UsageRecorder(database, clock, background)
    serving = build_serving(context, DecisionReader(database))
    measures = Measures(context.metrics, serving.queue, serving.relay)
    exchanges = ExchangeParts(
        requests=serving.requests, usage=usage, measures=measures, clock=clock
    )
    api = OpenAiApi(
        catalog,
        authenticator,
        exchanges,
        PromptEncoder(texts),
        Limits(
            max_body_bytes=settings.max_body_bytes,
            max_requests=settings.max_requests,
            max_choices=settings.max_choices,
            request_timeout_s=settings.request_timeout_s,
        ),
    )
    audit = AuditLog(database, clock, background, context.metrics)
    admin = build_admin(
        AdminParts(
            authenticator=authenticator,
            registration=registration,
            database=database,
            fleet=serving.fleet,
            bus=context.bus,
            audit=audit,
            drains=DrainRepository(database, clock),
        )
    )
    server = build_server(context, serving, api, admin)

    def url() -> str:
        return settings.public_url or f"http://{settings.host}:{server.port}"

    presence = Presence(context.bus, clock, background, serving.gateway_id, url)
    pruner = Pruner(
        retention(settings),
        database,
        clock,
        PruneMetrics(context.metrics),
        interval_s=settings.prune_interval_s,
        background=background,
    )
    components: list[Component] = [
        database,
        outbox,
        authenticator,
        texts,
        catalog,
        usage,
        audit,
        SpanStore(database, context),
        pruner,
        serving.fleet,
        serving.relay,
        serving.demand,
        serving.arrivals,
        server,
        presence,
    ]
    return Application(components=components, ready=lambda: unready(server, context))
