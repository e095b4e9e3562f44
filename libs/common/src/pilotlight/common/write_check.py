"""Whether NATS stores what is written to it.

A server whose disk is full, or was full when it started, answers and delivers as ever; it only
stores nothing, and says so only to clients that write. What is written says which reports its
writer understands (``common/report_style.py``), and is of no other use.
"""

import asyncio
import random
from typing import Protocol

import structlog

from pilotlight.common.buckets import HEALTH, Bucket
from pilotlight.common.errors import BusFull, BusUnavailable
from pilotlight.common.messages.reports import Understands
from pilotlight.common.waiting import pause

log = structlog.get_logger()

LOOK_S = 2.0
"""Between two looks while all is well."""
LOOK_ON_NODE_S = 60.0
"""The same for loaders and workers, of which there are thousands and which only log it."""
ON_NODES = ("loader", "worker")
LOOK_AGAIN_S = 0.5
"""While it is not."""
CONFIRMED_WITHIN_S = 1.5
PATIENCE = 2
"""This many writes in a row without an answer say that nothing is stored: one may be slow, or cut
off. A refusal says it at once."""


class Writable(Protocol):
    """What is looked at."""

    @property
    def connected(self) -> bool: ...

    async def bucket(self, name: str) -> Bucket: ...


class WriteCheck:
    """Writes a key of its own every few seconds."""

    def __init__(self, bus: Writable, user: str) -> None:
        self._bus = bus
        self._user = user
        self._look_s = LOOK_ON_NODE_S if user in ON_NODES else LOOK_S
        self._rng = random.Random()
        self._denied = False
        self.reason: str | None = None
        """Why nothing is stored; None while it is, or while that is not known."""

    def hear(self, error: Exception) -> None:
        """An error of the connection: the server says only there that a user may not write."""
        told = str(error).lower()
        if (
            not self._denied
            and "permissions violation" in told
            and (f"$kv.{HEALTH}." in told or f"kv_{HEALTH}" in told)
        ):
            self._denied, self.reason = True, None
            log.warning(
                "writes are not checked: the server's users are those of an earlier release",
                action="write_check_denied",
                error=str(error),
                what_to_do="Make its configuration and streams anew: `python -m pilotlight.common.natsconf config`, then `streams`.",
            )

    async def run(self) -> None:
        """Look until the server's users turn out to have no right to this."""
        failures = 0
        while not self._denied:
            try:
                await self._write()
            except BusUnavailable as error:
                failures += 1
                # A server that cannot be reached is not asked; that is told otherwise.
                self._judge(
                    error
                    if self._bus.connected and (failures >= PATIENCE or isinstance(error, BusFull))
                    else None
                )
            else:
                failures = 0
                self._judge(None)
            await pause((LOOK_AGAIN_S if failures else self._look_s) * self._rng.uniform(0.5, 1.0))

    async def _write(self) -> None:
        bucket = await self._bus.bucket(HEALTH)
        try:
            async with asyncio.timeout(CONFIRMED_WITHIN_S):
                await bucket.put(self._user, Understands(node_reports=True))
        except TimeoutError as error:
            raise BusUnavailable(
                f"no write is confirmed within {CONFIRMED_WITHIN_S:g} s"
            ) from error

    def _judge(self, error: BusUnavailable | None) -> None:
        was, self.reason = self.reason, None
        if error is not None and not self._denied:
            self.reason = f"NATS stores nothing (was its disk full?): {error.message}"
        if self.reason is not None and was is None:
            log.error(
                "NATS stores nothing",
                action="bus_unwritable",
                error=self.reason,
                what_to_do=BusFull.action,
            )
        elif was is not None and self.reason is None:
            log.info("NATS stores again", action="bus_writable")
