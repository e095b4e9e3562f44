"""Registered models: rows of ``gateway.models``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.model_rows import ModelRows
from pilotlight.common.db.session import Database
from pilotlight.common.errors import AlreadyExists, ModelNotFound
from pilotlight.gateway.records.audit import SYSTEM, Actor, record
from pilotlight.policy.builds import MaterializePolicy
from pilotlight.policy.ids import ModelName
from pilotlight.policy.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model and when it was registered."""

    model: Model
    created_at: datetime
    updated_at: datetime
    materialize: MaterializePolicy = MaterializePolicy.MANUAL


class ModelRepository:
    """Registered models."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._rows = ModelRows(_stored)

    async def all(self) -> tuple[StoredModel, ...]:
        """Every model, by name; the same tuple as before when nothing has changed."""
        async with self._database.reading() as connection:
            return await self._rows.read(connection)

    async def get(self, name: str) -> StoredModel:
        """One model.

        Raises:
            ModelNotFound: there is none of that name.
        """
        async with self._database.reading() as connection:
            row = (
                (
                    await connection.execute(
                        select(tables.models).where(tables.models.c.name == name)
                    )
                )
                .mappings()
                .one_or_none()
            )
        if row is None:
            raise ModelNotFound(f"there is no model {name!r}", param="name")
        return _stored(row)

    async def add(
        self,
        model: Model,
        actor: Actor = SYSTEM,
        materialize: MaterializePolicy = MaterializePolicy.MANUAL,
    ) -> StoredModel:
        """Insert a new model; ``materialize`` says when its artifacts are built.

        Raises:
            AlreadyExists: the name is taken.
        """
        now = self._clock.wall()
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(
                    insert(tables.models).values(
                        name=model.name,
                        digest=model.digest,
                        body=to_row_json(model),
                        created_at=now,
                        updated_at=now,
                        materialize=materialize.value,
                    )
                )
                work.emit("model_registered", model.name, {"digest": model.digest})
                await record(
                    work, self._clock, actor, "model_register", model.name, _audited(model)
                )
        except IntegrityError as error:
            raise AlreadyExists(
                f"a model named {model.name!r} is already registered", param="name"
            ) from error
        return StoredModel(model=model, created_at=now, updated_at=now, materialize=materialize)

    async def change(
        self, name: str, changed: Callable[[Model], Model], actor: Actor = SYSTEM
    ) -> StoredModel:
        """Replace a model by what ``changed`` makes of it.

        Its row is locked meanwhile, so that no other change is lost.

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
            await work.connection.execute(
                update(tables.models).where(tables.models.c.name == name).values(**values)
            )
            work.emit("model_changed", model.name, {"digest": model.digest})
            was, now_is = _audited(before), _audited(model)
            differences = {
                key: {"from": was[key], "to": now_is[key]} for key in was if was[key] != now_is[key]
            }
            await record(work, self._clock, actor, "model_change", name, differences)
        return replace(_stored(row), model=model, updated_at=now)

    async def remove(self, name: str, actor: Actor = SYSTEM) -> None:
        """Delete a model; its instances drain.

        Raises:
            ModelNotFound: there is none of that name.
        """
        async with self._database.unit_of_work() as work:
            gone = await work.connection.execute(
                delete(tables.models).where(tables.models.c.name == name)
            )
            if gone.rowcount == 0:
                raise ModelNotFound(f"there is no model {name!r}", param="name")
            work.emit("model_deleted", ModelName(name))
            await record(work, self._clock, actor, "model_delete", name, {})


def _audited(model: Model) -> dict[str, Any]:
    """What the audit log shows of a model: what its owner asked for, and which checkpoint it is."""
    scheme, slashes, place = model.uri.partition("://")
    return {
        # What stands before the host may be a secret: it does not go to the log.
        "uri": f"{scheme}{slashes}{place.rpartition('@')[2]}"
        if "@" in place.partition("/")[0]
        else model.uri,
        "digest": model.digest,
        "dtype": model.dtype.value,
        "slo": to_row_json(model.slo),
        "scaling": to_row_json(model.scaling),
        "pinned": model.pinned,
    }


def _stored(row: Any) -> StoredModel:
    return StoredModel(
        model=from_row_json(row["body"], Model),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        materialize=MaterializePolicy(row["materialize"]),
    )
