"""FastAPI application of the admin API. Routes call one thing and shape its answer; keys and limits are checked before them."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import structlog
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.common.bus import Bus
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    BadRequest,
    BusUnavailable,
    ControlPlaneUnavailable,
    DeadlineExceeded,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PilotlightError,
    RouteNotFound,
    UnprocessableInput,
)
from pilotlight.common.messages.demand import EVICT_SUBJECT, WARM_SUBJECT, Evict, Evicting, Warm, Warming
from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.admin.schemas import (
    MAX_NAME_CHARS,
    NAME_PATTERN,
    EvictAccepted,
    ModelChanges,
    NewModel,
    WarmAccepted,
    model_body,
)
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.http import read_body
from pilotlight.gateway.openai.errors import error_headers
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
Name = Annotated[str, Path(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)]
OptionalName = Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)]
TraceId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", description="32 hex digits: what the header X-Trace-Id says.")]


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


class Gate:
    """In front of every route: the key, then a body of bounded size that arrives in bounded time.

    It stands here and not in each route, so that a new route is closed from the start and nobody without a key is listened to.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            if scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN_PATHS:
                await self._authenticator.require(request.headers, "admin")
            body = await read_body(request, MAX_BODY_BYTES)
        except PilotlightError as error:
            await (await _on_error(request, error))(scope, receive, send)
            return
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return read.pop() if read else await receive()

        await self._app(scope, receive_again, send)


def build_admin(parts: AdminParts) -> FastAPI:
    """The application, to be mounted at ``/admin/v1``."""
    app = FastAPI(
        title="Pilotlight admin API",
        version="1",
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        swagger_ui_oauth2_redirect_url=None,
        # For the page of the API alone: it gets its button for the key. The gate is what looks at keys.
        dependencies=[Depends(HTTPBearer(auto_error=False))],
        exception_handlers={
            PilotlightError: _on_error,
            RequestValidationError: _on_invalid,
            HTTPException: _on_http,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.add_middleware(Gate, authenticator=parts.authenticator)
    _add_models(app, parts)
    _add_views(app, parts)
    return app


def _add_models(app: FastAPI, parts: AdminParts) -> None:
    registration = parts.registration

    @app.post("/models", status_code=201)
    async def register(body: NewModel) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Register a checkpoint. It can be served at once; its parameters are fetched when a request comes."""
        return model_body(await registration.register(body))

    @app.get("/models")
    async def list_models() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Every registered model."""
        return {"models": [model_body(stored) for stored in await registration.models.all()]}

    # Names may hold slashes (org/name), so actions come before the routes that would swallow them.
    @app.post("/models/{name:path}/warm", status_code=202)
    async def warm(name: Name) -> WarmAccepted:  # pyright: ignore[reportUnusedFunction]
        """Start an instance as if a request waited."""
        await registration.models.get(name)
        message = Warm(model=ModelName(name), trace_parent=current_traceparent())
        reply = await _ask_scheduler(parts.bus.request(WARM_SUBJECT, message, Warming, deadline_s=SCHEDULER_DEADLINE_S))
        return WarmAccepted(instance_id=reply.instance_id)

    @app.post("/models/{name:path}/evict", status_code=202)
    async def evict(name: Name) -> EvictAccepted:  # pyright: ignore[reportUnusedFunction]
        """Drain and release every instance of a model."""
        await registration.models.get(name)
        message = Evict(model=ModelName(name))
        reply = await _ask_scheduler(parts.bus.request(EVICT_SUBJECT, message, Evicting, deadline_s=SCHEDULER_DEADLINE_S))
        return EvictAccepted(instance_ids=list(reply.instance_ids))

    @app.get("/models/{name:path}")
    async def get_model(name: Name) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """One model."""
        return model_body(await registration.models.get(name))

    @app.patch("/models/{name:path}")
    async def change(name: Name, body: ModelChanges) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Change what the owner asks for; the checkpoint itself never changes under a name."""
        return model_body(await registration.change(name, body))

    @app.delete("/models/{name:path}", status_code=204)
    async def remove(name: Name) -> None:  # pyright: ignore[reportUnusedFunction]
        """Delete a model; its instances drain."""
        await registration.remove(name)


def _add_views(app: FastAPI, parts: AdminParts) -> None:
    display = DisplayRepository(parts.database)

    @app.get("/nodes")
    async def nodes() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Nodes with links, host pool, copies and transfers, as last reported."""
        return {"nodes": msgspec.to_builtins(parts.fleet.nodes())}

    @app.get("/workers")
    async def workers() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Workers with devices and held stages, as last reported."""
        return {"workers": msgspec.to_builtins(parts.fleet.workers())}

    @app.get("/instances")
    async def instances(limit: Limit = 100) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Instances, the newest first."""
        return {"instances": await display.instances(limit)}

    @app.get("/cold-starts")
    async def cold_starts(model: OptionalName = None, limit: Limit = 20) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Cold starts with their phases, the newest first."""
        return {"cold_starts": await display.cold_starts(model, limit)}

    @app.get("/decisions")
    async def decisions(model: OptionalName = None, limit: Limit = 20) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """The scheduler's decisions with their inputs and reasons, the newest first."""
        return {"decisions": await display.decisions(model, limit)}

    @app.get("/traces/{trace_id}")
    async def trace(trace_id: TraceId) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
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


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PilotlightError)
    if error.status >= 500 and not error.retryable:
        log.error("admin request failed", action="admin_failed", code=error.code, error=error.message)
    body = {"code": error.code, "message": error.message, "param": error.param, "what_to_do": error.action}
    return JSONResponse({"error": body}, error.status, headers=error_headers(error))


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return await _on_error(request, BadRequest("the body is not valid JSON"))
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "path", "query"))
    message = f"{where or 'body'}: {first['msg']}"
    if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        message = "body: send a JSON object, and say so: `Content-Type: application/json`"
    return await _on_error(request, UnprocessableInput(message, param=where or None))


async def _on_bug(request: Request, _: Exception) -> JSONResponse:
    """What should not have happened; the gateway's edge logs it, too."""
    return await _on_error(request, InternalError("this request met a bug"))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = {404: RouteNotFound, 405: MethodNotAllowed}.get(error.status_code, BadRequest)
    answer = await _on_error(request, kind() if kind is not BadRequest else kind(str(error.detail)))
    answer.headers.update(error.headers or {})
    return answer
