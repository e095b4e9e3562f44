"""The leader's lease: one row, by the database's clock.

A leader's every write happens in a transaction that first locks the lease row for sharing and sees
in it the leader's own epoch, not expired. A new leader updates that row, so it waits until such a
transaction has ended: what an old leader could still write is written before the new one reads, and
nothing is written after. A process that is stopped in the middle of such a transaction loses it
before its lease expires: it would keep the row from the next leader. Where the whole transaction is
one statement there is no such middle.
"""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Executable, bindparam, func, literal, select, update
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.events import Event
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import NotLeader
from pilotlight.common.waiting import within
from pilotlight.policy.ids import Epoch

LEASE_S = 2.25
"""After this much silence of its holder any scheduler may take the lease."""
RENEW_S = 0.75
"""What is left when it is renewed is what a holder or its database may stand still for."""
IDLE_S = 1.75
"""Silence in the middle of a transaction that locks the lease's row, after which the database ends
it: less than a lease."""
DEADLINE_S = 1.0
"""For one try to take, renew or give back."""

_lease = tables.lease
_now = func.clock_timestamp()
_term = literal(timedelta(seconds=LEASE_S))
TERM = (
    select(_lease.c.epoch)
    .where(_lease.c.holder == bindparam("term_holder"))
    .where(_lease.c.epoch == bindparam("term_epoch"))
    .where(_lease.c.expires_at > _now)
    .with_for_update(read=True)
    .cte("term")
)
"""The lease's row, locked for sharing, in a statement of ``Fence.write_at_once``; none when the
term is over. What is written in that statement needs it to be there."""


class Lease:
    """Takes, renews and gives back the lease for one process."""

    def __init__(self, database: Database, holder: str, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self.holder = holder
        self._stale: datetime | None = None
        self._stale_since_s = 0.0
        self.left_s = math.inf
        """Until another's lease expires, as ``take`` saw it the last time."""

    async def take(self, at_least: Epoch) -> Epoch | None:
        """Take the lease if it is free; the new epoch, above every earlier one and not below
        ``at_least``.

        None while it is held.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
            DeadlineExceeded: it did not answer in time.
        """
        return await within(DEADLINE_S, self._take(at_least), "taking the lease")

    async def renew(self, epoch: Epoch) -> bool:
        """Hold on for another term; False when the lease was lost.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
            DeadlineExceeded: it did not answer in time.
        """
        return await within(DEADLINE_S, self._set_expiry(epoch, _now + _term), "renewing the lease")

    async def give_back(self, epoch: Epoch) -> None:
        """Let the next one take it at once.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
            DeadlineExceeded: it did not answer in time.
        """
        await within(DEADLINE_S, self._set_expiry(epoch, _now), "giving the lease back")

    async def _take(self, at_least: Epoch) -> Epoch | None:
        looked = select(
            _lease.c.holder,
            _lease.c.expires_at,
            func.extract("epoch", _lease.c.expires_at - _now).label("left_s"),
        )
        first = insert(_lease).values(
            id=1, holder=self.holder, epoch=max(1, at_least), expires_at=_now + _term
        )
        statement = first.on_conflict_do_update(
            index_elements=[_lease.c.id],
            set_={
                "holder": self.holder,
                "epoch": func.greatest(_lease.c.epoch + 1, at_least),
                "expires_at": _now + _term,
            },
            # Its own holder may begin a new term at once: it has just ended the last one. What
            # expires after a whole term was written before the clock was set back. Its holder lives
            # if it is renewing it.
            where=(_lease.c.expires_at <= _now)
            | (_lease.c.holder == self.holder)
            | (_lease.c.expires_at == self._stale),
        ).returning(_lease.c.epoch)
        async with self._database.unit_of_work(idle_s=IDLE_S) as work:
            # Looking first spares the row a lock for each look of each standby; the statement
            # decides which one gets it.
            seen = (await work.connection.execute(looked)).one_or_none()
            self.left_s = float(seen.left_s) if seen is not None else 0.0
            if (
                seen is not None
                and seen.holder != self.holder
                and self.left_s > 0
                and not self._is_stale(seen.expires_at)
            ):
                return None
            epoch = (await work.connection.execute(statement)).scalar_one_or_none()
        return Epoch(epoch) if epoch is not None else None

    def _is_stale(self, expires_at: datetime) -> bool:
        """Whether a lease that expires impossibly late has stood so, by this process's clock, for a
        whole term.
        """
        now_s = self._clock.monotonic_s()
        if self.left_s <= LEASE_S:
            self._stale = None
            return False
        if expires_at != self._stale:
            self._stale, self._stale_since_s = expires_at, now_s
        self.left_s = self._stale_since_s + LEASE_S - now_s
        return self.left_s <= 0

    async def _set_expiry(self, epoch: Epoch, expires_at: object) -> bool:
        mine = (
            (_lease.c.id == 1)
            & (_lease.c.holder == self.holder)
            & (_lease.c.epoch == epoch)
            & (_lease.c.expires_at > _now)
        )
        async with self._database.unit_of_work(idle_s=IDLE_S) as work:
            changed = await work.connection.execute(
                update(_lease).where(mine).values(expires_at=expires_at)
            )
        return changed.rowcount == 1


class Fence:
    """Units of work of one term. Outside the term there are none."""

    def __init__(self, database: Database, holder: str, epoch: Epoch) -> None:
        self._database = database
        self._holder = holder
        self.epoch = epoch

    async def write_at_once(
        self, statement: Executable, parameters: Mapping[str, Any], events: Sequence[Event] = ()
    ) -> list[tuple[Any, ...]]:
        """Execute a statement over ``TERM``, which is a transaction of its own, in one round trip;
        its rows.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
        """
        ours = {"term_holder": self._holder, "term_epoch": self.epoch}
        return await self._database.write_at_once(statement, {**parameters, **ours}, events)

    @asynccontextmanager
    async def unit_of_work(self) -> AsyncGenerator[UnitOfWork]:
        """One transaction that commits only while the lease is ours.

        Raises:
            NotLeader: it is not any more; nothing was written.
            DatabaseUnavailable: the database cannot be reached.
        """
        mine = (
            (_lease.c.holder == self._holder)
            & (_lease.c.epoch == self.epoch)
            & (_lease.c.expires_at > _now)
        )
        # As ``idle_s``, in the statement that locks the row: each one is a round trip.
        idle = func.set_config(
            "idle_in_transaction_session_timeout", str(round(IDLE_S * 1000)), True
        )
        async with self._database.unit_of_work() as work:
            held = await work.connection.execute(
                select(_lease.c.epoch, idle).where(mine).with_for_update(read=True)
            )
            if held.one_or_none() is None:
                raise NotLeader(f"epoch {self.epoch} is over")
            yield work
