"""Keeps what a gateway remembers of keys true: other gateways' changes reach it by events, ends of
keys also by asking. Keys that are in use are looked up again before a request has to wait for that,
and their last use reaches the database.
"""

import asyncio
from datetime import timedelta
from typing import Any, Protocol

import structlog

from pilotlight.common.bus import Subscription
from pilotlight.common.errors import DatabaseUnavailable, DeadlineExceeded
from pilotlight.common.messages.events import GATEWAY_EVENTS, Event
from pilotlight.common.service import Context
from pilotlight.common.waiting import cancel_all, pause, within
from pilotlight.gateway.tenants.keys import KEY_CHANGED, KeyRepository
from pilotlight.gateway.tenants.projects import PROJECT_CHANGED

log = structlog.get_logger()

NOTE_INTERVAL_S = 30.0
LOOK_S = 0.4
"""A key that has ended is refused within a second, also where the event that tells of it is lost or
NATS is away.
"""
LOOK_DEADLINE_S = 5.0
LOOK_BACK = timedelta(seconds=30)
"""The clocks of the gateway that ended a key and of this one may differ by as much."""


class Remembered(Protocol):
    """What is remembered (``Authenticator``)."""

    def forget(self, *, key_id: str | None = None, project: str | None = None) -> None:
        """Look again before a key, or any key of a project, is used again."""
        ...

    async def renew(self) -> None:
        """Look keys up again that are in use."""
        ...

    def take_used(self) -> frozenset[str]:
        """Ids of keys that were used since this was asked before."""
        ...


class KeyFollower:
    """Follows events of keys; a component."""

    def __init__(self, context: Context[Any], keys: KeyRepository, remembered: Remembered) -> None:
        self._bus = context.bus
        self._background = context.background
        self._keys = keys
        self._remembered = remembered
        self._subscription: Subscription | None = None
        self._clock = context.clock
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._ended: frozenset[str] = frozenset()
        """Keys that had ended at the last look."""

    async def start(self) -> None:
        """Follow from now on."""
        if self._subscription is None:
            self._subscription = await self._bus.subscribe(GATEWAY_EVENTS, Event, self._on_event)
            self._task = self._background.spawn("last use of keys", self._note_for_ever())
            self._looking = self._background.spawn("keys that end", self._look_for_ever())

    async def stop(self) -> None:
        """Follow no more; note what was used."""
        if self._subscription is not None:
            await self._subscription.end()
            self._subscription = None
        if self._task is not None and self._looking is not None:
            await cancel_all((self._task, self._looking))
            self._task = self._looking = None
            await self.note()

    async def note(self) -> None:
        """Write which keys were used. While the database is away that is not known."""
        used = self._remembered.take_used()
        if not used:
            return
        try:
            await self._keys.used(used)
        except DatabaseUnavailable as error:
            log.warning(
                "the last use of keys is not noted",
                action="key_use_dropped",
                keys=len(used),
                error=error.message,
            )

    async def look(self) -> None:
        """Forget keys that have ended since the last look. While the database is away, what was
        known stays.
        """
        try:
            since = self._clock.wall() - LOOK_BACK
            asked = self._keys.revoked_since(since)
            ended = await within(LOOK_DEADLINE_S, asked, "asking which keys have ended")
        except (DatabaseUnavailable, DeadlineExceeded):
            return
        for key_id in ended - self._ended:
            self._remembered.forget(key_id=key_id)
        self._ended = ended

    async def _look_for_ever(self) -> None:
        while True:
            await pause(LOOK_S)
            await self.look()
            await self._remembered.renew()

    async def _on_event(self, event: Event) -> None:
        if event.kind == KEY_CHANGED:
            self._remembered.forget(key_id=event.entity)
        elif event.kind == PROJECT_CHANGED:
            self._remembered.forget(project=event.entity)

    async def _note_for_ever(self) -> None:
        while True:
            await pause(NOTE_INTERVAL_S)
            await self.note()
