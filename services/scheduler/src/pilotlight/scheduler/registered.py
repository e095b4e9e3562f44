"""What the scheduler reads of other owners' schemas."""

from dataclasses import dataclass

from sqlalchemy import func, select

from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json
from pilotlight.common.db.model_rows import ModelRows
from pilotlight.common.db.session import Database
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import ModelName, NodeId
from pilotlight.policy.materialized import Profile
from pilotlight.policy.model import Model

MAX_PROFILES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """The profile of a model on a kind of device."""

    model: ModelName
    device_kind: DeviceKind
    profile: Profile


class ModelReader:
    """Reads what is others': the gateway's registered models and nodes that are to be empty, the
    materializer's profiles.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows = ModelRows(lambda row: from_row_json(row["body"], Model))

    async def models(self) -> tuple[Model, ...]:
        """Every registered model; the same tuple as before when nothing has changed.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
        """
        async with self._database.reading() as connection:
            return await self._rows.read(connection)

    async def drains(self) -> dict[NodeId, float]:
        """Nodes that an operator wants to be empty, and seconds since that was asked for, by the
        database's clock.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
        """
        table = tables.drains
        age_s = func.extract("epoch", func.clock_timestamp() - table.c.requested_at)
        async with self._database.reading() as connection:
            rows = (await connection.execute(select(table.c.node_id, age_s.label("age_s")))).all()
        return {NodeId(row.node_id): max(0.0, float(row.age_s)) for row in rows}

    async def profiles(self) -> tuple[StoredProfile, ...]:
        """What was measured offline of models on devices, the newest first.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
        """
        table = tables.profiles
        newest = select(table).order_by(table.c.created_at.desc()).limit(MAX_PROFILES)
        async with self._database.reading() as connection:
            rows = (await connection.execute(newest)).all()
        return tuple(
            StoredProfile(
                model=ModelName(row.model),
                device_kind=DeviceKind(row.device_kind),
                profile=from_row_json(row.body, Profile),
            )
            for row in rows
        )
