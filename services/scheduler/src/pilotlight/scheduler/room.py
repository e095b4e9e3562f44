"""Asking the cache for room, and giving it back."""

import random
from collections.abc import Callable

import structlog

from pilotlight.common.bus import Bus
from pilotlight.common.errors import DeadlineExceeded, NotLeader, PilotlightError, StaleCommand
from pilotlight.common.messages.room import (
    RELEASE_SUBJECT,
    RESERVE_SUBJECT,
    Release,
    Released,
    Reserve,
    Reserved,
)
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.ids import Epoch, GrantId, InstanceId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, Placement
from pilotlight.scheduler.effects import Effects

log = structlog.get_logger()

RESERVE_DEADLINE_S = 2.0
RESERVE_TRIES = 3
RELEASE_DEADLINE_S = 1.0
RELEASE_TRIES = 3
GRANT_LEASE_S = 30.0
"""A grant lapses when no report shows its stage within this time: longer than any command takes to
be obeyed."""


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
        self._effects.check()
        request = Reserve(
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
        )
        for attempt in range(1, RESERVE_TRIES + 1):
            try:
                return await self._bus.request(
                    RESERVE_SUBJECT, request, Reserved, deadline_s=RESERVE_DEADLINE_S
                )
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
