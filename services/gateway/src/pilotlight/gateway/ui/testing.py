"""The dashboard beside the admin API, for tests: real database and bus, behind the gateway's
edge.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pilotlight.common.service import Context
from pilotlight.gateway.admin.testing import ADMIN_KEY, AdminWorld, admin_world
from pilotlight.gateway.edge.bodies import BodyBudget
from pilotlight.gateway.edge.http import Edge
from pilotlight.gateway.edge.measures import HttpMeasures
from pilotlight.gateway.edge.mounts import mounted
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.ui.app import SessionKeys, UiParts, build_ui
from pilotlight.gateway.ui.door import MOUNTED_AT
from pilotlight.gateway.ui.pages import PageParts
from pilotlight.gateway.ui.templating import Templates
from pilotlight.gateway.ui.tenant_pages import TenantPageParts


@dataclass(frozen=True, slots=True, kw_only=True)
class UiWorld:
    """One gateway's dashboard."""

    admin: AdminWorld
    app: Starlette
    """The dashboard alone."""
    edge: Edge
    http: httpx2.AsyncClient
    """A browser: it keeps cookies and follows no redirect by itself."""

    async def sign_in(self, key: str = ADMIN_KEY, wanted: str = "/") -> httpx2.Response:
        """Send the form."""
        return await self.http.post("/ui/sign-in", data={"key": key, "next": wanted})


@asynccontextmanager
async def ui_world(
    context: Context[GatewaySettings], fleet: Fleet | None = None
) -> AsyncGenerator[UiWorld]:
    """Start what the dashboard needs, and end it; its chat answers with the key that asks.

    Args:
        context: of its gateway.
        fleet: what pages show in the place of the gateway's own.
    """
    async with admin_world(context) as admin:
        parts = admin.parts
        keys = SessionKeys(parts.sessions)

        async def chat(request: Request) -> Response:
            key = await keys.require(request.headers, "inference")
            return JSONResponse({"key_id": key.key_id, "role": key.role})

        app = build_ui(
            UiParts(
                sessions=parts.sessions,
                pages=PageParts(
                    templates=Templates(context.clock),
                    clock=context.clock,
                    fleet=fleet or admin.fleet,
                    registration=parts.registration,
                    drains=parts.drains,
                    display=parts.display,
                    recent=parts.recent,
                    audit=parts.audit,
                    usage=parts.tenants.usage,
                ),
                tenants=TenantPageParts(
                    keys=parts.tenants.keys,
                    projects=parts.tenants.projects,
                    usage=parts.tenants.usage,
                ),
                chat=chat,
                secure=False,
            )
        )
        settings = context.settings
        bodies = BodyBudget(settings.bodies_bytes, settings.body_pause_s)
        routed = Starlette(routes=[mounted("/admin/v1", admin.app), mounted(MOUNTED_AT, app)])
        routed.router.redirect_slashes = False
        edge = Edge(routed, (), (), bodies, HttpMeasures(CollectorRegistry(), bodies))
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=edge), base_url="http://gateway"
        )
        try:
            yield UiWorld(admin=admin, app=app, edge=edge, http=http)
        finally:
            await http.aclose()
