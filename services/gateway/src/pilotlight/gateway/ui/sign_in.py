"""Signing in with an admin key, and out."""

from urllib.parse import parse_qs

import structlog
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pilotlight.common.errors import BadRequest, Forbidden, Unauthorized
from pilotlight.gateway.edge.reading import read_body
from pilotlight.gateway.records.audit import Actor, AuditLog
from pilotlight.gateway.sessions import COOKIE, SESSION_S, Sessions
from pilotlight.gateway.ui.door import MOUNTED_AT, SIGN_IN
from pilotlight.gateway.ui.templating import Templates

log = structlog.get_logger()

MAX_FORM_BYTES = 8 * 1024
NOBODY = "nobody"


class SignIn:
    """The page of the key, and what it sends."""

    def __init__(
        self, sessions: Sessions, audit: AuditLog, templates: Templates, *, secure: bool
    ) -> None:
        self._sessions = sessions
        self._audit = audit
        self._templates = templates
        self._secure = secure

    async def page(self, request: Request) -> Response:
        """Ask for the key."""
        wanted = request.query_params.get("next", "/")
        return self._templates.render(request, "sign_in.html", wanted=_local(wanted), failure="")

    async def begin(self, request: Request) -> Response:
        """Take the key, and go to the page that was wanted."""
        _check_origin(request)
        body = await read_body(request, MAX_FORM_BYTES, NOBODY)
        try:
            form = parse_qs(body.decode(), max_num_fields=4)
        except ValueError as error:
            raise BadRequest("this is no form") from error
        wanted = _local(form.get("next", ["/"])[0])
        try:
            cookie = await self._sessions.begin(form.get("key", [""])[0])
        except (Unauthorized, Forbidden) as error:
            self._audit.refused(_actor(request), "ui_sign_in", "", error.code, error.status)
            failure = f"{error.message[:1].upper()}{error.message[1:]}."
            return self._templates.render(
                request, "sign_in.html", status=error.status, wanted=wanted, failure=failure
            )
        log.info("signed in", action="ui_signed_in", remote=_actor(request).remote)
        answer = RedirectResponse(MOUNTED_AT + wanted, 303)
        answer.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_S,
            path="/",
            httponly=True,
            samesite="strict",
            secure=self._secure or request.url.scheme == "https",
        )
        return answer

    async def end(self, request: Request) -> Response:
        """Let the browser forget the session."""
        _check_origin(request)
        answer = RedirectResponse(MOUNTED_AT + SIGN_IN, 303)
        answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return answer


def _check_origin(request: Request) -> None:
    """A form of another site signs nobody in or out.

    Raises:
        Forbidden: it was sent by one.
    """
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("this form was sent by another site")


def _local(path: str) -> str:
    """A path of the dashboard; anything else is its first page."""
    return path if path.startswith("/") and path[1:2] not in ("/", "\\") else "/"


def _actor(request: Request) -> Actor:
    return Actor(
        principal=NOBODY,
        request_id=str(getattr(request.state, "request_id", "")),
        remote=request.client.host if request.client is not None else "",
    )
