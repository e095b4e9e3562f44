"""API keys: stored hashed, shown once, admin and inference apart.

A key is ``pl-<role>-<random>``; its first characters find the row, an HMAC with the installation's pepper proves it. Keys have full
entropy, so a slow hash would buy nothing and cost each request.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
from pydantic import Field

from pilotlight.common.clock import Clock
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, DeadlineExceeded, Forbidden, SettingsInvalid, Unauthorized
from pilotlight.common.settings import BusSettings, PilotlightSettings, read_secret
from pilotlight.common.waiting import within
from pilotlight.gateway.repository import ApiKey, KeyRepository

log = structlog.get_logger()

Role = Literal["admin", "inference"]

PREFIX_CHARS = 16
MIN_KEY_CHARS = 20
MAX_KEY_CHARS = 256
CACHE_S = 5.0
"""How long a revoked key may still work."""
RECHECK_DEADLINE_S = 1.0
"""How long a request with a known key waits for a database that does not answer."""
MAX_CACHED_KEYS = 10_000
BOOTSTRAP_LABEL = "bootstrap"


class AccessSettings(PilotlightSettings):
    """Where the first keys come from."""

    admin_key_file: Path | None = Field(
        None, description="File with an admin key that must work. Replacing its content revokes the old key."
    )
    api_key_file: Path | None = Field(None, description="File with an inference key that must work, likewise.")


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Whose request it is."""

    key_id: str
    role: Role
    label: str


@dataclass(frozen=True, slots=True)
class _Cached:
    key: ApiKey
    read_s: float


class Authenticator:
    """Checks bearer keys; a component, so that bootstrap keys are in place before the first request."""

    def __init__(self, database: Database, access: AccessSettings, bus: BusSettings, clock: Clock) -> None:
        pepper = read_secret(bus.secrets_dir, "key-pepper")
        if pepper is None:
            raise SettingsInvalid("the secret key-pepper is missing: PILOTLIGHT_SECRETS_DIR must hold a file of that name")
        self._pepper = pepper.encode()
        self._keys = KeyRepository(database, clock)
        self._access = access
        self._clock = clock
        self._cache: dict[str, _Cached] = {}

    async def start(self) -> None:
        """Put the bootstrap keys into the database and revoke their predecessors.

        Raises:
            SettingsInvalid: a key's file cannot be read or will not do.
            DatabaseUnavailable: the keys cannot be stored.
        """
        files: tuple[tuple[Role, Path | None], ...] = (
            ("admin", self._access.admin_key_file),
            ("inference", self._access.api_key_file),
        )
        keys = [self._bootstrap_key(path, role) for role, path in files if path is not None]
        if len({key.hash for key in keys}) < len(keys):
            raise SettingsInvalid("the admin key and the inference key are the same; write another one into one of the files")
        for key in keys:
            await self._keys.ensure_bootstrap(key)

    async def stop(self) -> None:
        """Nothing is held."""

    async def require(self, headers: Mapping[str, str], role: Role) -> KeyInfo:
        """Who sends this request?

        Raises:
            Unauthorized: there is no key, or it is not valid.
            Forbidden: the key is for the other API.
            DatabaseUnavailable: the key is not known yet and cannot be looked up now.
        """
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        presented = presented.strip()
        if scheme.lower() != "bearer" or not presented:
            raise Unauthorized("the Authorization header must be `Bearer KEY`")
        if len(presented) > MAX_KEY_CHARS:
            raise Unauthorized("this key is not valid")
        digest = self._hash(presented)
        key = await self._find(digest)
        if key is None:
            raise Unauthorized("this key is not valid")
        if key.role != role:
            raise Forbidden(f"this route needs an {role} key, and this is an {key.role} key")
        return KeyInfo(key.key_id, role, key.label)

    async def _find(self, digest: str) -> ApiKey | None:
        now_s = self._clock.monotonic_s()
        cached = self._cache.get(digest)
        if cached is not None and now_s - cached.read_s < CACHE_S:
            return cached.key
        if cached is None:
            key = await self._keys.by_hash(digest)
        else:
            try:
                key = await within(RECHECK_DEADLINE_S, self._keys.by_hash(digest), "looking up a key")
            except (DatabaseUnavailable, DeadlineExceeded):
                # A key that was valid a moment ago goes on working: warm models must not stop, nor wait, with the database.
                key = cached.key
        if key is None:
            self._cache.pop(digest, None)
            return None
        if len(self._cache) >= MAX_CACHED_KEYS:
            self._cache.pop(next(iter(self._cache)))
        self._cache[digest] = _Cached(key, now_s)
        return key

    def _hash(self, presented: str) -> str:
        return hmac.new(self._pepper, presented.encode(), hashlib.sha256).hexdigest()

    def _bootstrap_key(self, path: Path, role: Role) -> ApiKey:
        try:
            plain = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsInvalid(f"the {role} key's file {path} cannot be read: {error}") from error
        if not MIN_KEY_CHARS <= len(plain) <= MAX_KEY_CHARS:
            raise SettingsInvalid(
                f"the {role} key's file {path} must hold a random key of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters"
            )
        digest = self._hash(plain)
        # The id follows from the key, so that gateways that start at the same moment make one row of it.
        return ApiKey(key_id=f"key-{digest[:16]}", prefix=plain[:PREFIX_CHARS], hash=digest, role=role, label=BOOTSTRAP_LABEL)
