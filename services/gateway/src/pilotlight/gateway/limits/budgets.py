"""What keys and projects with a budget have used this month.

The rows of usage are the only count. A subject's month is added up when it is met. From then on one
statement every few seconds adds up what was written since, for all subjects together; what this
gateway's requests use in between is counted here. What others' use in between is known after that
time: of a month it is nothing.

Rows are numbered in order and seen out of order: a lower number may be committed after a higher.
So a number that a look has seen is *settled* some looks later, when whoever drew a lower one has
committed or was ended by the database. Rows behind the settled one are added up with each look.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ARRAY, ColumnElement, Select, Text, any_, case, func, literal, select

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, DeadlineExceeded
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause, within

log = structlog.get_logger()

READ_S = 5.0
SETTLING_LOOKS = 6
"""After which a number is settled: two statements' time and a usage transaction's idle time are
less than so many ``READ_S``."""
LEARN_DEADLINE_S = 1.0
"""How long the first request of a key waits for a database that does not answer."""
UNSETTLED_IDS = 100_000
"""How far behind the last row a book begins: more than all gateways draw while a number settles."""
MOST_BEHIND_IDS = 2_000_000
"""A look that would add up more than this begins the book anew."""
FORGET_S = 600.0
_OVER_A_MONTH = timedelta(days=32)
_usage, _keys = tables.usage, tables.api_keys
_tokens = _usage.c.prompt_tokens + _usage.c.output_tokens


@dataclass(slots=True)
class _Entry:
    asked_s: float
    learned: bool = False
    """It was looked up, or that was tried: no request waits for it any more."""
    whole: bool = False
    """Its month was added up."""
    settled: int = 0
    """By rows up to the settled one."""
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
        self._settled_id: int | None = None
        """None: nothing is added up."""
        self._last_ids: deque[int] = deque(maxlen=SETTLING_LOOKS)
        """That looks have seen, the oldest first."""
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
            await within(LEARN_DEADLINE_S, self._add_up(subject, entry), "adding up a budget")
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
                entry.whole = False
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
        if not self._entries:
            self._begin_anew()
            return
        subject = ""
        try:
            await self._follow()
            for subject, entry in list(self._entries.items()):
                if not entry.whole:
                    await self._add_up(subject, entry)
        except DatabaseUnavailable as error:
            if subject in self._entries:
                # Others first, the next time: its month may be more than can be added up.
                self._entries[subject] = self._entries.pop(subject)
            log.warning(
                "budgets cannot be looked up",
                action="budgets_unknown",
                entries=len(self._entries),
                error=error.message,
            )

    async def _follow(self) -> None:
        """Add up the rows behind the settled one, for all entries that are whole."""
        month, settled_id = self._month, self._settled_id
        if settled_id is None:
            return
        is_full = len(self._last_ids) == SETTLING_LOOKS
        next_id = self._last_ids[0] if is_full else settled_id
        ended = {subject: entry.ended for subject, entry in self._entries.items() if entry.whole}
        stored, settled = defaultdict[str, int](int), defaultdict[str, int](int)
        async with self._database.reading() as connection:
            last_id = (await connection.execute(_LAST_ID)).scalar_one()
            if not settled_id <= last_id <= settled_id + MOST_BEHIND_IDS:
                # The database went back to an earlier state, or was not read for long.
                self._begin_anew()
                return
            behind = _behind(settled_id, next_id, month, ended)
            for row in await connection.execute(behind):
                for subject in (f"key/{row.key_id}", f"project/{row.project}"):
                    stored[subject] += int(row.stored)
                    settled[subject] += int(row.settled)
        if month != self._month:
            return
        for subject, entry in self._entries.items():
            if entry.whole and subject in ended:
                entry.stored, entry.known = entry.settled + stored[subject], ended[subject]
                entry.settled += settled[subject]
            elif next_id != settled_id:
                # Added up meanwhile, to the row that was the settled one.
                entry.whole = False
        self._settled_id = next_id
        self._last_ids.append(last_id)

    def _begin_anew(self) -> None:
        self._settled_id = None
        self._last_ids.clear()
        for entry in self._entries.values():
            entry.whole = False

    async def _add_up(self, subject: str, entry: _Entry) -> None:
        """Add up a subject's month. It is whole unless another row is the settled one by then."""
        month, ended = self._month, entry.ended
        async with self._database.reading() as connection:
            if self._settled_id is None:
                last_id = (await connection.execute(_LAST_ID)).scalar_one()
                begin = max(0, last_id - UNSETTLED_IDS)
                self._settled_id = begin if self._settled_id is None else self._settled_id
            settled_id = self._settled_id
            found = await connection.execute(_of_month(subject, settled_id, month))
            settled, stored = found.one()
        if month == self._month:
            entry.settled, entry.stored, entry.known = int(settled), int(stored), ended
            entry.whole = settled_id == self._settled_id


_LAST_ID = select(func.coalesce(func.max(_usage.c.id), 0))


def _behind(
    settled_id: int, next_id: int, month: datetime, subjects: Iterable[str]
) -> Select[*tuple[Any, ...]]:
    """By key, the tokens of rows behind the settled one, and of those up to the next one: for keys
    that are subjects, or whose project is one.
    """
    names = defaultdict[str, list[str]](list)
    for subject in subjects:
        kind, _, name = subject.partition("/")
        names[kind].append(name)
    settled = case((_usage.c.id <= next_id, _tokens), else_=0)
    sums = (
        select(
            _usage.c.key_id,
            func.sum(_tokens).label("stored"),
            func.sum(settled).label("settled"),
        )
        .where(_usage.c.id > settled_id, _usage.c.at >= month)
        .group_by(_usage.c.key_id)
        .subquery()
    )
    return (
        select(sums, _keys.c.project)
        .outerjoin_from(sums, _keys, _keys.c.key_id == sums.c.key_id)
        .where(
            (sums.c.key_id == any_(literal(names["key"], ARRAY(Text))))
            | (_keys.c.project == any_(literal(names["project"], ARRAY(Text))))
        )
    )


def _of_month(subject: str, settled_id: int, month: datetime) -> Select[*tuple[Any, ...]]:
    """A subject's tokens by rows up to the settled one, and by all."""
    kind, _, name = subject.partition("/")
    whose: ColumnElement[bool] = _usage.c.key_id == name
    if kind == "project":
        whose = _usage.c.key_id.in_(select(_keys.c.key_id).where(_keys.c.project == name))
    settled = case((_usage.c.id <= settled_id, _tokens), else_=0)
    return select(func.coalesce(func.sum(settled), 0), func.coalesce(func.sum(_tokens), 0)).where(
        whose, _usage.c.at >= month
    )


def _month_of(moment: datetime) -> datetime:
    """The first moment of its month."""
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
