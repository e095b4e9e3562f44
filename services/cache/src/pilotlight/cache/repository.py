"""Rows of schema ``cache``, and the pins it reads from ``gateway.models``."""

from datetime import timedelta
from typing import Any

from sqlalchemy import delete, func, insert, select, text

from pilotlight.cache.books import Grant
from pilotlight.cache.sole import check_sole, wait_for_grants
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.messages.room import Reserve
from pilotlight.policy.eviction.base import Victim
from pilotlight.policy.types import Digest, GrantId, InstanceId, Model, NodeId, WorkerId

EVICTIONS_KEPT_S = 7 * 24 * 3600.0
"""As long as the events that told of them."""
TRIM_ROWS = 1000
"""Deleted at a time: a statement must end within its deadline however much there is."""


class CacheRepository:
    """Grants and evictions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.holder_pid = 0
        """The backend that holds this cache's lock; none does while another cache answers."""

    async def models(self) -> tuple[Model, ...]:
        """Registered models: their pins, and whose digest is whose."""
        async with self._database.reading() as connection:
            rows = await connection.execute(select(tables.models.c.body))
            return tuple(from_row_json(row.body, Model) for row in rows)

    async def open_grants(self, now_s: float) -> tuple[Grant, ...]:
        """Grants that the last cache left open; times are moved to this process's clock."""
        table = tables.grants
        left = func.extract("epoch", table.c.expires_at - func.now()).label("left_s")
        async with self._database.unit_of_work() as work:
            await wait_for_grants(work.connection)
            rows = await work.connection.execute(select(table, left))
            return tuple(
                Grant(
                    grant_id=GrantId(row.grant_id),
                    instance_id=InstanceId(row.instance_id),
                    digest=Digest(row.digest),
                    worker_id=WorkerId(row.worker_id),
                    node_id=NodeId(row.node_id),
                    device_bytes=row.device_bytes,
                    host_bytes=row.host_bytes,
                    expires_s=now_s + float(row.left_s),
                )
                for row in rows
            )

    async def add_grant(self, grant: Grant, request: Reserve, evicted: list[tuple[str, NodeId, Victim]]) -> None:
        """Store a grant together with the evictions that made room for it.

        Raises:
            NotSole: another cache answers by now.
        """
        async with self._database.unit_of_work() as work:
            await check_sole(work.connection, self.holder_pid)
            await work.connection.execute(
                insert(tables.grants).values(
                    grant_id=grant.grant_id,
                    instance_id=grant.instance_id,
                    digest=grant.digest,
                    worker_id=grant.worker_id,
                    node_id=grant.node_id,
                    device_bytes=grant.device_bytes,
                    host_bytes=grant.host_bytes,
                    expires_at=func.now() + text("make_interval(secs => :lease_s)").bindparams(lease_s=request.lease_s),
                    created_at=func.now(),
                )
            )
            for kind, node_id, victim in evicted:
                inputs: dict[str, Any] = {"grant_id": grant.grant_id, "for_model": request.model, "size_bytes": victim.size_bytes}
                await work.connection.execute(
                    insert(tables.evictions).values(
                        at=func.now(), kind=kind, subject=victim.subject, node_id=node_id, reason=victim.reason, inputs=inputs
                    )
                )
                work.emit(f"{kind}_evicted", victim.subject, {"node_id": node_id, "for_model": request.model})

    async def trim_evictions(self) -> None:
        """Delete some evictions of long ago."""
        table = tables.evictions
        some = select(table.c.id).where(table.c.at < func.now() - timedelta(seconds=EVICTIONS_KEPT_S)).limit(TRIM_ROWS)
        async with self._database.unit_of_work() as work:
            await work.connection.execute(delete(table).where(table.c.id.in_(some)))

    async def end_grants(self, grant_ids: list[GrantId]) -> None:
        """Forget grants; ones that are not known any more are no error."""
        async with self._database.unit_of_work() as work:
            await work.connection.execute(delete(tables.grants).where(tables.grants.c.grant_id.in_(grant_ids)))
