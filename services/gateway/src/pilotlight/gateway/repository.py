"""Rows of schema ``gateway``: models, keys, usage. Other schemas are read for display alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import delete, desc, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import AlreadyExists, ModelNotFound
from pilotlight.gateway.audit import SYSTEM, Actor, record
from pilotlight.policy.types import Model, ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model and when it was registered."""

    model: Model
    created_at: datetime
    updated_at: datetime


class ModelRepository:
    """Registered models."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def all(self) -> tuple[StoredModel, ...]:
        """Every model, by name."""
        async with self._database.reading() as connection:
            rows = await connection.execute(select(tables.models).order_by(tables.models.c.name))
            return tuple(_stored(row) for row in rows.mappings())

    async def get(self, name: str) -> StoredModel:
        """One model.

        Raises:
            ModelNotFound: there is none of that name.
        """
        async with self._database.reading() as connection:
            row = (await connection.execute(select(tables.models).where(tables.models.c.name == name))).mappings().one_or_none()
        if row is None:
            raise ModelNotFound(f"there is no model {name!r}", param="name")
        return _stored(row)

    async def add(self, model: Model, actor: Actor = SYSTEM) -> StoredModel:
        """Insert a new model.

        Raises:
            AlreadyExists: the name is taken.
        """
        now = self._clock.wall()
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(
                    insert(tables.models).values(
                        name=model.name, digest=model.digest, body=to_row_json(model), created_at=now, updated_at=now
                    )
                )
                work.emit("model_registered", model.name, {"digest": model.digest})
                await record(work, self._clock, actor, "model_register", model.name, _audited(model))
        except IntegrityError as error:
            raise AlreadyExists(f"a model named {model.name!r} is already registered", param="name") from error
        return StoredModel(model=model, created_at=now, updated_at=now)

    async def change(self, name: str, changed: Callable[[Model], Model], actor: Actor = SYSTEM) -> StoredModel:
        """Replace a model by what ``changed`` makes of it. Its row is locked meanwhile, so that no other change is lost.

        Raises:
            ModelNotFound: there is none of that name.
            PilotlightError: what ``changed`` raises; nothing was written.
        """
        now = self._clock.wall()
        async with self._database.unit_of_work() as work:
            locked = select(tables.models).where(tables.models.c.name == name).with_for_update()
            row = (await work.connection.execute(locked)).mappings().one_or_none()
            if row is None:
                raise ModelNotFound(f"there is no model {name!r}", param="name")
            before = _stored(row).model
            model = changed(before)
            values = {"digest": model.digest, "body": to_row_json(model), "updated_at": now}
            await work.connection.execute(update(tables.models).where(tables.models.c.name == name).values(**values))
            work.emit("model_changed", model.name, {"digest": model.digest})
            was, now_is = _audited(before), _audited(model)
            differences = {key: {"from": was[key], "to": now_is[key]} for key in was if was[key] != now_is[key]}
            await record(work, self._clock, actor, "model_change", name, differences)
        return StoredModel(model=model, created_at=row["created_at"], updated_at=now)

    async def remove(self, name: str, actor: Actor = SYSTEM) -> None:
        """Delete a model; its instances drain.

        Raises:
            ModelNotFound: there is none of that name.
        """
        async with self._database.unit_of_work() as work:
            gone = await work.connection.execute(delete(tables.models).where(tables.models.c.name == name))
            if gone.rowcount == 0:
                raise ModelNotFound(f"there is no model {name!r}", param="name")
            work.emit("model_deleted", ModelName(name))
            await record(work, self._clock, actor, "model_delete", name, {})


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
            row = (await connection.execute(select(keys).where(keys.c.hash == digest, keys.c.revoked_at.is_(None)))).one_or_none()
        if row is None:
            return None
        return ApiKey(key_id=row.key_id, prefix=row.prefix, hash=row.hash, role=row.role, label=row.label)

    async def ensure_bootstrap(self, key: ApiKey) -> None:
        """Make this the only valid key with its role and label; one that was revoked before is valid again."""
        keys = tables.api_keys
        others = (keys.c.role == key.role, keys.c.label == key.label, keys.c.key_id != key.key_id, keys.c.revoked_at.is_(None))
        row = insert(keys).values(
            key_id=key.key_id, prefix=key.prefix, hash=key.hash, role=key.role, label=key.label, created_at=func.now()
        )
        valid = {"role": key.role, "label": key.label, "revoked_at": None}
        async with self._database.unit_of_work() as work:
            revoke = update(keys).where(*others).values(revoked_at=func.now()).returning(keys.c.key_id)
            for revoked in (await work.connection.execute(revoke)).scalars().all():
                await record(work, self._clock, SYSTEM, "key_revoke", revoked, {"role": key.role, "label": key.label})
            differs = keys.c.revoked_at.is_not(None) | (keys.c.role != key.role) | (keys.c.label != key.label)
            install = row.on_conflict_do_update(index_elements=["key_id"], set_=valid, where=differs)
            for installed in (await work.connection.execute(install.returning(keys.c.key_id))).scalars().all():
                await record(work, self._clock, SYSTEM, "key_install", installed, {"role": key.role, "label": key.label})


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One finished request."""

    at: datetime
    model: str
    key_id: str
    request_id: str
    prompt_tokens: int
    output_tokens: int
    status: str


