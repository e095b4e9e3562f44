"""One transaction for what is asked to be written at the same time.

A transaction costs a round trip and a millisecond of the leader's processor whatever it writes, and
hundreds of starts a second have several writes each. So writes that come while another is under way
are committed together, by the one of them whose turn it is; in a rush, also those that come a
moment later.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from pilotlight.common.db.rush import LINGER_S, Rush
from pilotlight.common.errors import DatabaseUnavailable, NotLeader
from pilotlight.common.waiting import pause
from pilotlight.policy.ids import InstanceId
from pilotlight.scheduler.lease import Fence
from pilotlight.scheduler.rows import Rows, together, write

MOST_TOGETHER = 256
"""Writes of one transaction, which holds the lease's row: its renewal must not wait for long."""


RUSH_S = 0.1
"""Of transactions that follow each other: see ``Rush``."""


@dataclass(slots=True, eq=False)
class _Waiting:
    rows: Rows
    woken: asyncio.Future[None]
    """Its rows are written, or were refused; or it is its turn to write."""
    has_turn: bool = False
    is_over: bool = False
    error: Exception | None = None

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


@dataclass(slots=True)
class Writer:
    """Writes rows of one term. What one caller writes is all there, or nothing is. Those whose rows
    were written together go on together.
    """

    fence: Fence
    _line: deque[_Waiting] = field(default_factory=deque["_Waiting"])
    _is_writing: bool = False
    _rush: Rush = field(default_factory=lambda: Rush(RUSH_S))

    async def write(self, rows: Rows) -> None:
        """Return when the rows are there.

        Raises:
            Conflict: an instance is not what its change was made from.
            NotLeader: the term is over.
            DatabaseUnavailable: the database cannot be reached.
        """
        loop = asyncio.get_running_loop()
        ours = _Waiting(rows, loop.create_future())
        self._line.append(ours)
        try:
            if self._is_writing:
                await ours.woken
            else:
                self._is_writing = ours.has_turn = True
            if not ours.is_over and self._rush.is_on(loop.time()):
                await pause(LINGER_S)
            while not ours.is_over:
                await self._commit(self._next())
        finally:
            if not ours.is_over and ours in self._line:
                self._line.remove(ours)
            if ours.has_turn:
                self._pass_on()
        if ours.error is not None:
            raise ours.error

    def _pass_on(self) -> None:
        """The next one's turn."""
        self._is_writing = bool(self._line)
        if self._line:
            self._line[0].has_turn = True
            self._line[0].wake()

    def _next(self) -> list[_Waiting]:
        """The first of the line, as many as may be together: of no row two changes."""
        batch: list[_Waiting] = []
        changed = set[InstanceId]()
        while self._line and len(batch) < MOST_TOGETHER:
            touches = self._line[0].rows.changed
            if not changed.isdisjoint(touches):
                break
            changed |= touches
            batch.append(self._line.popleft())
        return batch

    async def _commit(self, batch: list[_Waiting]) -> None:
        """Write some, and say what came of it. Where one of several cannot be written, each is
        tried alone: the others have nothing to do with that.
        """
        error: Exception | None = DatabaseUnavailable("the writing was given up")
        try:
            await write(self.fence, together([one.rows for one in batch]))
            error = None
        except (NotLeader, DatabaseUnavailable) as met:
            error = met
        except Exception as met:  # noqa: BLE001 - each caller is told
            error = met
            if len(batch) > 1:
                for one in batch:
                    await self._commit([one])
                return
        finally:
            self._rush.ended(asyncio.get_running_loop().time())
            for one in batch:
                if not one.is_over:
                    one.is_over, one.error = True, error
                    one.wake()
