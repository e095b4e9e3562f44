"""Starlette application of the dashboard."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from pilotlight.common.errors import (
    Forbidden,
    InternalError,
    MethodNotAllowed,
    PilotlightError,
    RouteNotFound,
)
from pilotlight.gateway.auth import KeyInfo
from pilotlight.gateway.edge import handlers, http
from pilotlight.gateway.edge.departure import ClientGone
from pilotlight.gateway.sessions import Sessions
from pilotlight.gateway.tenants.keys import Role
from pilotlight.gateway.ui.door import MOUNTED_AT, SIGN_IN, Door
from pilotlight.gateway.ui.pages import PageParts, Pages
from pilotlight.gateway.ui.sign_in import SignIn
from pilotlight.gateway.ui.templating import FOLDER, Templates
from pilotlight.gateway.ui.tenant_pages import TenantPageParts, TenantPages
from pilotlight.policy.access import AdminNeed, may_administer

CHAT = "/chat"
"""What the playground asks: the body and the answer are those of ``/v1/chat/completions``."""
NAME = "{name:path}"


class SessionKeys:
    """Lets a session ask models, as an inference key does: for the playground alone."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def require(self, headers: Mapping[str, str], role: Role) -> KeyInfo:
        """Whose session it is; usage is billed to its key.

        Raises:
            Unauthorized, Forbidden, DatabaseUnavailable: as ``Sessions.require``.
            Forbidden: its key may look at things alone, and a chat starts a model.
        """
        key = await self._sessions.require(headers, changes=True)
        if not may_administer(key.admin_role, AdminNeed.OPERATE):
            raise Forbidden(
                f"this key's role is {key.admin_role.value}, which does not let it start models, as a chat does"
            )
        return KeyInfo(key.key_id, role, key.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class UiParts:
    """What the dashboard is made of."""

    sessions: Sessions
    pages: PageParts
    tenants: TenantPageParts
    chat: Callable[[Request], Awaitable[ASGIApp]]
    """Answers a chat for whom ``SessionKeys`` lets in."""
    secure: bool
    """Clients reach the gateway by HTTPS alone."""


def build_ui(parts: UiParts) -> Starlette:
    """The application, to be mounted at ``/ui``."""
    templates = parts.pages.templates
    pages = Pages(parts.pages)
    tenants = TenantPages(parts.tenants, templates, parts.pages.clock)
    sign_in = SignIn(parts.sessions, parts.pages.audit, templates, secure=parts.secure)
    failures = _Failures(templates)
    app = Starlette(
        routes=[
            Route("/", pages.fleet),
            Route("/nodes/{node_id}", pages.node),
            Route("/parts/nodes/{node_id}", pages.node_part),
            Route("/models", pages.models),
            Route(f"/models/{NAME}", pages.model),
            Route(f"/parts/models/{NAME}", pages.model_part),
            Route("/cold-starts", pages.cold_starts),
            Route("/cold-starts/{instance_id}", pages.cold_start),
            Route("/parts/cold-starts/{instance_id}", pages.cold_start_part),
            Route("/traces", pages.traces),
            Route("/traces/{trace_id}", pages.trace),
            Route("/events", pages.events),
            Route("/parts/events", pages.events_part),
            Route("/keys", tenants.keys),
            Route("/usage", tenants.usage),
            Route("/simulations", pages.simulations),
            Route("/playground", pages.playground),
            Route(CHAT, parts.chat, methods=["POST"]),
            Route(SIGN_IN, sign_in.page, methods=["GET"]),
            Route(SIGN_IN, sign_in.begin, methods=["POST"]),
            Route("/sign-out", sign_in.end, methods=["POST"]),
            Mount("/static", StaticFiles(directory=FOLDER / "static"), name="static"),
        ],
        middleware=[Middleware(Door, sessions=parts.sessions)],
        exception_handlers={
            PilotlightError: failures.on_error,
            HTTPException: failures.on_http_error,
            Exception: failures.on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


class _Failures:
    """What goes wrong, as a page; for the playground in the API's own shape."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates

    async def on_error(self, request: Request, error: Exception) -> Response:
        """Exception handler for everything in the taxonomy."""
        assert isinstance(error, PilotlightError)
        if request.scope["path"] == MOUNTED_AT + CHAT:
            return await handlers.on_error(request, error)
        http.note_error(request.scope, error)
        return self._templates.render(request, "error.html", status=error.status, error=error)

    async def on_http_error(self, request: Request, error: Exception) -> Response:
        """Exception handler for what the router itself raises."""
        assert isinstance(error, HTTPException)
        kind = MethodNotAllowed if error.status_code == 405 else RouteNotFound
        return await self.on_error(request, kind("there is no such page"))

    async def on_bug(self, request: Request, error: Exception) -> Response:
        """Exception handler for what should not have happened; the gateway's edge logs it."""
        if isinstance(error, ClientGone):
            return Response(status_code=http.CLIENT_GONE_STATUS)
        return await self.on_error(request, InternalError("this page met a bug"))
