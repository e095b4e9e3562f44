"""API keys: stored hashed, shown once, admin and inference apart.

A key is ``pl-<role>-<random>``; its first characters find the row, an HMAC with the installation's
pepper proves it. Keys have full entropy, so a slow hash would buy nothing and cost each request.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    DatabaseUnavailable,
    DeadlineExceeded,
    Forbidden,
    SettingsInvalid,
    Unauthorized,
)
from pilotlight.common.settings import BusSettings, read_secret
from pilotlight.common.waiting import within
from pilotlight.gateway.records.audit import SYSTEM, record
from pilotlight.gateway.settings import AccessSettings

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as stored: never the key itself."""

    key_id: str
    prefix: str
    hash: str
    role: Literal["admin", "inference"]
    label: str


class KeyRepository:
    """API keys."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def by_hash(self, digest: str) -> ApiKey | None:
        """The key with this hash, unless it is revoked."""
        keys = tables.api_keys
        async with self._database.reading() as connection:
            row = (
                await connection.execute(
                    select(keys).where(keys.c.hash == digest, keys.c.revoked_at.is_(None))
                )
            ).one_or_none()
        if row is None:
            return None
        return ApiKey(
            key_id=row.key_id, prefix=row.prefix, hash=row.hash, role=row.role, label=row.label
        )

    async def ensure_bootstrap(self, key: ApiKey) -> None:
        """Make this the only valid key with its role and label; one that was revoked before is
        valid again.
        """
        keys = tables.api_keys
        others = (
            keys.c.role == key.role,
            keys.c.label == key.label,
            keys.c.key_id != key.key_id,
            keys.c.revoked_at.is_(None),
        )
        row = insert(keys).values(
            key_id=key.key_id,
            prefix=key.prefix,
            hash=key.hash,
            role=key.role,
            label=key.label,
            created_at=func.now(),
        )
        valid = {"role": key.role, "label": key.label, "revoked_at": None}
        async with self._database.unit_of_work() as work:
            revoke = (
                update(keys).where(*others).values(revoked_at=func.now()).returning(keys.c.key_id)
            )
            for revoked in (await work.connection.execute(revoke)).scalars().all():
                await record(
                    work,
                    self._clock,
                    SYSTEM,
                    "key_revoke",
                    revoked,
                    {"role": key.role, "label": key.label},
                )
            differs = (
                keys.c.revoked_at.is_not(None)
                | (keys.c.role != key.role)
                | (keys.c.label != key.label)
            )
            install = row.on_conflict_do_update(
                index_elements=["key_id"], set_=valid, where=differs
            )
            for installed in (
                (await work.connection.execute(install.returning(keys.c.key_id))).scalars().all()
            ):
                await record(
                    work,
                    self._clock,
                    SYSTEM,
                    "key_install",
                    installed,
                    {"role": key.role, "label": key.label},
                )


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
    """Checks bearer keys; a component, so that bootstrap keys are in place before the first
    request.
    """

    def __init__(
        self, database: Database, access: AccessSettings, bus: BusSettings, clock: Clock
    ) -> None:
        pepper = read_secret(bus.secrets_dir, "key-pepper")
        if pepper is None:
            raise SettingsInvalid(
                "the secret key-pepper is missing: PILOTLIGHT_SECRETS_DIR must hold a file of that name"
            )
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
            raise SettingsInvalid(
                "the admin key and the inference key are the same; write another one into one of the files"
            )
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
        return await self.require_hashed(self.hash_of(presented), role)

    async def require_hashed(self, digest: str, role: Role) -> KeyInfo:
        """Whose key has this hash?

        Raises:
            Unauthorized, Forbidden, DatabaseUnavailable: as ``require``.
        """
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
                key = await within(
                    RECHECK_DEADLINE_S, self._keys.by_hash(digest), "looking up a key"
                )
            except (DatabaseUnavailable, DeadlineExceeded):
                # A key that was valid a moment ago goes on working: warm models must not stop, nor
                # wait, with the database.
                key = cached.key
        if key is None:
            self._cache.pop(digest, None)
            return None
        if len(self._cache) >= MAX_CACHED_KEYS:
            self._cache.pop(next(iter(self._cache)))
        self._cache[digest] = _Cached(key, now_s)
        return key

    def hash_of(self, presented: str) -> str:
        """What is stored of a key.

        Raises:
            Unauthorized: no key is as long.
        """
        if len(presented) > MAX_KEY_CHARS:
            raise Unauthorized("this key is not valid")
        return self._hash(presented)

    def secret_for(self, purpose: str) -> bytes:
        """A secret that every gateway of the installation derives alike, one for each purpose."""
        return hmac.new(self._pepper, f"purpose: {purpose}".encode(), hashlib.sha256).digest()

    def _hash(self, presented: str) -> str:
        return hmac.digest(self._pepper, presented.encode(), "sha256").hex()

    def _bootstrap_key(self, path: Path, role: Role) -> ApiKey:
        try:
            plain = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsInvalid(
                f"the {role} key's file {path} cannot be read: {error}"
            ) from error
        if not MIN_KEY_CHARS <= len(plain) <= MAX_KEY_CHARS:
            raise SettingsInvalid(
                f"the {role} key's file {path} must hold a random key of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters"
            )
        digest = self._hash(plain)
        # The id follows from the key, so that gateways that start at the same moment make one row
        # of it.
        return ApiKey(
            key_id=f"key-{digest[:16]}",
            prefix=plain[:PREFIX_CHARS],
            hash=digest,
            role=role,
            label=BOOTSTRAP_LABEL,
        )
