"""Room at its holders: the eviction policy plans, workers and loaders confirm."""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pilotlight.cache.books import Books
from pilotlight.cache.host_room import HostNeed, is_in_a_row, parts_of
from pilotlight.cache.keeper import Keeper
from pilotlight.cache.registrations import Registrations
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    HostPoolFull,
    NoRoom,
    NoWorker,
)
from pilotlight.common.messages.room import (
    Drop,
    Dropped,
    GivenUp,
    GiveUp,
    Reserve,
    Wanted,
    drop_subject,
    give_up_subject,
)
from pilotlight.policy.cluster import NodeFacts, Tier
from pilotlight.policy.eviction.base import (
    EvictionPlan,
    EvictionRules,
    RoomRequest,
    Victim,
    plan_eviction,
)
from pilotlight.policy.ids import Digest, GrantId, InstanceId

HOLDER_DEADLINE_S = 1.0
MAX_ROUNDS = 4
"""A holder may refuse a victim that has just become busy: plan again, without it, this often."""
MAX_HOST_ROUNDS = 12
"""In a host pool each round also frees a little more, where what is free does not lie in a row."""


@dataclass(slots=True)
class Evicted:
    """What has gone for one grant."""

    instances: list[Victim] = field(default_factory=list[Victim])
    copies: list[Victim] = field(default_factory=list[Victim])


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostRoom:
    """What a stage takes of a host pool, and what is free there."""

    node: NodeFacts
    host_bytes: int
    need_bytes: int
    """Of them, what is not there yet."""
    free_bytes: int


