"""Puts the gateway together."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
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
from pilotlight.gateway.admin.live import LiveView
from pilotlight.gateway.admin.tenants import TenantParts
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.batches.wiring import build_batches
from pilotlight.gateway.edge.bodies import BodyBudget
from pilotlight.gateway.edge.cross_origin import CrossOrigin
from pilotlight.gateway.edge.handlers import on_bug, on_error, on_http_error
from pilotlight.gateway.edge.http import Edge
from pilotlight.gateway.edge.measures import HttpMeasures
from pilotlight.gateway.edge.mounts import mounted
from pilotlight.gateway.edge.server import HttpServer
from pilotlight.gateway.limits.budgets import BudgetBook
from pilotlight.gateway.limits.exchange import LimitExchange
from pilotlight.gateway.limits.limiter import Limiter
from pilotlight.gateway.models.catalog import Catalog
from pilotlight.gateway.models.registration import Registration
from pilotlight.gateway.open_pages import OPEN_PAGES, Pages
from pilotlight.gateway.openai.api import CHAT_PATH, COMPLETIONS_PATH, Limits, OpenAiApi
from pilotlight.gateway.openai.choice import ExchangeParts
from pilotlight.gateway.openai.names import NamedModels
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.presence import Presence
from pilotlight.gateway.records.attainment import Attainment
from pilotlight.gateway.records.audit import AuditLog
from pilotlight.gateway.records.display import DecisionReader, Display
from pilotlight.gateway.records.idle_times import IdleTimes
from pilotlight.gateway.records.recent import RecentReader
from pilotlight.gateway.records.retention import retention
from pilotlight.gateway.records.spans import SpanStore
from pilotlight.gateway.records.start_costs import StartCosts
from pilotlight.gateway.records.usage import UsageRecorder
from pilotlight.gateway.records.usage_report import UsageReader
from pilotlight.gateway.serving.arrivals import ArrivalPublisher
from pilotlight.gateway.serving.demand import DemandPublisher
from pilotlight.gateway.serving.explain import Decisions, Explainer
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.relay import Relay
from pilotlight.gateway.serving.request_parts import RequestParts
from pilotlight.gateway.serving.requests import Requests
from pilotlight.gateway.serving.route import Router
from pilotlight.gateway.serving.spreading import Spreader
from pilotlight.gateway.serving.start_watch import StartWatch
from pilotlight.gateway.serving.starts import Starts
from pilotlight.gateway.sessions import Sessions
from pilotlight.gateway.settings import GatewaySettings, parsed_aliases, parsed_list
from pilotlight.gateway.surfaces.ollama.door import Door
from pilotlight.gateway.surfaces.pooling.embedding import Embedder, PoolingParts
from pilotlight.gateway.surfaces.pooling.prompts import PooledPrompts
from pilotlight.gateway.surfaces.responses.store import ResponseRepository
from pilotlight.gateway.surfaces.routes import ANSWERING_PATHS, SurfaceParts, surface_routes
from pilotlight.gateway.tenants.following import KeyFollower
from pilotlight.gateway.tenants.keys import KeyRepository
from pilotlight.gateway.tenants.projects import ProjectRepository
from pilotlight.gateway.texts.texts import build_texts
from pilotlight.gateway.ui.app import CHAT, SessionKeys, UiParts, build_ui
from pilotlight.gateway.ui.door import MOUNTED_AT
from pilotlight.gateway.ui.pages import PageParts
from pilotlight.gateway.ui.templating import Templates
from pilotlight.gateway.ui.tenant_pages import TenantPageParts
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.ids import GatewayId

OPEN_PATHS = OPEN_PAGES | {"/v1/openapi.json"}
"""Routes without a key; a test walks all others."""
DIRECT_PATHS = frozenset({CHAT_PATH, COMPLETIONS_PATH})
"""Most requests: they have a short way to their handlers."""
TRACED_PATHS = DIRECT_PATHS | ANSWERING_PATHS | {MOUNTED_AT + CHAT}


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
    starts: Starts


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
    per_model = settings.max_held_per_model
    bounds = QueueBounds(total_requests=settings.max_held, model_requests=per_model)
    queue = PendingQueue(router, clock, bounds)
    router.full.on_room = queue.pump
    fleet.on_change(queue.pump)
    fleet.on_source_changed(queue.refuse)
    relay = Relay(bus, clock, background, fleet, gateway_id)
    Spreader(fleet, relay)
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
        starts=Starts(fleet, clock),
    )


def build_http(
    api: OpenAiApi, surfaces: Sequence[Route], pages: Pages, admin: ASGIApp, ui: ASGIApp
) -> Starlette:
    """Every route of the gateway.

    Args:
        api: the OpenAI-compatible routes.
        surfaces: other shapes of the same answers.
        pages: the open routes.
        admin: the admin API, as an application of its own.
        ui: the dashboard, likewise.
    """
    app = Starlette(
        routes=[
            *pages.routes(),
            *api.routes(),
            *surfaces,
            mounted("/admin/v1", admin),
            Route(MOUNTED_AT, _to_ui),
            mounted(MOUNTED_AT, ui),
        ],
        exception_handlers={
            PilotlightError: on_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    # A redirect for a slash too much would be a second meaning for every route.
    app.router.redirect_slashes = False
    return app


def direct_routes(api: OpenAiApi) -> list[Route]:
    """Those of ``DIRECT_PATHS``."""
    return [route for route in api.routes() if route.path in DIRECT_PATHS]


async def _to_ui(_: Request) -> Response:
    """What people type is the dashboard's first page."""
    return RedirectResponse(f"{MOUNTED_AT}/")


