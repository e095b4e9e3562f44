"""API keys as they are stored: never the keys themselves."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Row, RowMapping, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import Conflict, NotFound
from pilotlight.gateway.records.audit import SYSTEM, Actor, record
from pilotlight.policy.access import UNLIMITED, Access, AdminRole, KeyScope
from pilotlight.policy.tenants import NOBODY, Tenant, TenantLimits

Role = Literal["admin", "inference"]

BOOTSTRAP_LABEL = "bootstrap"
"""Of keys from files."""
KEY_CHANGED = "key_changed"
"""Event: a key ended, or will sooner than it would have."""
MAX_SHOWN = 1000
SHOWN = (
    "key_id",
    "prefix",
    "role",
    "label",
    "project",
    "admin_role",
    "scope",
    "limits",
    "created_at",
    "expires_at",
    "last_used_at",
    "revoked_at",
)
"""Columns that the API shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as stored: never the key itself."""

    key_id: str
    prefix: str
    hash: str
    role: Role
    label: str
    project: str = tables.DEFAULT_PROJECT
    access: Access = UNLIMITED
    admin_role: AdminRole = AdminRole.OWNER
    expires_at: datetime | None = None
    tenant: Tenant = NOBODY
    """Whose it is, with the limits of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minted:
    """A new key: what its owner gets, and what is stored of it."""

    key_id: str
    plain: str
    prefix: str
    hash: str


