"""API keys: stored hashed, shown once, admin and inference apart.

A key is ``pl-<role>-<random>``; its first characters find the row, an HMAC with the installation's
pepper proves it. Keys have full entropy, so a slow hash would buy nothing and cost each request.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pilotlight.common.clock import Clock
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    DatabaseUnavailable,
    DeadlineExceeded,
    Forbidden,
    SettingsInvalid,
    Unauthorized,
)
from pilotlight.common.secret_files import read_secret
from pilotlight.common.settings import BusSettings
from pilotlight.common.waiting import within
from pilotlight.gateway.settings import AccessSettings
from pilotlight.gateway.tenants.keys import BOOTSTRAP_LABEL, ApiKey, KeyRepository, Minted, Role
from pilotlight.policy.access import UNLIMITED, Access, AdminRole
from pilotlight.policy.tenants import NOBODY, Tenant

PREFIX_CHARS = 16
MIN_KEY_CHARS = 20
MAX_KEY_CHARS = 256
INCORRECT = "Incorrect API key provided"
"""OpenAI's words: LiteLLM knows by them what a 401 is about."""
CACHE_S = 5.0
"""How long other changes of a key or its project take where the event that tells of them is lost;
one that is revoked is asked for besides (``KeyFollower``)."""
RENEW_S = 3.0
"""A key that is in use is looked up again when it was read so long ago: no request waits for
that."""
IN_USE_S = 600.0
"""As long after its last request a key counts as in use."""
MAX_RENEWED = 500
"""Keys of one look."""
RANDOM_BYTES = 32
ID_BYTES = 8
RECHECK_DEADLINE_S = 1.0
"""How long a request with a known key waits for a database that does not answer."""
MAX_CACHED_KEYS = 10_000
_QUICK_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Whose request it is."""

    key_id: str
    role: Role
    label: str
    access: Access = UNLIMITED
    admin_role: AdminRole = AdminRole.OWNER
    """Of an admin key."""
    tenant: Tenant = NOBODY

    def for_route(self, path: str) -> "KeyInfo":
        """This key, which may be used there.

        Raises:
            Forbidden: it may not.
        """
        if not self.access.allows_route(path):
            raise Forbidden(f"this key is not for {path}: its scope names other routes")
        return self


class _Cached:
    """A key as it was read."""

    __slots__ = ("info", "key", "look", "read_s", "used_s")

    def __init__(self, key: ApiKey, read_s: float) -> None:
        self.key = key
        self.read_s = self.used_s = read_s
        self.info: KeyInfo | None = None
        """What requests are told of it."""
        self.look: asyncio.Task[ApiKey | None] | None = None
        """It is looked up again: those that come meanwhile take it as it is, and, where it is too
        old for that, what this finds."""


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
        self._quick_key = secrets.token_bytes(RANDOM_BYTES)
        self._hashes: dict[bytes, str] = {}
        """Hashes of keys that were valid, by a digest of them that takes less time, and is this
        process's alone."""
        self._used: set[str] = set()
        self._changes = 0
        """Counts what was forgotten: what was read before that is not kept."""

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
        quick = hashlib.blake2b(
            presented.encode(), digest_size=_QUICK_BYTES, key=self._quick_key
        ).digest()
        known = self._hashes.get(quick)
        if known is not None:
            return await self.require_hashed(known, role)
        digest = self.hash_of(presented)
        info = await self.require_hashed(digest, role)
        if len(self._hashes) >= MAX_CACHED_KEYS:
            del self._hashes[next(iter(self._hashes))]
        self._hashes[quick] = digest
        return info

    async def require_hashed(self, digest: str, role: Role) -> KeyInfo:
        """Whose key has this hash?

        Raises:
            Unauthorized, Forbidden, DatabaseUnavailable: as ``require``.
        """
        cached, now_s = self._cache.get(digest), self._clock.monotonic_s()
        if cached is None or now_s - cached.read_s >= CACHE_S:
            cached = await self._read(digest, cached)
        else:
            cached.used_s = now_s
        info = self._valid(cached, role)
        self._used.add(info.key_id)
        return info

    async def of_key(self, key_id: str, role: Role) -> KeyInfo:
        """What a key may do now whose request was taken before.

        Raises:
            Unauthorized: it was revoked since, or has expired.
            Forbidden: it is for the other API.
            DatabaseUnavailable: it cannot be looked up now.
        """
        key = await self._keys.by_id(key_id)
        return self._valid(None if key is None else _Cached(key, 0.0), role)

    def _valid(self, cached: _Cached | None, role: Role) -> KeyInfo:
        if cached is None:
            raise Unauthorized(INCORRECT)
        key = cached.key
        if key.expires_at is not None and key.expires_at <= self._clock.wall():
            raise Unauthorized("this key has expired: make another with `pilotlight key create`")
        if key.role != role:
            raise Forbidden(f"this route needs an {role} key, and this is an {key.role} key")
        if cached.info is None:
            cached.info = KeyInfo(
                key.key_id, role, key.label, key.access, key.admin_role, key.tenant
            )
        return cached.info

    def forget(self, *, key_id: str | None = None, project: str | None = None) -> None:
        """Look again before a key, or any key of a project, is used again."""
        self._changes += 1
        stale = [
            digest
            for digest, cached in self._cache.items()
            if cached.key.key_id == key_id or cached.key.project == project
        ]
        for digest in stale:
            del self._cache[digest]

    async def renew(self) -> None:
        """Look the keys up again that are in use, before a request has to wait for it. While the
        database is away, they stay as old as they are.
        """
        now_s, changes = self._clock.monotonic_s(), self._changes
        in_use = (
            (digest, cached)
            for digest, cached in self._cache.items()
            if cached.look is None
            and now_s - cached.read_s >= RENEW_S
            and now_s - cached.used_s < IN_USE_S
        )
        due = dict(islice(in_use, MAX_RENEWED))
        if not due:
            return
        try:
            asked = self._keys.by_hashes(due.keys())
            found = await within(RECHECK_DEADLINE_S, asked, "looking up keys that are in use")
        except (DatabaseUnavailable, DeadlineExceeded):
            return
        if changes != self._changes:
            return  # As for ``_read``.
        for digest, cached in due.items():
            if self._cache.get(digest) is not cached:
                continue  # A request has looked it up meanwhile.
            key = found.get(digest)
            if key is None:
                del self._cache[digest]
            elif key == cached.key:
                cached.read_s = now_s
            else:
                renewed = self._cache[digest] = _Cached(key, now_s)
                renewed.used_s = cached.used_s

    def take_used(self) -> frozenset[str]:
        """Ids of keys that were used since this was asked before."""
        used = frozenset(self._used)
        self._used.clear()
        return used

    def mint(self, role: Role) -> Minted:
        """A new random key."""
        plain = f"pl-{role}-{secrets.token_urlsafe(RANDOM_BYTES)}"
        return Minted(
            key_id=f"key-{secrets.token_hex(ID_BYTES)}",
            plain=plain,
            prefix=plain[:PREFIX_CHARS],
            hash=self._hash(plain),
        )

    async def _read(self, digest: str, cached: _Cached | None) -> _Cached | None:
        """Look a key up, again where it is known."""
        now_s, changes = self._clock.monotonic_s(), self._changes
        if cached is None:
            key = await self._keys.by_hash(digest)
        else:
            mine = cached.look is None
            if not mine and now_s - cached.read_s < CACHE_S + RECHECK_DEADLINE_S:
                return cached
            if cached.look is None:
                cached.look = asyncio.create_task(self._read_again(digest, cached))
            # One look is enough for all that ask at the same moment: where the loop is late by
            # seconds they are thousands, and with a look each it would be later still.
            key = await asyncio.shield(cached.look)
            if not mine:
                return None if key is None else _Cached(key, now_s)
        if key is None:
            self._cache.pop(digest, None)
            return None
        read = _Cached(key, now_s)
        if changes != self._changes:
            # It may have been revoked between the reading and now: the next request looks again.
            return read
        if len(self._cache) >= MAX_CACHED_KEYS:
            self._cache.pop(next(iter(self._cache)))
        self._cache[digest] = read
        return read

    async def _read_again(self, digest: str, cached: _Cached) -> ApiKey | None:
        try:
            return await within(RECHECK_DEADLINE_S, self._keys.by_hash(digest), "looking up a key")
        except (DatabaseUnavailable, DeadlineExceeded):
            # A key that was valid a moment ago goes on working: warm models must not stop, nor
            # wait, with the database.
            return cached.key
        finally:
            cached.look = None

    def hash_of(self, presented: str) -> str:
        """What is stored of a key.

        Raises:
            Unauthorized: no key is as long.
        """
        if len(presented) > MAX_KEY_CHARS:
            raise Unauthorized(INCORRECT)
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
