"""Rows of schema ``cache``, and what it reads of others: models, drains, instances, the lease and
estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ARRAY,
    CTE,
    Column,
    Double,
    Select,
    Text,
    any_,
    bindparam,
    delete,
    exists,
    func,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from pilotlight.cache.grants import Grant
from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.sole import SOLE, NotSole, wait_for_grants
from pilotlight.common.db import tables
from pilotlight.common.db.documents import Row, columns, document, given, inserted
from pilotlight.common.db.events import Event, event, events_inserted
from pilotlight.common.db.mapping import from_row_json
from pilotlight.common.db.model_rows import ModelRows
from pilotlight.common.db.retention import Keep, keep_outbox
from pilotlight.common.db.session import Database
from pilotlight.policy.estimates import with_estimates
from pilotlight.policy.eviction.base import Victim
from pilotlight.policy.eviction.thrash import Thrash
from pilotlight.policy.ids import (
    Digest,
    Epoch,
    Generation,
    GrantId,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.instance import ENDED
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Estimate, Estimates


def retention(settings: CacheSettings) -> tuple[Keep, ...]:
    """How long rows of this schema are kept. Grants end by themselves."""
    at = tables.evictions.c.at
    return Keep(
        at=at, days=settings.evictions_keep_days, max_rows=settings.evictions_max_rows
    ), keep_outbox("cache", settings)


_GRANT = (
    "grant_id",
    "instance_id",
    "digest",
    "worker_id",
    "node_id",
    "device_bytes",
    "host_bytes",
    "generation",
)
_given = given(*columns(tables.grants, *_GRANT), Column("lease_s", Double), document="new_grants")
_expires_at = func.now() + _given.c.lease_s * text("interval '1 second'")
_COLUMNS = (*_GRANT, "expires_at", "created_at")
_granted = insert(tables.grants).from_select(
    _COLUMNS,
    select(*(_given.c[name] for name in _GRANT), _expires_at, func.now()).select_from(
        _given.join(SOLE, true())
    ),
)
_new_grants = _granted.on_conflict_do_update(
    index_elements=["instance_id", "worker_id"],
    set_={name: _granted.excluded[name] for name in _COLUMNS},
).cte("new_grants")
_EVICTION = ("kind", "subject", "node_id", "reason", "inputs")
_new_evictions = inserted(
    tables.evictions, _EVICTION, "new_evictions", where=SOLE, at=func.now()
).cte("new_evictions")
_changed_grant = (
    update(tables.grants)
    .where(tables.grants.c.grant_id == bindparam("changed"), exists(select(SOLE)))
    .values(device_bytes=bindparam("new_bytes"), generation=bindparam("new_generation"))
    .cte("changed_grant")
)


def _if_sole(*parts: CTE) -> Select[bool]:
    """All of them in one statement, which says whether they were carried out: another cache may
    answer by now. None sees what another writes.
    """
    return select(exists(select(SOLE)).label("is_sole")).add_cte(*parts)


_GRANTING = _if_sole(_new_grants)
_EVICTING = _if_sole(
    _new_grants, _new_evictions, events_inserted("cache", where=SOLE).cte("new_events")
)
_CHANGING = _if_sole(_changed_grant)
_ENDING = delete(tables.grants).where(
    tables.grants.c.grant_id == any_(bindparam("ended", type_=ARRAY(Text)))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A grant whose row is to be written."""

    grant: Grant
    model: ModelName
    lease_s: float
    evicted: Sequence[tuple[str, Victim]] = ()
    """What went for it, each with its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphans:
    """Grants that may be without a user."""

    over: frozenset[GrantId]
    """Their instance has ended."""
    unwritten: frozenset[GrantId]
    """There is no row of their instance, or not yet."""


class CacheRepository:
    """Grants and evictions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._models = ModelRows(lambda row: from_row_json(row["body"], Model))
        self.holder_pid = 0
        """The backend that holds this cache's lock; none does while another cache answers."""

    async def connect_ahead(self) -> None:
        """Be ready to write a grant."""
        await self._database.connect_ahead()

    async def models(self) -> tuple[Model, ...]:
        """Registered models: their pins, and whose digest is whose; the same tuple as before when
        nothing has changed.
        """
        async with self._database.reading() as connection:
            return await self._models.read(connection)

    async def estimates(self) -> Estimates:
        """What the scheduler has learned of cold starts, by model."""
        async with self._database.reading() as connection:
            bodies = (await connection.execute(select(tables.estimates.c.body))).scalars().all()
        return with_estimates({}, (from_row_json(body, Estimate) for body in bodies))

    async def drains(self) -> frozenset[NodeId]:
        """Nodes that an operator wants to be empty."""
        async with self._database.reading() as connection:
            return frozenset((await connection.execute(select(tables.drains.c.node_id))).scalars())

    async def add_struck(
        self, node_id: NodeId, reason: str, copies: Mapping[Digest, ModelName]
    ) -> None:
        """Store that a node gave copies up, though no start asked for their room.

        Args:
            node_id: Where.
            reason: Why.
            copies: Which, with whose they were; empty: of no model.
        """
        async with self._database.unit_of_work() as work:
            for digest, model in copies.items():
                row: dict[str, Any] = {
                    "kind": "copy",
                    "subject": digest,
                    "node_id": node_id,
                    "reason": reason,
                    "inputs": {"model": model},
                }
                await work.connection.execute(insert(tables.evictions).values(at=func.now(), **row))
                work.emit("copy_evicted", digest, {"node_id": node_id, "for_model": ""})

    async def add_thrash(self, found: Thrash) -> None:
        """Tell that models take each other's places."""
        async with self._database.unit_of_work() as work:
            work.emit(
                "thrash",
                found.models[0],
                {
                    "models": list(found.models),
                    "reloads_per_hour": found.reloads_per_hour,
                    "missing_bytes": found.missing_bytes,
                    "advice": found.advice,
                },
            )

    async def leading_epoch(self) -> Epoch:
        """Of the scheduler that took the lease last; 0 when none ever did."""
        async with self._database.reading() as connection:
            return Epoch(
                (await connection.execute(select(tables.lease.c.epoch))).scalar_one_or_none() or 0
            )

    async def open_grants(self, now_s: float) -> tuple[Grant, ...]:
        """Grants that the last cache left open; times are moved to this process's clock."""
        table = tables.grants
        # Never more than was granted: the clock may have been set back.
        left = func.least(table.c.expires_at - func.now(), table.c.expires_at - table.c.created_at)
        left_s = func.extract("epoch", left).label("left_s")
        async with self._database.unit_of_work() as work:
            await wait_for_grants(work.connection)
            rows = await work.connection.execute(select(table, left_s))
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
                    generation=Generation(row.generation),
                    since_s=now_s,
                )
                for row in rows
            )

    async def write_grants(self, added: Sequence[Added], ended: Sequence[GrantId]) -> None:
        """Forget some grants, then store others together with the evictions that made room for
        them; ones that are not known any more are no error.

        Each takes the place of an earlier one of its stage. No two are of one stage.

        Raises:
            NotSole: another cache answers by now, and something is to be stored.
        """
        if ended:
            await self._database.write_at_once(_ENDING, {"ended": list(ended)})
        if not added:
            return
        documents = document([_row_of(one) for one in added], "new_grants")
        evicted = [_eviction_of(one, *victim) for one in added for victim in one.evicted]
        if evicted:
            told = [_evicted(one, *victim) for one in added for victim in one.evicted]
            documents |= document(evicted, "new_evictions")
            await self._write_if_sole(_EVICTING, documents, told)
        else:
            await self._write_if_sole(_GRANTING, documents)

    async def _write_if_sole(
        self, statement: Select[bool], parameters: Mapping[str, Any], told: Sequence[Event] = ()
    ) -> None:
        held = {"holder_pid": self.holder_pid}
        ((is_sole,),) = await self._database.write_at_once(statement, {**parameters, **held}, told)
        if not is_sole:
            raise NotSole

    async def orphans(self) -> Orphans:
        """Which grants may be of no use any more."""
        grants, instances = tables.grants, tables.instances
        unwritten = instances.c.instance_id.is_(None).label("unwritten")
        ended = instances.c.state.in_([state.value for state in ENDED])
        join = grants.outerjoin(instances, instances.c.instance_id == grants.c.instance_id)
        found = select(
            grants.c.grant_id, unwritten, func.coalesce(ended, False).label("ended")
        ).where(instances.c.instance_id.is_(None) | ended)
        async with self._database.reading() as connection:
            rows = (await connection.execute(found.select_from(join))).all()
        return Orphans(
            over=frozenset(GrantId(row.grant_id) for row in rows if row.ended),
            unwritten=frozenset(GrantId(row.grant_id) for row in rows if row.unwritten),
        )

    async def generations(
        self, instance_ids: tuple[InstanceId, ...]
    ) -> dict[InstanceId, Generation]:
        """Of which generation the rows of instances are."""
        table = tables.instances
        found = select(table.c.instance_id, table.c.generation).where(
            table.c.instance_id.in_(instance_ids)
        )
        async with self._database.reading() as connection:
            rows = (await connection.execute(found)).all()
        return {InstanceId(row.instance_id): Generation(row.generation) for row in rows}

    async def change_grant(self, grant: Grant) -> None:
        """Store another size and generation of a grant; one that is not known any more is no
        error.

        Raises:
            NotSole: another cache answers by now.
        """
        changes = {
            "changed": grant.grant_id,
            "new_bytes": grant.device_bytes,
            "new_generation": grant.generation,
        }
        await self._write_if_sole(_CHANGING, changes)