class KeyRepository:
    """API keys."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def by_hash(self, digest: str) -> ApiKey | None:
        """The key with this hash, unless it is revoked."""
        return (await self.by_hashes((digest,))).get(digest)

    async def by_hashes(self, digests: Collection[str]) -> dict[str, ApiKey]:
        """The keys with these hashes, by them, but for those that are revoked."""
        found = await self._found(tables.api_keys.c.hash.in_(digests))
        return {key.hash: key for key in found}

    async def by_id(self, key_id: str) -> ApiKey | None:
        """The key of this id, unless it is revoked."""
        found = await self._found(tables.api_keys.c.key_id == key_id)
        return found[0] if found else None

    async def _found(self, which: ColumnElement[bool]) -> list[ApiKey]:
        keys, projects = tables.api_keys, tables.projects
        found = (
            select(
                keys,
                projects.c.scope.label("project_scope"),
                projects.c.limits.label("project_limits"),
                projects.c.weight,
            )
            .join(projects, projects.c.name == keys.c.project)
            .where(which, keys.c.revoked_at.is_(None))
        )
        async with self._database.reading() as connection:
            rows = (await connection.execute(found)).all()
        return [_key_of(row) for row in rows]

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
        # Gateways start together. ON CONFLICT names one of the table's two unique indexes: of two
        # that insert the same row at the same moment, the other one would have one fail.
        one_at_a_time = select(func.pg_advisory_xact_lock(func.hashtext(keys.fullname)))
        async with self._database.unit_of_work() as work:
            await work.connection.execute(one_at_a_time)
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

    async def add(self, key: ApiKey, actor: Actor) -> datetime:
        """Store a new key; when that was.

        Raises:
            NotFound: there is no such project.
        """
        now = self._clock.wall()
        try:
            async with self._database.unit_of_work() as work:
                await self._insert(work, key, now)
                await record(work, self._clock, actor, "key_create", key.key_id, _audited(key))
        except IntegrityError as error:
            raise NotFound(f"there is no project {key.project!r}", param="project") from error
        return now

    async def shown(self, project: str | None, *, revoked: bool) -> list[dict[str, Any]]:
        """Keys as people see them, the newest first; at most ``MAX_SHOWN``."""
        keys = tables.api_keys
        wanted = select(*(keys.c[name] for name in SHOWN)).order_by(
            keys.c.created_at.desc(), keys.c.key_id
        )
        if project is not None:
            wanted = wanted.where(keys.c.project == project)
        if not revoked:
            wanted = wanted.where(keys.c.revoked_at.is_(None))
        async with self._database.reading() as connection:
            rows = (await connection.execute(wanted.limit(MAX_SHOWN))).mappings().all()
        return [key_body({name: row[name] for name in SHOWN}) for row in rows]

    async def revoke(self, key_id: str, actor: Actor) -> None:
        """End a key.

        Raises:
            NotFound: there is no valid key of this id.
            Conflict: it comes from a file.
        """
        async with self._database.unit_of_work() as work:
            await self._own(work, key_id)
            await self._end(work, key_id, self._clock.wall())
            await record(work, self._clock, actor, "key_revoke", key_id, {})

    async def rotate(
        self, key_id: str, mint: Callable[[Role], Minted], overlap_s: float, actor: Actor
    ) -> tuple[ApiKey, Minted, datetime]:
        """Store a key in the place of another, for the same models and routes; when that was.

        Args:
            key_id: the old one.
            mint: makes the new one.
            overlap_s: for how long the old one goes on; 0: it ends now.
            actor: who asks.

        Raises:
            NotFound, Conflict: as ``revoke``.
        """
        now = self._clock.wall()
        async with self._database.unit_of_work() as work:
            row = await self._own(work, key_id)
            minted = mint(row["role"])
            key = ApiKey(
                key_id=minted.key_id,
                prefix=minted.prefix,
                hash=minted.hash,
                role=row["role"],
                label=row["label"],
                project=row["project"],
                access=Access(key=from_row_json(row["scope"], KeyScope)),
                admin_role=AdminRole(row["admin_role"]),
                expires_at=row["expires_at"],
                tenant=Tenant(key_limits=from_row_json(row["limits"], TenantLimits)),
            )
            await self._insert(work, key, now)
            if overlap_s > 0:
                await self._expire(work, key_id, now + timedelta(seconds=overlap_s))
            else:
                await self._end(work, key_id, now)
            changes = {"new_key_id": minted.key_id, "overlap_s": overlap_s}
            await record(work, self._clock, actor, "key_rotate", key_id, changes)
        return key, minted, now

    async def limit(self, key_id: str, limits: TenantLimits, actor: Actor) -> dict[str, Any]:
        """Say anew how much a key may use, whole; the key as people see it.

        Raises:
            NotFound: there is no valid inference key of this id.
        """
        keys = tables.api_keys
        changed = (
            update(keys)
            .where(keys.c.key_id == key_id, keys.c.revoked_at.is_(None), keys.c.role == "inference")
            .values(limits=to_row_json(limits))
            .returning(*(keys.c[name] for name in SHOWN))
        )
        async with self._database.unit_of_work() as work:
            row = (await work.connection.execute(changed)).mappings().one_or_none()
            if row is None:
                raise NotFound(f"there is no valid inference key {key_id!r}", param="key_id")
            work.emit(KEY_CHANGED, key_id)
            await record(work, self._clock, actor, "key_limit", key_id, to_row_json(limits))
        return key_body({name: row[name] for name in SHOWN})

    async def revoked_since(self, moment: datetime) -> frozenset[str]:
        """Ids of keys that were revoked after a moment."""
        keys = tables.api_keys
        async with self._database.reading() as connection:
            ended = select(keys.c.key_id).where(keys.c.revoked_at >= moment)
            return frozenset((await connection.execute(ended)).scalars().all())

    async def used(self, key_ids: Collection[str]) -> None:
        """Note that these keys were used a moment ago."""
        keys = tables.api_keys
        # Gateways note the same keys: one that is being noted is left to the other.
        free = (
            select(keys.c.key_id)
            .where(keys.c.key_id.in_(sorted(key_ids)))
            .with_for_update(skip_locked=True)
        )
        async with self._database.unit_of_work() as work:
            await work.connection.execute(
                update(keys).where(keys.c.key_id.in_(free)).values(last_used_at=self._clock.wall())
            )

    async def _insert(self, work: UnitOfWork, key: ApiKey, now: datetime) -> None:
        await work.connection.execute(
            insert(tables.api_keys).values(
                key_id=key.key_id,
                prefix=key.prefix,
                hash=key.hash,
                role=key.role,
                label=key.label,
                project=key.project,
                scope=to_row_json(key.access.key),
                admin_role=key.admin_role.value,
                expires_at=key.expires_at,
                limits=to_row_json(key.tenant.key_limits),
                created_at=now,
            )
        )

    async def _own(self, work: UnitOfWork, key_id: str) -> RowMapping:
        """A valid key's row, locked."""
        keys = tables.api_keys
        locked = select(keys).where(keys.c.key_id == key_id, keys.c.revoked_at.is_(None))
        row = (await work.connection.execute(locked.with_for_update())).mappings().one_or_none()
        if row is None:
            raise NotFound(f"there is no valid key {key_id!r}", param="key_id")
        if row["label"] == BOOTSTRAP_LABEL:
            raise Conflict("this key comes from a file: write another into it and restart gateways")
        return row

    async def _end(self, work: UnitOfWork, key_id: str, now: datetime) -> None:
        keys = tables.api_keys
        await work.connection.execute(
            update(keys).where(keys.c.key_id == key_id).values(revoked_at=now)
        )
        work.emit(KEY_CHANGED, key_id)

    async def _expire(self, work: UnitOfWork, key_id: str, at: datetime) -> None:
        keys = tables.api_keys
        await work.connection.execute(
            update(keys)
            .where(keys.c.key_id == key_id)
            .values(expires_at=func.least(keys.c.expires_at, at))
        )
        work.emit(KEY_CHANGED, key_id)


def key_body(row: Mapping[str, Any]) -> dict[str, Any]:
    """A key as the API shows it."""
    scope = from_row_json(row["scope"], KeyScope)
    body = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in row.items()
        if name not in ("scope", "limits")
    }
    limits = from_row_json(row["limits"], TenantLimits)
    return {
        **body,
        "models": list(scope.models),
        "routes": list(scope.routes),
        "limits": to_row_json(limits),
    }


def _audited(key: ApiKey) -> dict[str, Any]:
    return {
        "role": key.role,
        "label": key.label,
        "project": key.project,
        "admin_role": key.admin_role.value,
        **to_row_json(key.access.key),
    }


def _key_of(row: Row[Any]) -> ApiKey:
    return ApiKey(
        key_id=row.key_id,
        prefix=row.prefix,
        hash=row.hash,
        role=row.role,
        label=row.label,
        project=row.project,
        access=Access(
            project=from_row_json(row.project_scope, KeyScope),
            key=from_row_json(row.scope, KeyScope),
        ),
        admin_role=AdminRole(row.admin_role),
        expires_at=row.expires_at,
        tenant=Tenant(
            project=row.project,
            weight=row.weight,
            project_limits=from_row_json(row.project_limits, TenantLimits),
            key_limits=from_row_json(row.limits, TenantLimits),
        ),
    )
