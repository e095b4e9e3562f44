"""FastAPI application of the admin API.

Routes call one thing and shape its answer; keys and limits are checked before them.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from pilotlight.common.bus import Bus
from pilotlight.common.errors import (
    BusUnavailable,
    ControlPlaneUnavailable,
    DeadlineExceeded,
    PilotlightError,
)
from pilotlight.common.messages.demand import (
    EVICT_SUBJECT,
    WARM_SUBJECT,
    Evict,
    Evicting,
    Warm,
    Warming,
)
from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.admin.answers import on_bug, on_error, on_http, on_invalid
from pilotlight.gateway.admin.document import DocumentedApp
from pilotlight.gateway.admin.drains import DrainRepository
from pilotlight.gateway.admin.gate import By, Gate
from pilotlight.gateway.admin.live import LiveView
from pilotlight.gateway.admin.materials import add_materials
from pilotlight.gateway.admin.nodes import Fleet, add_nodes
from pilotlight.gateway.admin.recent import add_recent, add_stream
from pilotlight.gateway.admin.schemas import EvictAccepted, WarmAccepted, model_body
from pilotlight.gateway.admin.tenants import TenantParts, add_tenants
from pilotlight.gateway.admin.transfers import add_transfers
from pilotlight.gateway.admin.verifications import add_verifications
from pilotlight.gateway.admin.views import add_views
from pilotlight.gateway.models.registration import Registration
from pilotlight.gateway.models.schemas import MAX_NAME_CHARS, NAME_PATTERN, ModelChanges, NewModel
from pilotlight.gateway.records.audit import AuditLog
from pilotlight.gateway.records.display import Display
from pilotlight.gateway.records.recent import RecentReader
from pilotlight.gateway.sessions import Sessions
from pilotlight.policy.ids import ModelName

SCHEDULER_DEADLINE_S = 10.0

T = TypeVar("T")
Name = Annotated[str, Path(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """What the routes call."""

    sessions: Sessions
    registration: Registration
    fleet: Fleet
    bus: Bus
    audit: AuditLog
    drains: DrainRepository
    display: Display
    recent: RecentReader
    live: LiveView
    tenants: TenantParts


def build_admin(parts: AdminParts) -> FastAPI:
    """The application, to be mounted at ``/admin/v1``."""
    app = DocumentedApp(
        title="Pilotlight admin API",
        version="1",
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        swagger_ui_oauth2_redirect_url=None,
        # For the page of the API alone: it gets its button for the key. The gate is what looks at
        # keys.
        dependencies=[Depends(HTTPBearer(auto_error=False))],
        exception_handlers={
            PilotlightError: on_error,
            RequestValidationError: on_invalid,
            HTTPException: on_http,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.add_middleware(Gate, sessions=parts.sessions, audit=parts.audit)
    add_verifications(app, parts.registration, parts.fleet, parts.bus, parts.audit)
    add_materials(app, parts.registration, parts.bus, parts.audit)
    _add_models(app, parts)
    add_nodes(app, parts.fleet, parts.drains)
    add_transfers(app, parts.fleet)
    add_views(app, parts.display, parts.fleet, parts.audit)
    add_recent(app, parts.display, parts.recent)
    add_stream(app, parts.live)
    add_tenants(app, parts.tenants)
    return app


def _add_models(app: FastAPI, parts: AdminParts) -> None:
    registration, audit = parts.registration, parts.audit

    @app.post("/models", status_code=201)
    async def register(body: NewModel, actor: By) -> dict[str, Any]:
        """Register a checkpoint.

        It can be served at once; its parameters are fetched when a request comes.
        """
        return model_body(await registration.register(body, actor))

    @app.get("/models")
    async def list_models() -> dict[str, Any]:
        """Every registered model."""
        return {"models": [model_body(stored) for stored in await registration.models.all()]}

    # Names may hold slashes (org/name), so actions come before the routes that would swallow them.
    @app.post("/models/{name:path}/warm", status_code=202)
    async def warm(name: Name, actor: By) -> WarmAccepted:
        """Start an instance as if a request waited."""
        await registration.models.get(name)
        message = Warm(model=ModelName(name), trace_parent=current_traceparent())
        async with audit.asked(actor, "model_warm", name) as changes:
            reply = await _ask_scheduler(
                parts.bus.request(WARM_SUBJECT, message, Warming, deadline_s=SCHEDULER_DEADLINE_S)
            )
            changes["instance_id"] = reply.instance_id
        return WarmAccepted(instance_id=reply.instance_id)

    @app.post("/models/{name:path}/evict", status_code=202)
    async def evict(name: Name, actor: By) -> EvictAccepted:
        """Drain and release every instance of a model."""
        await registration.models.get(name)
        message = Evict(model=ModelName(name))
        async with audit.asked(actor, "model_evict", name) as changes:
            reply = await _ask_scheduler(
                parts.bus.request(EVICT_SUBJECT, message, Evicting, deadline_s=SCHEDULER_DEADLINE_S)
            )
            changes["instance_ids"] = list(reply.instance_ids)
        return EvictAccepted(instance_ids=list(reply.instance_ids))

    @app.get("/models/{name:path}")
    async def get_model(name: Name) -> dict[str, Any]:
        """One model."""
        return model_body(await registration.models.get(name))

    @app.patch("/models/{name:path}")
    async def change(name: Name, body: ModelChanges, actor: By) -> dict[str, Any]:
        """Change what the owner asks for; the checkpoint itself never changes under a name."""
        return model_body(await registration.change(name, body, actor))

    @app.delete("/models/{name:path}", status_code=204)
    async def remove(name: Name, actor: By) -> None:
        """Delete a model; its instances drain."""
        await registration.remove(name, actor)


async def _ask_scheduler(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except (BusUnavailable, DeadlineExceeded) as error:
        raise ControlPlaneUnavailable(
            f"no scheduler leads at the moment: {error.message}"
        ) from error
