"""Device memory of a build: leased from the cache, and given back once.

::

    lease ──wanted──> cache ──offered──> loans shrink ──> taken ──> the engine lets idle memory go
                                                            │ demand, or the cache takes it back
                                                            v
                                      the build's engine is killed ──its process has ended──> given back

Nothing of it is written down: a report says what is wanted and taken, and a worker that starts anew
has none. ``Lending`` counts it beside grants and loans.
"""

import asyncio

import structlog

from pilotlight.common.errors import EngineFailed, NoRoom, PilotlightError
from pilotlight.common.messages.engine import LeaveRoom, RoomLeft
from pilotlight.common.waiting import within
from pilotlight.policy.cluster import BuildLoan
from pilotlight.policy.lending import counted_build
from pilotlight.worker.core import WorkerCore

log = structlog.get_logger()

LEASE_DEADLINE_S = 5.0
"""How long a build waits for its room. What the cache does not offer by then, it offers later: the
build is looked for again."""


class BuildRoom:
    """Owns what a build has of one worker's device."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._wanted_bytes = self._offered_bytes = self._taken_bytes = 0
        self._leaves = False
        self._asking: asyncio.Future[None] | None = None
        self._leaving_room: asyncio.Future[RoomLeft] | None = None
        self.beside_bytes = 0
        """What a build's engine keeps for itself, by the worker's own."""

    @property
    def taken_bytes(self) -> int:
        """What it has, until its engine's process has ended."""
        return self._taken_bytes

    @property
    def fact(self) -> BuildLoan:
        """As it is reported."""
        return BuildLoan(
            wanted_bytes=self._wanted_bytes,
            offered_bytes=self._offered_bytes,
            taken_bytes=self._taken_bytes,
        )

    def counted_bytes(self, free_bytes: int, unlent_bytes: int) -> int:
        """What counts of it beside grants and loans; a build for which grants leave no room makes
        way.

        Args:
            free_bytes: neither granted nor lent.
            unlent_bytes: not granted.
        """
        called_bytes = self._wanted_bytes if self._is_offered else 0
        if not self._leaves and max(called_bytes, self._taken_bytes) > unlent_bytes:
            self._core.make_way()
            called_bytes = 0
        return counted_build(called_bytes, self._taken_bytes, free_bytes, leaves=self._leaves)

    def offer(self, num_bytes: int) -> None:
        """Take what the cache lends; a build that has more makes way."""
        # What comes late for a build that has ended is for none.
        self._offered_bytes = num_bytes if self._wanted_bytes else 0
        if num_bytes < self._taken_bytes:
            self._core.make_way()

    def look(self, free_bytes: int) -> None:
        """Loans are as they should be, or nearer: take the room, if it is there."""
        asking = self._asking
        if asking is None or asking.done() or self._leaves:
            return
        if self._is_offered and free_bytes >= self._wanted_bytes:
            self._taken_bytes = self._wanted_bytes
            asking.set_result(None)

    async def lease(self, num_bytes: int) -> None:
        """Return when a build has room, with what its engine keeps for itself.

        Raises:
            NoRoom: the cache does not offer it, or demand comes first; there is none then.
        """
        self._wanted_bytes = num_bytes + self.beside_bytes
        self._asking = asyncio.get_running_loop().create_future()
        self._told()
        try:
            await within(LEASE_DEADLINE_S, self._asking, "room for a build")
            await within(LEASE_DEADLINE_S, self._left(self._wanted_bytes), "an engine's memory")
        except PilotlightError as error:
            self.give_back()
            raise NoRoom(
                f"no room for a build on {self._core.worker_id}: {error.message}"
            ) from error
        except BaseException:
            self.give_back()
            raise

    def make_way(self) -> None:
        """Demand comes: nothing is waited for, and what is taken is on its way back."""
        self._leaves = self._wanted_bytes > 0
        if self._asking is not None and not self._asking.done():
            self._asking.set_exception(NoRoom("demand goes first"))

    def give_back(self) -> None:
        """The build's engine has ended, or was never begun. Done already, nothing happens."""
        if not self._wanted_bytes:
            return
        had_bytes, self._taken_bytes = self._taken_bytes, 0
        self._wanted_bytes = self._offered_bytes = 0
        self._leaves, self._asking = False, None
        self._told()
        if had_bytes:
            self._core.background.spawn("memory of a build", self._back())

    def on_left(self, event: RoomLeft) -> None:
        """The engine has let go of what was idle; what is said of another amount answers what was
        asked before.
        """
        waiting = self._leaving_room
        asked = event.device_bytes == self._wanted_bytes
        if waiting is not None and asked and not waiting.done():
            waiting.set_result(event)

    @property
    def _is_offered(self) -> bool:
        return 0 < self._wanted_bytes <= self._offered_bytes

    async def _left(self, num_bytes: int) -> None:
        """Have the worker's own engine keep nothing that the build needs.

        Raises:
            EngineFailed: it does not, or has ended.
        """
        self._leaving_room = asyncio.get_running_loop().create_future()
        try:
            await self._core.engine.leave_room(LeaveRoom(device_bytes=num_bytes))
            left = await self._leaving_room
        finally:
            self._leaving_room = None
        if left.refused:
            raise EngineFailed(left.refused)

    async def _back(self) -> None:
        """The engine may keep idle memory as before."""
        try:
            await self._core.engine.leave_room(LeaveRoom(device_bytes=0))
        except EngineFailed:
            log.info("the engine is gone, and keeps nothing", action="build_room_unsaid")

    def _told(self) -> None:
        self._core.changed.set()
        self._core.room_changed.set()
