"""Sessions of the dashboard: a signed cookie in the place of an admin key.

A session is a token that names the key's hash and its own end, signed with a secret that all
gateways derive from the pepper. Nothing is stored: any gateway takes it, and it ends with its key,
within the seconds for which keys are cached.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.common.clock import Clock
from pilotlight.common.errors import Forbidden, Unauthorized
from pilotlight.gateway.auth import Authenticator, KeyInfo

COOKIE = "pilotlight_session"
CSRF_HEADER = "x-csrf-token"
SESSION_S = 12 * 3600
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Who is signed in, and what a request that changes something has to carry."""

    key: KeyInfo
    csrf_token: str


class Sessions:
    """Makes sessions and looks at them; takes admin keys, too."""

    def __init__(self, authenticator: Authenticator, clock: Clock) -> None:
        self._authenticator = authenticator
        self._clock = clock
        self._secret = authenticator.secret_for("session")
        self._csrf_secret = authenticator.secret_for("csrf")

    async def begin(self, presented: str) -> str:
        """A session's cookie for an admin key.

        Raises:
            Unauthorized, Forbidden, DatabaseUnavailable: as ``Authenticator.require``.
        """
        digest = self._authenticator.hash_of(presented.strip())
        await self._authenticator.require_hashed(digest, "admin")
        ends_unix_s = int(self._clock.wall().timestamp()) + SESSION_S
        signed = f"{digest}.{ends_unix_s}.{secrets.token_hex(_NONCE_BYTES)}"
        return f"{signed}.{_mac(self._secret, signed)}"

    async def find(self, headers: Mapping[str, str]) -> Session:
        """The session of a request's cookie.

        Raises:
            Unauthorized: there is none, or it is over.
            DatabaseUnavailable: its key cannot be looked up now.
        """
        cookie = cookie_of(headers)
        signed, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), _mac(self._secret, signed).encode()):
            raise Unauthorized("sign in: there is no session")
        digest, ends_unix_s, _ = signed.split(".")
        if int(ends_unix_s) <= self._clock.wall().timestamp():
            raise Unauthorized("sign in again: the session is over")
        key = await self._authenticator.require_hashed(digest, "admin")
        return Session(key=key, csrf_token=_mac(self._csrf_secret, cookie))

    async def require(self, headers: Mapping[str, str], *, changes: bool) -> KeyInfo:
        """Whose request it is, by an admin key or by a session.

        A browser sends cookies with whatever page made it send the request, so one that changes
        something proves with its token that it comes from a page of ours.

        Raises:
            Unauthorized, DatabaseUnavailable: as ``Authenticator.require``.
            Forbidden: the key is for the other API, or the token is missing.
        """
        if headers.get("authorization") or not cookie_of(headers):
            return await self._authenticator.require(headers, "admin")
        session = await self.find(headers)
        sent = headers.get(CSRF_HEADER, "")
        if changes and not hmac.compare_digest(sent.encode(), session.csrf_token.encode()):
            raise Forbidden(f"the header {CSRF_HEADER} does not belong to this session")
        return session.key


def cookie_of(headers: Mapping[str, str]) -> str:
    """The session's cookie as it was sent; empty where there is none."""
    for pair in headers.get("cookie", "").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def _mac(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()