def build_server(
    context: Context[GatewaySettings],
    serving: Serving,
    api: OpenAiApi,
    surfaces: Sequence[Route],
    admin: ASGIApp,
    ui: ASGIApp,
) -> HttpServer:
    """What listens, and says whether it is ready.

    Args:
        context: settings, metrics and background of the service.
        serving: its queue is closed before connections are.
        api: the OpenAI-compatible routes.
        surfaces: other shapes of the same answers.
        admin: the admin API, as an application of its own.
        ui: the dashboard, likewise.
    """
    settings = context.settings
    pages = Pages(
        metrics=context.metrics,
        run_dir=settings.run_dir,
        not_ready=lambda: unready(server, context),
        metrics_dir=settings.metrics_dir,
        metrics_networks=settings.metrics_networks,
    )
    bodies = BodyBudget(settings.bodies_bytes, settings.body_pause_s)
    measures, http = (
        HttpMeasures(context.metrics, bodies),
        build_http(api, surfaces, pages, admin, ui),
    )
    edge = Edge(http, direct_routes(api), TRACED_PATHS, bodies, measures)
    origins = parsed_list(settings.cors_origins)
    server = HttpServer(
        CrossOrigin(edge, origins) if origins else edge,
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
    usage = UsageRecorder(database, clock, background, folder=settings.run_dir)
    serving = build_serving(context, DecisionReader(database))
    start_costs = StartCosts(database, clock, background, serving.gateway_id)
    StartWatch(serving.fleet, serving.queue, start_costs)
    idle_times = IdleTimes(database, clock, background, serving.fleet)
    serving.fleet.reports.on_news(idle_times.hear)
    budgets = BudgetBook(database, clock, background)
    limiter = Limiter(clock, budgets, serving.gateway_id)
    measures = Measures(context.metrics, serving.queue, serving.relay)
    attainment = Attainment(database, clock, background, serving.gateway_id, measures.attained)
    exchanges = ExchangeParts(
        requests=serving.requests,
        starts=serving.starts,
        usage=usage,
        limiter=limiter,
        measures=measures,
        clock=clock,
    )
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        max_requests=settings.max_requests,
        max_choices=settings.max_choices,
        request_timeout_s=settings.request_timeout_s,
    )
    encoder = PromptEncoder(texts)
    models = NamedModels(catalog, parsed_aliases(settings.model_aliases), settings.default_model)
    api = OpenAiApi(models, authenticator, exchanges, encoder, limits)
    sessions = Sessions(authenticator, clock)
    display, recent = Display(database), RecentReader(database, clock)
    live = LiveView(serving.fleet, catalog, recent, background)
    audit = AuditLog(database, clock, background, context.metrics)
    keys, drains = KeyRepository(database, clock), DrainRepository(database, clock)
    projects, usage_reader = ProjectRepository(database, clock), UsageReader(database, clock)
    admin = build_admin(
        AdminParts(
            sessions=sessions,
            registration=registration,
            fleet=serving.fleet,
            bus=context.bus,
            audit=audit,
            drains=drains,
            display=display,
            recent=recent,
            live=live,
            tenants=TenantParts(
                authenticator=authenticator,
                keys=keys,
                projects=projects,
                usage=usage_reader,
            ),
        )
    )
    ui = build_ui(
        UiParts(
            sessions=sessions,
            pages=PageParts(
                templates=Templates(clock),
                clock=clock,
                fleet=serving.fleet,
                registration=registration,
                drains=drains,
                display=display,
                recent=recent,
                audit=audit,
                usage=usage_reader,
            ),
            tenants=TenantPageParts(keys=keys, projects=projects, usage=usage_reader),
            chat=OpenAiApi(models, SessionKeys(sessions), exchanges, encoder, limits).chat,
            secure=settings.public_url.startswith("https:"),
        )
    )
    pooling = PoolingParts(
        api=api, prompts=PooledPrompts(texts), exchanges=exchanges, limits=limits
    )
    surfaces = surface_routes(
        SurfaceParts(
            api=api,
            encoder=encoder,
            responses=ResponseRepository(database, clock, settings.responses_max_per_key),
            clock=clock,
            door=Door.of(parsed_list(settings.ollama_clients), settings.public_url),
            pooling=pooling,
        )
    )
    batches = build_batches(
        settings,
        api,
        authenticator,
        encoder,
        database,
        context.store,
        clock,
        background,
        serving.gateway_id,
        lambda: (serving.requests.live, serving.queue.held),
        Embedder(pooling).whole,
    )
    server = build_server(context, serving, api, [*surfaces, *batches.routes.routes()], admin, ui)

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
        KeyFollower(context, keys, authenticator),
        texts,
        catalog,
        usage,
        start_costs,
        idle_times,
        attainment,
        budgets,
        LimitExchange(context.bus, clock, background, limiter, serving.gateway_id),
        audit,
        SpanStore(database, context),
        pruner,
        serving.fleet,
        serving.relay,
        serving.demand,
        serving.arrivals,
        server,
        # Its lines end before what they need does.
        batches.runner,
        # After the server: streams of pages end first, or the server would wait for them.
        live,
        presence,
    ]
    return Application(components=components, ready=lambda: unready(server, context))