class Holders:
    """Has workers and loaders give up what the policy chooses."""

    def __init__(
        self,
        books: Books,
        registrations: Registrations,
        bus: Bus,
        clock: Clock,
        rules: EvictionRules,
        keeper: Keeper,
        end_grants: Callable[[Iterable[GrantId]], Awaitable[None]],
    ) -> None:
        """Asks nobody yet.

        Args:
            books: what lies where.
            registrations: pins, read before anything goes.
            bus: to workers and loaders.
            clock: for ages.
            rules: what may stay whatever the policy says.
            keeper: fetches ahead what a start may need the room of.
            end_grants: forgets grants of what was given up.
        """
        self._books = books
        self._registrations = registrations
        self._bus = bus
        self._clock = clock
        self._rules = rules
        self._keeper = keeper
        self._end = end_grants

    async def make_device_room(self, request: Reserve, evicted: Evicted, held_bytes: int) -> None:
        """Room beside what the stage has already: ``held_bytes`` of an earlier generation."""
        for _ in range(MAX_ROUNDS):
            plan = await self._with_pins(partial(self._on_device, request, held_bytes))
            if not plan.enough:
                raise NoRoom(
                    f"no room for {request.model} on {request.worker_id}: {plan.reason}",
                    retry_after_s=1.0,
                )
            if not plan.victims:
                return
            message = GiveUp(
                instance_ids=tuple(InstanceId(victim.subject) for victim in plan.victims)
            )
            try:
                reply = await self._bus.request(
                    give_up_subject(request.worker_id),
                    message,
                    GivenUp,
                    deadline_s=HOLDER_DEADLINE_S,
                )
            except (BusUnavailable, DeadlineExceeded) as error:
                raise NoWorker(
                    f"worker {request.worker_id} does not answer: {error.message}"
                ) from error
            over = self._books.give_up(request.worker_id, reply.instance_ids)
            if over:
                await self._end(over)
            evicted.instances += [
                victim for victim in plan.victims if victim.subject in reply.instance_ids
            ]
        raise NoRoom(
            f"no room for {request.model} on {request.worker_id}: its models are in use",
            retry_after_s=1.0,
        )

    async def _with_pins(self, plan: Callable[[], EvictionPlan]) -> EvictionPlan:
        """As planned with all pins that an administrator has been answered.

        Rows are read where something is to go, or a pin is in the way: not for room that is there.
        """
        found = plan()
        if found.victims or found.unpin:
            await self._registrations.follow()
            found = plan()
        return found

    def _on_device(self, request: Reserve, held_bytes: int) -> EvictionPlan:
        now_s = self._clock.monotonic_s()
        worker = self._books.worker(request.worker_id)
        if worker is None:
            raise NoWorker(f"worker {request.worker_id} does not report")
        if request.device_bytes > worker.device.memory_bytes:
            raise NoWorker(
                f"{request.device_bytes} bytes are needed; the device has {worker.device.memory_bytes}"
            )
        wanted = RoomRequest(
            need_bytes=max(0, request.device_bytes - held_bytes),
            free_bytes=self._books.device_free_bytes(worker),
            now_s=now_s,
            protected=frozenset({request.instance_id, *request.protected}),
        )
        return plan_eviction(
            self._books.policies.of(Tier.DEVICE),
            wanted,
            ()
            if request.free_room or not wanted.missing_bytes
            else self._books.on_device(worker, now_s),
            self._rules,
        )

    async def make_host_room(self, request: Reserve, evicted: Evicted) -> int:
        """Bytes that the stage's parts take of the pool, room for which is there now: enough in
        all, and in a row for each part.

        1. free what is missing
        2. where the loader finds that the parts do not fit in between the copies that are left,
           free as much again as the largest part takes, until they do
        """
        fits, apart_bytes = False, 0
        for _ in range(MAX_HOST_ROUNDS):
            plan = await self._with_pins(partial(self._in_pool, request, apart_bytes))
            room = self._host_room(request)
            if not plan.enough:
                if not request.free_room:
                    with suppress(BusUnavailable):
                        await self._keeper.yield_room(request.node_id)
                where = "in the host pool, in a row" if apart_bytes else "in the host pool"
                raise HostPoolFull(
                    f"no room for {request.model} {where}: {plan.reason}", retry_after_s=1.0
                )
            if not plan.victims and (
                room.need_bytes == 0
                or fits
                or is_in_a_row(room.node, room.need_bytes, room.free_bytes)
            ):
                return room.host_bytes
            reply = await self._drop(request, plan.victims)
            evicted.copies += [victim for victim in plan.victims if victim.subject in reply.digests]
            fits = reply.fits
            apart_bytes = (
                0 if fits else room.node.pool_room_bytes((max(request.host_part_bytes, default=1),))
            )
        raise HostPoolFull(
            f"no room for {request.model} in the host pool: its copies are in use",
            retry_after_s=1.0,
        )

    def _host_room(self, request: Reserve) -> "_HostRoom":
        node = self._books.node(request.node_id)
        if node is None:
            raise NoWorker(f"the loader of node {request.node_id} does not report")
        host_bytes = node.pool_room_bytes(request.host_part_bytes)
        if host_bytes > node.pool_bytes:
            raise HostPoolFull(
                f"{host_bytes} bytes are needed; the host pool has {node.pool_bytes}"
            )
        return _HostRoom(
            node=node,
            host_bytes=host_bytes,
            need_bytes=self._books.missing_host_bytes(
                node, request.digest, HostNeed(host_bytes, parts_of(request))
            ),
            free_bytes=self._books.host_free_bytes(node),
        )

    def _in_pool(self, request: Reserve, apart_bytes: int) -> EvictionPlan:
        """What makes room (1), or ``apart_bytes`` more than is free (2)."""
        now_s, room = self._clock.monotonic_s(), self._host_room(request)
        wanted = RoomRequest(
            need_bytes=max(room.need_bytes, room.free_bytes + apart_bytes)
            if apart_bytes
            else room.need_bytes,
            free_bytes=room.free_bytes,
            now_s=now_s,
            protected=frozenset({request.digest}),
        )
        return plan_eviction(
            self._books.policies.of(Tier.HOST),
            wanted,
            ()
            if request.free_room or not wanted.missing_bytes
            else self._books.in_pool(room.node, now_s),
            self._rules,
        )

    async def _drop(self, request: Reserve, victims: tuple[Victim, ...]) -> Dropped:
        message = Drop(
            digests=tuple(Digest(victim.subject) for victim in victims),
            wanted=Wanted(
                digest=request.digest, parts=request.host_parts, part_bytes=request.host_part_bytes
            )
            if request.host_parts
            else None,
        )
        try:
            reply = await self._bus.request(
                drop_subject(request.node_id), message, Dropped, deadline_s=HOLDER_DEADLINE_S
            )
        except (BusUnavailable, DeadlineExceeded) as error:
            raise NoWorker(
                f"the loader of node {request.node_id} does not answer: {error.message}"
            ) from error
        self._books.drop(request.node_id, reply.digests)
        return reply