def _row_of(added: Added) -> Row:
    grant = added.grant
    return {name: getattr(grant, name) for name in _GRANT} | {"lease_s": added.lease_s}


def _eviction_of(added: Added, kind: str, victim: Victim) -> Row:
    return {
        "kind": kind,
        "subject": victim.subject,
        "node_id": added.grant.node_id,
        "reason": victim.reason,
        "inputs": _inputs_of(added, victim),
    }


def _evicted(added: Added, kind: str, victim: Victim) -> Event:
    data = {"node_id": added.grant.node_id, "for_model": added.model}
    return event(f"{kind}_evicted", victim.subject, data)


def _inputs_of(added: Added, victim: Victim) -> dict[str, Any]:
    """What an eviction was chosen by."""
    return {
        "grant_id": added.grant.grant_id,
        "for_model": added.model,
        "model": victim.model,
        "size_bytes": victim.size_bytes,
        "idle_s": victim.idle_s,
        "penalty_s": victim.penalty_s,
        "arrivals_per_s": victim.arrivals_per_s,
        "loss": victim.loss,
        "score": victim.score,
        "spared": [
            {
                "model": one.model,
                "size_bytes": one.size_bytes,
                "loss": one.loss,
                "score": one.score,
            }
            for one in victim.spared
        ],
    }
