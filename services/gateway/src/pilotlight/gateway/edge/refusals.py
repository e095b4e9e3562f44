"""Refusals that stand for a moment: who asks for the same again is told the same, before anything
is done for it.

Under overload most requests are refused, and what each costs is taken from those that are served.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Scope

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.edge.departure import Receiving

STANDS_S = 0.05
"""So many refusals a second are looked into for each key and model, at least."""
MAX_STANDING = 256
_STATE = "refusals"
_LOOKED_INTO = frozenset({b"traceparent", b"x-pilotlight-cold-start"})
"""Headers with which a request is looked into by itself."""


class _Asked(msgspec.Struct):
    """Of a body, what it asks for."""

    model: str


_asked = msgspec.json.Decoder(_Asked)
Asking = tuple[str, bytes, str]
"""Path, key and model."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is told, and what is counted each time."""

    error: PilotlightError
    counted: Callable[[], None]
    until_s: float


class Refusals:
    """Those that stand."""

    def __init__(self) -> None:
        self._standing: dict[Asking, Refusal] = {}

    def note(
        self, scope: Scope, model: str, error: PilotlightError, counted: Callable[[], None]
    ) -> None:
        """A request was refused for a reason that holds for all of its key and model.

        Args:
            scope: of the request.
            model: as it asked for it.
            error: what it is told.
            counted: counts another one.
        """
        key = _key_of(scope)
        if key is None:
            return
        if len(self._standing) >= MAX_STANDING:
            self._standing.clear()
        until_s = _now_s() + STANDS_S
        self._standing[scope["path"], key, model] = Refusal(error, counted, until_s)

    def again(self, scope: Scope, receive: Receiving) -> Refusal | None:
        """What a request is told whose answer has not begun; None: it is to be looked into."""
        if not self._standing:
            return None
        key, body = _key_of(scope), receive.body_there()
        if key is None or body is None:
            return None
        try:
            asking = scope["path"], key, _asked.decode(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        refusal = self._standing.get(asking)
        if refusal is not None and _now_s() >= refusal.until_s:
            del self._standing[asking]
            return None
        return refusal

    def put_into(self, scope: MutableMapping[str, Any]) -> None:
        """Let the handler of this request note its refusal."""
        scope.setdefault("state", {})[_STATE] = self


def refusals_of(scope: MutableMapping[str, Any]) -> Refusals | None:
    """Where a request's refusal is noted; None: it is none of HTTP."""
    return scope.get("state", {}).get(_STATE)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _key_of(scope: Scope) -> bytes | None:
    """None: it has none, or more is to be known of the request."""
    found = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            found = value
        elif name in _LOOKED_INTO:
            return None
    return found
