"""What keys and projects with a budget have used this month.

The rows of usage are the only count. They are added up when a key is met, and again every few
seconds; what this gateway's requests use in between is counted here. What others' use in between is
known after that time: of a month it is nothing.
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from sqlalchemy import ColumnElement, case, func, select

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, DeadlineExceeded
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause, within

log = structlog.get_logger()

READ_S = 5.0
LEARN_DEADLINE_S = 1.0
"""How long the first request of a key waits for a database that does not answer."""
SETTLED = timedelta(minutes=15)
"""After which no row of a moment is written any more: rows before it are added up once."""
FORGET_S = 600.0
_OVER_A_MONTH = timedelta(days=32)


@dataclass(slots=True)
class _Entry:
    asked_s: float
    learned: bool = False
    settled: int = 0
    settled_until: datetime | None = None
    stored: int = 0
    """By rows, as of the last look."""
    ended: int = 0
    """By this gateway's requests that have ended; ``known`` of them before the last look."""
    known: int = 0
    running: int = 0
    """What requests that run may use."""


class BudgetBook:
    """A component."""

    def __init__(self, database: Database, clock: Clock, background: Background) -> None:
        self._database = database
        self._clock = clock
        self._background = background
        self._entries: dict[str, _Entry] = {}
        self._month = _month_of(clock.wall())
        self._next_month = _month_of(self._month + _OVER_A_MONTH)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look from now on."""
        if self._task is None:
            self._task = self._background.spawn("budgets", self._read_for_ever())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None

    def knows(self, subject: str) -> bool:
        """As ``Budgets.knows``."""
        entry = self._entries.get(subject)
        return entry is not None and entry.learned

    async def learn(self, subject: str) -> None:
        """As ``Budgets.learn``: while the database is away, what is used from now on counts."""
        entry = self._entry(subject)
        try:
            await within(LEARN_DEADLINE_S, self._read(subject, entry), "adding up a budget")
        except (DatabaseUnavailable, DeadlineExceeded) as error:
            log.warning(
                "a budget cannot be looked up",
                action="budget_unknown",
                subject=subject,
                error=error.message,
            )
        entry.learned = True

    def begin(self, subject: str, tokens: int) -> None:
        """As ``Budgets.begin``."""
        entry = self._entries.get(subject) or self._entry(subject)
        entry.running += tokens

    def end(self, subject: str, estimated: int, used: int) -> None:
        """As ``Budgets.end``."""
        entry = self._entry(subject)
        entry.running = max(0, entry.running - estimated)
        entry.ended += used

    def used(self, subject: str) -> int:
        """As ``Budgets.used``."""
        now = self._clock.wall()
        if not self._month <= now < self._next_month:
            self._month = _month_of(now)
            self._next_month = _month_of(self._month + _OVER_A_MONTH)
            for entry in self._entries.values():
                entry.settled = entry.stored = 0
                entry.known = entry.ended
                entry.settled_until = None
        entry = self._entry(subject)
        return entry.stored + entry.ended - entry.known + entry.running

    def _entry(self, subject: str) -> _Entry:
        now_s = self._clock.monotonic_s()
        entry = self._entries.get(subject)
        if entry is None:
            entry = self._entries[subject] = _Entry(now_s)
        entry.asked_s = now_s
        return entry

    async def _read_for_ever(self) -> None:
        while True:
            await pause(READ_S)
            await self.read()

    async def read(self) -> None:
        """Look at all that are asked for."""
        now_s = self._clock.monotonic_s()
        for subject, entry in list(self._entries.items()):
            if not entry.running and now_s - entry.asked_s > FORGET_S:
                del self._entries[subject]
                continue
            try:
                await self._read(subject, entry)
            except DatabaseUnavailable as error:
                log.warning(
                    "budgets cannot be looked up",
                    action="budgets_unknown",
                    entries=len(self._entries),
                    error=error.message,
                )
                return

    async def _read(self, subject: str, entry: _Entry) -> None:
        usage, keys, month = tables.usage, tables.api_keys, self._month
        ended, before = entry.ended, entry.settled
        begin, settles = entry.settled_until or month, self._clock.wall() - SETTLED
        tokens = usage.c.prompt_tokens + usage.c.output_tokens
        found = select(
            func.coalesce(func.sum(case((usage.c.at < settles, tokens), else_=0)), 0),
            func.coalesce(func.sum(tokens), 0),
        ).where(usage.c.at >= begin)
        kind, _, name = subject.partition("/")
        whose: ColumnElement[bool] = usage.c.key_id == name
        if kind == "project":
            whose = usage.c.key_id.in_(select(keys.c.key_id).where(keys.c.project == name))
        async with self._database.reading() as connection:
            settled, all_of_it = (await connection.execute(found.where(whose))).one()
        if month != self._month:
            return
        entry.stored, entry.known = before + int(all_of_it), ended
        if settles > begin:
            entry.settled, entry.settled_until = before + int(settled), settles


def _month_of(moment: datetime) -> datetime:
    """The first moment of its month."""
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
