"""Whether the server at the other end of a connection answers.

A connection to a server that is frozen stays open for a long time, and nothing comes through it. A
service that judges others by their silence must know that: a silent server makes every service seem
dead.
"""

import asyncio

import nats.errors
import structlog
from nats.aio.client import Client

from pilotlight.common.waiting import cancel_all, every

log = structlog.get_logger()

ASK_S = 0.25
"""Between an answer and the next question."""
SILENT_S = 1.0
"""A server that has not answered for so long is taken for unreachable."""
LOST_S = 60.0
"""Longer than nats-py takes to notice a dead connection; that ends what waits for an answer."""


class Pulse:
    """Asks for a sign of life, as long as there is a connection."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._answered_s = 0.0
        self._asking: set[asyncio.Task[float]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def beats(self) -> bool:
        """Whether the server has answered a moment ago."""
        return asyncio.get_running_loop().time() - self._answered_s <= SILENT_S

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What asks; None while it does not.

        Should it die, the server is taken for silent for ever: it needs an owner.
        """
        return self._task

    def start(self) -> None:
        """A connection was made."""
        self.answered()
        self._task = asyncio.create_task(self._ask_for_ever(), name="pulse of the bus")

    async def stop(self) -> None:
        """Ask no more."""
        tasks = {*self._asking} if self._task is None else {*self._asking, self._task}
        self._task = None
        await cancel_all(tasks)

    def answered(self) -> None:
        """The server has said something."""
        self._answered_s = asyncio.get_running_loop().time()

    def lost(self) -> None:
        """The connection is gone, and every answer with it."""
        for task in self._asking:
            task.cancel()

    async def round_trip(self, deadline_s: float) -> None:
        """Return when the server has taken everything that was sent before.

        Raises:
            TimeoutError: it has not answered in time.
            nats.errors.Error, OSError: the connection is gone.
        """
        # nats-py stops reading for good when an answer comes that is not waited for any more, so
        # the question outlives our patience.
        asking = asyncio.create_task(
            self._client.rtt(timeout=int(LOST_S)), name="round trip to the bus"
        )
        self._asking.add(asking)
        asking.add_done_callback(self._asked)
        await asyncio.wait({asking}, timeout=deadline_s)
        if not asking.done():
            raise TimeoutError
        if asking.cancelled():
            raise nats.errors.ConnectionReconnectingError
        asking.result()

    def _asked(self, asking: asyncio.Task[float]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled() and asking.exception() is None:
            silent_s = asyncio.get_running_loop().time() - self._answered_s
            if silent_s > SILENT_S:
                # One that stays silent is told of as a connection that was lost.
                log.warning(
                    "NATS answers again, after a silence",
                    action="bus_silent",
                    seconds=round(silent_s, 3),
                )
            self.answered()

    async def _ask_for_ever(self) -> None:
        async for _ in every(ASK_S):
            if self._client.is_connected:
                try:
                    await self.round_trip(LOST_S)
                except (nats.errors.Error, TimeoutError, OSError):
                    continue
