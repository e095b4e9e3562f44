"""Pages of other origins that call the API from a browser (CORS)."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.edge.client_headers import EXPOSED
from pilotlight.gateway.edge.http import Edge

PREFLIGHT_KEPT_S = 600
METHODS = ("GET", "POST", "DELETE")
CLOSED = ("/admin", "/ui")
"""The admin API and the dashboard take a session's cookie: no other origin calls them."""


class CrossOrigin:
    """The edge, for named origins. No credentials but the key, which a page must have."""

    def __init__(self, edge: Edge, origins: Collection[str]) -> None:
        """``origins`` are as browsers send them; ``*`` is any."""
        self._edge = edge
        self._shared = CORSMiddleware(
            edge,
            allow_origins=tuple(origins),
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_KEPT_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        closed = any(path == prefix or path.startswith(f"{prefix}/") for prefix in CLOSED)
        await (self._edge if closed else self._shared)(scope, receive, send)

    def refused(self, error: PilotlightError) -> Response:
        """As of ``Edge``."""
        return self._edge.refused(error)
