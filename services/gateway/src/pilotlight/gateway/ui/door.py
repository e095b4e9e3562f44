"""In front of every page: the session, and headers that keep a browser from running or showing
anything that is not ours.
"""

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.common.errors import Forbidden, Unauthorized
from pilotlight.gateway.sessions import Sessions

MOUNTED_AT = "/ui"
SIGN_IN = "/sign-in"
OPEN_PATHS = frozenset({SIGN_IN})
"""Pages without a session; static files beside them."""
STATIC = "/static/"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Door:
    """Looks at sessions here and not in each page: a new page is closed from the start."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        path = scope["path"].removeprefix(scope.get("root_path", ""))

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = dict(HEADERS)
                if not path.startswith(STATIC):
                    own["cache-control"] = "no-store"
                message["headers"] = [
                    *(
                        (name, value)
                        for name, value in message.get("headers", [])
                        if name.decode("latin-1").lower() not in own
                    ),
                    *((name.encode(), value.encode()) for name, value in own.items()),
                ]
            await send(message)

        if path not in OPEN_PATHS and not path.startswith(STATIC):
            try:
                request.state.session = await self._sessions.find(request.headers)
            except (Unauthorized, Forbidden):
                await _to_sign_in(request, path)(scope, receive, send_guarded)
                return
        await self._app(scope, receive, send_guarded)


def _to_sign_in(request: Request, path: str) -> Response:
    """The way to a session: for a page by a redirect, for a part of one by a header."""
    if "hx-request" in request.headers or request.method != "GET":
        return Response(status_code=401, headers={"hx-redirect": MOUNTED_AT + SIGN_IN})
    wanted = f"{path}?{request.url.query}" if request.url.query else path
    return RedirectResponse(f"{MOUNTED_AT}{SIGN_IN}?next={quote(wanted)}", 303)