class UsageRepository:
    """Finished requests."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, rows: Sequence[UsageRow], *, writer: int, in_doubt: bool = False) -> None:
        """Insert a batch.

        ``writer`` is the recorder's own number: its transactions come one after the other, so that an ``in_doubt`` batch, which an
        earlier try may have committed before its answer was lost, waits for the end of that try and then adds only what is missing.
        """
        async with self._database.unit_of_work() as work:
            await work.connection.execute(select(func.pg_advisory_xact_lock(writer)))
            if in_doubt:
                rows = await _missing(work, rows)
            if not rows:
                return
            await work.connection.execute(
                insert(tables.usage),
                [
                    {
                        "at": row.at,
                        "model": row.model,
                        "key_id": row.key_id,
                        "request_id": row.request_id,
                        "prompt_tokens": row.prompt_tokens,
                        "output_tokens": row.output_tokens,
                        "status": row.status,
                    }
                    for row in rows
                ],
            )


async def _missing(work: UnitOfWork, rows: Sequence[UsageRow]) -> list[UsageRow]:
    table = tables.usage
    known = select(table.c.request_id).where(
        table.c.at >= min(row.at for row in rows), table.c.request_id.in_([row.request_id for row in rows])
    )
    written = set((await work.connection.execute(known)).scalars())
    return [row for row in rows if row.request_id not in written]


class DecisionReader:
    """The scheduler's last decisions, for a request that asks why nothing was done."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def decisions(self, model: str | None, limit: int) -> list[dict[str, Any]]:
        """When and why, the newest first."""
        table = tables.decisions
        rows = select(table.c.at, table.c.reasons).order_by(desc(table.c.at)).limit(limit)
        async with self._database.reading() as connection:
            found = await connection.execute(rows if model is None else rows.where(table.c.model == model))
            return [dict(row) for row in found.mappings()]


def _audited(model: Model) -> dict[str, Any]:
    """What the audit log shows of a model: what its owner asked for, and which checkpoint it is."""
    scheme, slashes, place = model.uri.partition("://")
    return {
        # Whatever somebody put before the host is no business of the log's.
        "uri": f"{scheme}{slashes}{place.rpartition('@')[2]}" if "@" in place.partition("/")[0] else model.uri,
        "digest": model.digest,
        "dtype": model.dtype.value,
        "slo": to_row_json(model.slo),
        "scaling": to_row_json(model.scaling),
        "pinned": model.pinned,
    }


def _stored(row: Any) -> StoredModel:
    return StoredModel(model=from_row_json(row["body"], Model), created_at=row["created_at"], updated_at=row["updated_at"])
