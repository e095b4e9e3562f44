"""In front of every route of the admin API: the key or the session, a bounded body, and the
record of what was refused.
"""

import re
from typing import Annotated

import msgspec
from fastapi import Depends, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.common.errors import Forbidden, InternalError, PilotlightError, Unauthorized
from pilotlight.common.telemetry import current_traceparent
from pilotlight.gateway.admin.answers import on_error
from pilotlight.gateway.edge.departure import ClientGone
from pilotlight.gateway.edge.http import error_code_of
from pilotlight.gateway.edge.reading import read_body
from pilotlight.gateway.records.audit import Actor, AuditLog
from pilotlight.gateway.sessions import Sessions
from pilotlight.policy.access import AdminNeed, may_administer

MAX_BODY_BYTES = 64 * 1024
OPEN_PATHS = frozenset({"/docs", "/openapi.json"})
"""What may be read without a key: the API's own description."""
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
NOBODY = "nobody"
"""Principal of a client that showed no valid admin key."""

ACTIONS = (
    ("POST", re.compile(r"/models"), "model_register"),
    ("POST", re.compile(r"/models/(.+)/warm"), "model_warm"),
    ("POST", re.compile(r"/models/(.+)/verify"), "model_verify"),
    ("POST", re.compile(r"/models/(.+)/evict"), "model_evict"),
    ("POST", re.compile(r"/models/(.+)/materialize"), "model_materialize"),
    ("PATCH", re.compile(r"/models/(.+)"), "model_change"),
    ("DELETE", re.compile(r"/models/(.+)"), "model_delete"),
    ("POST", re.compile(r"/nodes/([^/]+)/drain"), "node_drain"),
    ("DELETE", re.compile(r"/nodes/([^/]+)/drain"), "node_undrain"),
    ("POST", re.compile(r"/organizations"), "organization_create"),
    ("POST", re.compile(r"/projects"), "project_create"),
    ("PATCH", re.compile(r"/projects/(.+)"), "project_change"),
    ("PUT", re.compile(r"/projects/(.+)/limits"), "project_limit"),
    ("POST", re.compile(r"/keys"), "key_create"),
    ("PUT", re.compile(r"/keys/([^/]+)/limits"), "key_limit"),
    ("POST", re.compile(r"/keys/([^/]+)/rotate"), "key_rotate"),
    ("DELETE", re.compile(r"/keys/([^/]+)"), "key_revoke"),
)
"""What the audit log calls each write; a test walks the routes."""
OWNED = re.compile(r"/(organizations|projects|keys)(/.*)?")
"""Paths whose writes take an owner's key."""
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def actor_of(request: Request) -> Actor:
    """Who sends a request that has passed the gate."""
    actor = request.state.actor
    assert isinstance(actor, Actor)
    return actor


By = Annotated[Actor, Depends(actor_of)]
"""A route's parameter: who sends the request."""


class _Named(msgspec.Struct):
    """As much of a body as says what it is about."""

    name: str = ""


def action_of(method: str, path: str) -> tuple[str, str]:
    """What a request is about: the action's name, and the entity where the path names it."""
    for of_method, pattern, action in ACTIONS:
        found = pattern.fullmatch(path) if method == of_method else None
        if found is not None:
            return action, found[1] if found.re.groups else ""
    return "unknown", path


def need_of(method: str, path: str) -> AdminNeed:
    """What a request takes; a write that is not known takes an operator."""
    if method not in WRITES:
        return AdminNeed.READ
    return AdminNeed.OWN if OWNED.fullmatch(path) is not None else AdminNeed.OPERATE


class Gate:
    """Looks at keys and bodies here and not in each route: a new route is closed from the start, to
    all that have no key.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, audit: AuditLog) -> None:
        self._app = app
        self._sessions = sessions
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        actor = _actor(request, NOBODY, "")
        body = b""
        status = 0

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if path not in OPEN_PATHS:
                key = await self._sessions.require(
                    request.headers, changes=request.method in WRITES
                )
                actor = _actor(request, key.label, key.key_id)
                need = need_of(request.method, path)
                if not may_administer(key.admin_role, need):
                    raise Forbidden(
                        f"this key's role is {key.admin_role.value}, which does not let it {need.value} here"
                    )
            request.state.actor = actor
            body = await read_body(request, MAX_BODY_BYTES, actor.key_id)
            read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive_again() -> Message:
                return read.pop() if read else await receive()

            await self._app(scope, receive_again, send_and_look)
        except PilotlightError as error:
            await (await on_error(request, error))(scope, receive, send_and_look)
        except ClientGone:
            raise
        except Exception:
            # A bug: the middleware before this gate answers it.
            status = 500
            raise
        finally:
            if status >= 400 and request.method in WRITES:
                self._record(request, actor, path, body, status)

    def _record(self, request: Request, actor: Actor, path: str, body: bytes, status: int) -> None:
        action, entity = action_of(request.method, path)
        code = error_code_of(request.scope) or InternalError.code
        # What a client without a key sends is not looked at.
        heard = code not in (Unauthorized.code, Forbidden.code)
        self._audit.refused(
            actor, action, entity or (_name_in(body) if heard else ""), code, status
        )


def _actor(request: Request, principal: str, key_id: str) -> Actor:
    own = current_traceparent()
    trace = _TRACE.fullmatch(own or request.headers.get("traceparent", ""))
    return Actor(
        principal=principal,
        key_id=key_id,
        request_id=str(getattr(request.state, "request_id", "")),
        trace_id=trace[1] if trace is not None else "",
        remote=request.client.host if request.client is not None else "",
    )


def _name_in(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Named).name
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
