"""Asking the cache for room, and giving it back."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec
import structlog

from pilotlight.common.bus import Bus
from pilotlight.common.errors import (
    DeadlineExceeded,
    NoRoom,
    NotLeader,
    PilotlightError,
    StaleCommand,
    error_of,
)
from pilotlight.common.messages.room import (
    RELEASE_SUBJECT,
    RESERVE_SUBJECT,
    GrantSettled,
    Release,
    Released,
    Reserve,
    Reserved,
)
from pilotlight.common.waiting import Backoff, Begun, Flag, pause, within
from pilotlight.policy.ids import Epoch, GrantId, InstanceId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, Placement
from pilotlight.scheduler.effects import Effects

log = structlog.get_logger()

RESERVE_DEADLINE_S = 2.0
RESERVE_TRIES = 3
SETTLED_S = 0.5
"""So long the word is awaited that a promised grant is written; then the cache is asked, which
answers when it is, within the deadline of any such question."""
RELEASE_DEADLINE_S = 1.0
RELEASE_TRIES = 3
GRANT_LEASE_S = 30.0
"""A grant lapses when no report shows its stage within this time: longer than any command takes to
be obeyed."""


_Stage = tuple[InstanceId, WorkerId]


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Room:
    """What the cache has granted, or promised: then nothing is to be loaded before
    ``RoomClient.until_written`` returns.
    """

    ask: Reserve
    granted: Reserved | None = None
    """None: it has not been answered."""
    settled: dict[GrantId, GrantSettled] = field(default_factory=dict[GrantId, GrantSettled])
    """What has been heard of grants of this stage, perhaps before they were promised: an answer
    that was lost promised another one."""
    heard: Flag = field(default_factory=Flag)

    @property
    def answer(self) -> Reserved:
        """The grant, of room that was answered."""
        assert self.granted is not None
        return self.granted

    async def word(self) -> GrantSettled:
        """What became of the promise, once that is said."""
        while self.answer.grant_id not in self.settled:
            self.heard.clear()
            await self.heard.wait()
        return self.settled[self.answer.grant_id]


class RoomClient:
    """The scheduler's side of the room edge."""

    def __init__(
        self,
        bus: Bus,
        epoch: Epoch,
        effects: Effects,
        owed: Callable[[WorkerId], tuple[InstanceId, ...]],
    ) -> None:
        """Asks nothing yet.

        Args:
            bus: to the cache.
            epoch: of the leader that asks.
            effects: whether it still leads.
            owed: instances on a worker that may not be evicted yet.
        """
        self._bus = bus
        self._owed = owed
        self._epoch = epoch
        self._effects = effects
        self._rng = random.Random()
        self._promised = WeakValueDictionary[_Stage, Room]()
        """Of starts that are under way."""

    async def promise(
        self,
        instance: Instance,
        model: Model,
        placement: Placement,
        protected: tuple[InstanceId, ...] = (),
        *,
        free_room: bool = False,
    ) -> Room:
        """As ``reserve``, answered as soon as the cache knows that there is room."""
        ask = self._ask_of(instance, model, placement, protected, free_room=free_room, promise=True)
        room = Room(ask=ask)
        # Before it is asked: what is said of the grant may come before the answer.
        self._promised[ask.instance_id, ask.worker_id] = room
        room.granted = await self._ask(ask)
        return room

    def hear(self, settled: GrantSettled) -> None:
        """Take what the cache says of a promise."""
        room = self._promised.get((settled.instance_id, settled.worker_id))
        if room is not None:
            room.settled.setdefault(settled.grant_id, settled)
            room.heard.set()

    async def until_written(self, room: Room) -> None:
        """Return when there is a row of a grant, so that stages may be loaded by it.

        Raises:
            NoRoom: the cache does not know of what was promised: it is another process by now.
            NotLeader: as ``reserve``.
            PilotlightError: the grant could not be written, or nobody can say whether it was.
        """
        if room.answer.written:
            return
        try:
            settled = await within(SETTLED_S, room.word(), "the word of a promised grant")
        except DeadlineExceeded:
            self._effects.check()
            # It may be lost. Of a grant that is known this is another question about it.
            again = await self._ask(msgspec.structs.replace(room.ask, promise=False))
            if again.grant_id != room.answer.grant_id:
                self._effects.release(again.grant_id)
                raise NoRoom("the cache has not written what it promised") from None
            return
        if settled.code:
            raise error_of(settled.code, settled.message)

    async def reserve(
        self,
        instance: Instance,
        model: Model,
        placement: Placement,
        protected: tuple[InstanceId, ...] = (),
        *,
        free_room: bool = False,
    ) -> Reserved:
        """Ask for room for one stage.

        Args:
            instance: Which it is of.
            model: Its model.
            placement: Where.
            protected: Instances on the worker's device that stay, beside those that are owed
                service.
            free_room: Nothing goes for it, on the device or in the host pool.

        Raises:
            NoRoom: the cache can free none, on the device or in the host pool.
            BusUnavailable: no cache answers.
            DeadlineExceeded: it did not answer in time; what it may have granted lapses by itself.
            NotLeader: the lease has run out, or the cache knows of a newer leader.
        """
        request = self._ask_of(instance, model, placement, protected, free_room=free_room)
        return await self._ask(request)

    def _ask_of(
        self,
        instance: Instance,
        model: Model,
        placement: Placement,
        protected: tuple[InstanceId, ...],
        *,
        free_room: bool,
        promise: bool = False,
    ) -> Reserve:
        self._effects.check()
        return Reserve(
            instance_id=instance.instance_id,
            model=model.name,
            digest=model.digest,
            worker_id=placement.worker_id,
            node_id=placement.node_id,
            device_bytes=placement.device_bytes,
            host_part_bytes=tuple(
                model.spec.part_bytes[part] for part in placement.parts_of(model.spec)
            ),
            host_parts=placement.parts_of(model.spec),
            lease_s=GRANT_LEASE_S,
            epoch=self._epoch,
            generation=instance.generation,
            protected=tuple(dict.fromkeys((*self._owed(placement.worker_id), *protected))),
            free_room=free_room,
            promise=promise,
        )

    async def _ask(self, request: Reserve) -> Reserved:
        for attempt in range(1, RESERVE_TRIES + 1):
            asking = self._bus.request(
                RESERVE_SUBJECT, request, Reserved, deadline_s=RESERVE_DEADLINE_S
            )
            try:
                begun = Begun(asking)
                self._bus.write_now()
                return begun.result() if begun.ended else await begun
            except StaleCommand as error:
                raise NotLeader(f"another leads: {error.message}") from error
            except DeadlineExceeded:
                # It may have been granted all the same: asked again, the cache gives the same
                # grant.
                if attempt == RESERVE_TRIES:
                    raise
            self._effects.check()
        raise AssertionError("the last try returns or raises")

    async def release(self, grant_id: GrantId) -> None:
        """Give a grant back; after some failures it is left to lapse."""
        backoff = Backoff(first_s=0.1, limit_s=1.0)
        for attempt in range(RELEASE_TRIES):
            try:
                await self._bus.request(
                    RELEASE_SUBJECT,
                    Release(grant_id=grant_id),
                    Released,
                    deadline_s=RELEASE_DEADLINE_S,
                )
                return
            except PilotlightError as error:
                log.info(
                    "grant not released yet",
                    action="release_failed",
                    grant_id=grant_id,
                    code=error.code,
                )
            await pause(backoff.delay_s(attempt, self._rng))
