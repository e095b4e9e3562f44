"""FastAPI application of the admin API. Routes check the key, call one thing, and shape its answer."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import structlog
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pilotlight.common.bus import Bus
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    BusUnavailable,
    ControlPlaneUnavailable,
    DeadlineExceeded,
    MethodNotAllowed,
    NotFound,
    PilotlightError,
    RouteNotFound,
)
from pilotlight.common.messages.demand import EVICT_SUBJECT, WARM_SUBJECT, Evict, Evicting, Warm, Warming
from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.admin.schemas import EvictAccepted, ModelChanges, NewModel, WarmAccepted, model_body
from pilotlight.gateway.auth import Authenticator, KeyInfo
from pilotlight.gateway.registration import Registration
from pilotlight.gateway.repository import DisplayRepository
from pilotlight.policy.types import ModelName, NodeFacts, WorkerFacts

log = structlog.get_logger()

SCHEDULER_DEADLINE_S = 10.0
MAX_BODY_BYTES = 64 * 1024
OPEN_PATHS = frozenset({"/docs", "/openapi.json"})
"""What may be read without a key: the API's own description."""

T = TypeVar("T")
Limit = Annotated[int, Query(ge=1, le=1000)]


class Fleet(Protocol):
    """What reports say of workers and nodes at the moment."""

    def workers(self) -> tuple[WorkerFacts, ...]:
        """Every worker that was heard of."""
        ...

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Every node that was heard of."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """What the routes call."""

    authenticator: Authenticator
    registration: Registration
    database: Database
    fleet: Fleet
    bus: Bus


def build_admin(parts: AdminParts) -> FastAPI:
    """The application, to be mounted at ``/admin/v1``."""

    async def admin_key(request: Request) -> KeyInfo:
        return await parts.authenticator.require(request.headers, "admin")

    app = FastAPI(
        title="Pilotlight admin API",
        version="1",
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        dependencies=[],
        exception_handlers={
            PilotlightError: _on_error,
            RequestValidationError: _on_invalid,
            HTTPException: _on_http,
        },
    )
    app.middleware("http")(_bounded_body)
    keyed = [Depends(admin_key)]
    _add_models(app, parts, keyed)
    _add_views(app, parts, keyed)
    return app


def _add_models(app: FastAPI, parts: AdminParts, keyed: list[Any]) -> None:
    registration = parts.registration

    @app.post("/models", status_code=201, dependencies=keyed)
    async def register(body: NewModel) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Register a checkpoint. It can be served at once; its parameters are fetched when a request comes."""
        return model_body(await registration.register(body))

    @app.get("/models", dependencies=keyed)
    async def list_models() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Every registered model."""
        return {"models": [model_body(stored) for stored in await registration.models.all()]}

    # Names may hold slashes (org/name), so actions come before the routes that would swallow them.
    @app.post("/models/{name:path}/warm", status_code=202, dependencies=keyed)
    async def warm(name: str) -> WarmAccepted:  # pyright: ignore[reportUnusedFunction]
        """Start an instance as if a request waited."""
        await registration.models.get(name)
        message = Warm(model=ModelName(name), trace_parent=current_traceparent())
        reply = await _ask_scheduler(parts.bus.request(WARM_SUBJECT, message, Warming, deadline_s=SCHEDULER_DEADLINE_S))
        return WarmAccepted(instance_id=reply.instance_id)

    @app.post("/models/{name:path}/evict", status_code=202, dependencies=keyed)
    async def evict(name: str) -> EvictAccepted:  # pyright: ignore[reportUnusedFunction]
        """Drain and release every instance of a model."""
        await registration.models.get(name)
        message = Evict(model=ModelName(name))
        reply = await _ask_scheduler(parts.bus.request(EVICT_SUBJECT, message, Evicting, deadline_s=SCHEDULER_DEADLINE_S))
        return EvictAccepted(instance_ids=list(reply.instance_ids))

    @app.get("/models/{name:path}", dependencies=keyed)
    async def get_model(name: str) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """One model."""
        return model_body(await registration.models.get(name))

    @app.patch("/models/{name:path}", dependencies=keyed)
    async def change(name: str, body: ModelChanges) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Change what the owner asks for; the checkpoint itself never changes under a name."""
        return model_body(await registration.change(name, body))

    @app.delete("/models/{name:path}", status_code=204, dependencies=keyed)
    async def remove(name: str) -> None:  # pyright: ignore[reportUnusedFunction]
        """Delete a model; its instances drain."""
        await registration.remove(name)


def _add_views(app: FastAPI, parts: AdminParts, keyed: list[Any]) -> None:
    display = DisplayRepository(parts.database)

    @app.get("/nodes", dependencies=keyed)
    async def nodes() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Nodes with links, host pool, copies and transfers, as last reported."""
        return {"nodes": msgspec.to_builtins(parts.fleet.nodes())}

    @app.get("/workers", dependencies=keyed)
    async def workers() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Workers with devices and held stages, as last reported."""
        return {"workers": msgspec.to_builtins(parts.fleet.workers())}

    @app.get("/instances", dependencies=keyed)
    async def instances(limit: Limit = 100) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Instances, the newest first."""
        return {"instances": await display.instances(limit)}

    @app.get("/cold-starts", dependencies=keyed)
    async def cold_starts(model: str | None = None, limit: Limit = 20) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Cold starts with their phases, the newest first."""
        return {"cold_starts": await display.cold_starts(model, limit)}

    @app.get("/decisions", dependencies=keyed)
    async def decisions(model: str | None = None, limit: Limit = 20) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """The scheduler's decisions with their inputs and reasons, the newest first."""
        return {"decisions": await display.decisions(model, limit)}

    @app.get("/traces/{trace_id}", dependencies=keyed)
    async def trace(trace_id: str) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Spans and cold starts of one trace."""
        spans = await display.spans_of_trace(trace_id)
        cold = await display.cold_starts_of_trace(trace_id)
        if not spans and not cold:
            raise NotFound(f"nothing is kept of trace {trace_id}", param="trace_id")
        return {"trace_id": trace_id, "spans": spans, "cold_starts": cold}


async def _ask_scheduler(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except (BusUnavailable, DeadlineExceeded) as error:
        raise ControlPlaneUnavailable(f"no scheduler leads at the moment: {error.message}") from error


async def _bounded_body(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
    length = request.headers.get("content-length", "0")
    if request.headers.get("transfer-encoding") or not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return _shaped(413, "too_large", f"an admin body has at most {MAX_BODY_BYTES} bytes and a Content-Length")
    return await call_next(request)


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PilotlightError)
    if error.status >= 500 and not error.retryable:
        log.error("admin request failed", action="admin_failed", code=error.code, error=error.message)
    headers = {"Retry-After": f"{error.retry_after_s:.0f}"} if error.retry_after_s is not None else None
    return _shaped(error.status, error.code, error.message, what_to_do=error.action, param=error.param, headers=headers)


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return _shaped(400, "invalid_request", "the body is not valid JSON")
    return _shaped(422, "unprocessable", f"{where or 'body'}: {first['msg']}", param=where or None)


async def _on_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = {404: RouteNotFound, 405: MethodNotAllowed}.get(error.status_code)
    if kind is not None:
        return _shaped(error.status_code, kind.code, kind().message, what_to_do=kind.action, headers=dict(error.headers or {}))
    return _shaped(error.status_code, "invalid_request", str(error.detail))


def _shaped(
    status: int,
    code: str,
    message: str,
    *,
    what_to_do: str = "",
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    error = {"code": code, "message": message, "param": param, "what_to_do": what_to_do}
    return JSONResponse({"error": error}, status, headers=headers)
