"""Rows of grants, those of one moment in one statement, and those that end in one before it.

A transaction costs a round trip and a millisecond of the cache's processor whatever it
writes, and hundreds of starts a second each make a grant and give one back. So what comes while
one is under way is committed together, and in a rush what comes a moment later, too.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pilotlight.cache.grants import Grant
from pilotlight.cache.repository import Added, CacheRepository
from pilotlight.common.db.rush import LINGER_S, Rush
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.waiting import pause, woken
from pilotlight.policy.ids import GrantId, InstanceId, WorkerId

MOST_TOGETHER = 256
RUSH_S = 0.2
"""Of transactions that follow each other: see ``Rush``."""
ENDS_LINGER_S = 0.05
"""So long one that only deletes waits, where one ended within ``RUSH_S``: nobody waits for it but
the one who gave back."""


@dataclass(slots=True, eq=False)
class _Change:
    done: asyncio.Future[None]
    added: Added | None = None
    ended: Sequence[GrantId] = ()
    may_wait: bool = False

    def settle(self, error: Exception | None) -> None:
        """Its caller may have given up."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            # One who has given up does not look.
            self.done.exception()


@dataclass(slots=True)
class GrantRows:
    """Writes rows of grants in a task of its own: a caller that gives up breaks nothing off."""

    repository: CacheRepository
    background: Background
    _line: deque[_Change] = field(default_factory=deque["_Change"])
    _pressing: asyncio.Event = field(default_factory=asyncio.Event)
    """Some change may not wait."""
    _is_writing: bool = False
    _rush: Rush = field(default_factory=lambda: Rush(RUSH_S))

    async def add(self, added: Added) -> None:
        """Return when a grant's row is there.

        Raises:
            NotSole: another cache answers by now.
            DatabaseUnavailable: the database cannot be reached.
        """
        await self._write(_Change(asyncio.get_running_loop().create_future(), added=added))

    async def end(self, grant_ids: Iterable[GrantId], *, may_wait: bool = False) -> None:
        """Return when there are no rows of some grants.

        Args:
            grant_ids: Of which none may be under way.
            may_wait: No start waits for that.

        Raises:
            DatabaseUnavailable: the database cannot be reached.
        """
        ended, done = tuple(grant_ids), asyncio.get_running_loop().create_future()
        if ended:
            await self._write(_Change(done, ended=ended, may_wait=may_wait))

    async def _write(self, change: _Change) -> None:
        self._line.append(change)
        if not change.may_wait:
            self._pressing.set()
        if not self._is_writing:
            self._is_writing = True
            self.background.spawn("write grants", self._write_all())
        await change.done

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._line:
                if self._rush.since_last_s(loop.time()) < RUSH_S:
                    await woken(self._pressing, ENDS_LINGER_S)
                if self._rush.is_on(loop.time()):
                    await pause(LINGER_S)
                await self._commit(self._next())
                self._rush.ended(loop.time())
        finally:
            self._is_writing = False

    def _next(self) -> list[_Change]:
        """The first of the line, as many as may be together: of no stage two grants."""
        batch: list[_Change] = []
        stages = set[tuple[InstanceId, WorkerId]]()
        while self._line and len(batch) < MOST_TOGETHER:
            added = self._line[0].added
            if added is not None:
                stage = _stage_of(added.grant)
                if stage in stages:
                    break
                stages.add(stage)
            batch.append(self._line.popleft())
        if all(one.may_wait for one in self._line):
            self._pressing.clear()
        else:
            self._pressing.set()
        return batch

    async def _commit(self, batch: list[_Change]) -> None:
        """Write some, and say what came of it. Where several cannot be written together, each is
        tried alone: the others have nothing to do with that.
        """
        error: Exception | None = DatabaseUnavailable("the writing was given up")
        try:
            await self.repository.write_grants(
                [one.added for one in batch if one.added is not None],
                [grant_id for one in batch for grant_id in one.ended],
            )
            error = None
        except DatabaseUnavailable as met:
            error = met
        except Exception as met:  # noqa: BLE001 - each caller is told
            if len(batch) > 1:
                for one in batch:
                    await self._commit([one])
                return
            error = met
        finally:
            for one in batch:
                one.settle(error)


def _stage_of(grant: Grant) -> tuple[InstanceId, WorkerId]:
    return grant.instance_id, grant.worker_id
