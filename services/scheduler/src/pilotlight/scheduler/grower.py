"""Consolidation: asks for the room of a group's longer stages, and says when it may be written
down.

Which group is to become what is control's (``policy.control.growing``).
"""

import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import CapacityError, TransientError
from pilotlight.common.ids import new_decision_id
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.growing import growth_of, is_shorter
from pilotlight.policy.control.plan import GrowOrder
from pilotlight.policy.control.reconcile import Change
from pilotlight.policy.ids import Generation, GrantId, InstanceId, WorkerId
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.effects import Effects
from pilotlight.scheduler.records import Decision
from pilotlight.scheduler.room import RoomClient

log = structlog.get_logger()

BACKOFF = Backoff(first_s=0.25, limit_s=5.0)
"""Between two tries: what fills the pool or the device may leave. The group serves meanwhile."""


DENIED_S = 5.0
"""After a refusal that a group need not wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A consolidation that has its room."""

    seen: Instance
    """As it was when that was asked for."""
    change: Change
    decision: Decision
    grants: tuple[GrantId, ...]


@dataclass(slots=True, kw_only=True)
class Grower:
    """One task for each group that waits for room; what has it is written by the leader's loop, the
    only one that moves instances.
    """

    book: Book
    room: RoomClient
    effects: Effects
    clock: Clock
    spawn: Callable[[Coroutine[Any, Any, None], str], object]
    """Owns a task of the term."""
    wake: Callable[[], None]
    _asking: set[InstanceId] = field(default_factory=set[InstanceId])
    _denied: dict[InstanceId, float] = field(default_factory=dict[InstanceId, float])
    """Until when no more workers of a group are asked for, since one had no room."""
    _granted: list[Growth] = field(default_factory=list[Growth])
    _rng: random.Random = field(default_factory=random.Random)

    def begin(self, orders: Iterable[GrowOrder]) -> None:
        """Ask for the room of groups for which that is not under way."""
        now_s = self.clock.monotonic_s()
        self._denied = {one: until_s for one, until_s in self._denied.items() if until_s > now_s}
        for order in orders:
            record = self.book.get(order.instance_id)
            if record is None or not record.is_row or order.instance_id in self._asking:
                continue
            instance, shorter = record.instance, is_shorter(order)
            may_wait = instance.state is InstanceState.READY and not shorter
            if may_wait or instance.instance_id not in self._denied:
                self._asking.add(order.instance_id)
                asking = self._ask_all if shorter else self._ask
                self.spawn(asking(order, instance), f"grow {order.instance_id}")

    def take(self) -> tuple[Growth, ...]:
        """What has its room and may be written down now. Room of groups that have changed meanwhile
        is given back.
        """
        granted, self._granted = self._granted, []
        fresh: list[Growth] = []
        for growth in granted:
            self._asking.discard(growth.seen.instance_id)
            if self._is_as_seen(growth.seen):
                fresh.append(growth)
            else:
                for grant_id in growth.grants:
                    self.effects.release(grant_id)
        return tuple(fresh)

    async def _ask(self, order: GrowOrder, seen: Instance) -> None:
        """Until there is room for the lead, or the group is another one. Of the others, each is
        asked for once: those that are refused stay what they are.

        Raises:
            NotLeader: the term is over.
        """
        record = self.book.get(order.instance_id)
        assert record is not None, "a group that is a row stays in the books until it has ended"
        before = {one.worker_id: one for one in seen.placements}
        asked = [one for one in order.placements if one != before.get(one.worker_id)]
        taker = asked[0] if seen.state is InstanceState.READY else None
        granted: dict[WorkerId, GrantId] = {}
        attempt = 0
        while taker is not None and not granted and self._is_as_seen(seen):
            grant_id = await self._room_for(seen, record, taker, quiet=attempt > 0)
            if grant_id is None:
                await pause(BACKOFF.delay_s(attempt, self._rng))
                attempt += 1
            else:
                granted[taker.worker_id] = grant_id
        for one in asked:
            if one is not taker and self._is_as_seen(seen):
                grant_id = await self._room_for(seen, record, one)
                if grant_id is None:
                    self._denied[seen.instance_id] = self.clock.monotonic_s() + DENIED_S
                else:
                    granted[one.worker_id] = grant_id
        if granted or self._is_as_seen(seen):
            self._granted.append(_growth(order, seen, record, granted))
            self.wake()
        else:
            self._asking.discard(seen.instance_id)

    async def _ask_all(self, order: GrowOrder, seen: Instance) -> None:
        """Once: a shorter pipeline needs the room of all of its workers. What some got where
        another was refused is given back, and a later tick may want others.

        Raises:
            NotLeader: the term is over.
        """
        record = self.book.get(order.instance_id)
        assert record is not None, "a group that is a row stays in the books until it has ended"
        asked = [one for one in order.placements if one not in seen.placements]
        granted: dict[WorkerId, GrantId] = {}
        for one in asked:
            grant_id = await self._room_for(seen, record, one)
            if grant_id is None:
                break
            granted[one.worker_id] = grant_id
        if len(granted) == len(asked):
            self._granted.append(_growth(order, seen, record, granted))
            self.wake()
            return
        for grant_id in granted.values():
            self.effects.release(grant_id)
        self._denied[seen.instance_id] = self.clock.monotonic_s() + DENIED_S
        self._asking.discard(seen.instance_id)

    async def _room_for(
        self, seen: Instance, record: Record, longer: Placement, *, quiet: bool = False
    ) -> GrantId | None:
        """The grant, of the generation that the change will make; None where it was refused."""
        later = replace(seen, generation=Generation(seen.generation + 1))
        try:
            return (await self.room.reserve(later, record.model, longer)).grant_id
        except (TransientError, CapacityError) as error:
            if not quiet:
                log.info(
                    "a group waits for room to grow",
                    action="growth_waits",
                    instance_id=seen.instance_id,
                    worker_id=longer.worker_id,
                    code=error.code,
                    error=error.message,
                )
            return None

    def _is_as_seen(self, seen: Instance) -> bool:
        record = self.book.get(seen.instance_id)
        if record is None:
            return False
        now = record.instance
        return now.state is seen.state and now.generation == seen.generation


def _growth(
    order: GrowOrder, seen: Instance, record: Record, granted: Mapping[WorkerId, GrantId]
) -> Growth:
    """What is written when the room was asked for.

    Args:
        order: What was to be.
        seen: The group.
        record: With its model.
        granted: Grants by worker. A placement without one stays as it was, and no instance is
            promised for it any more.
    """
    change = growth_of(order, seen, record.model, granted)
    placements = tuple(
        replace(one, grant_id=granted.get(one.worker_id, one.grant_id)) for one in change.placements
    )
    change = replace(change, placements=placements)
    before = {one.worker_id: one for one in seen.placements}
    refused = [
        one.worker_id
        for one in order.placements
        if one != before[one.worker_id] and one.worker_id not in granted
    ]
    reasons = (order.reason, *(f"{one} has not got the room" for one in refused))
    decision = Decision(
        decision_id=new_decision_id(),
        kind="consolidation",
        model=seen.model,
        instance_id=seen.instance_id,
        epoch=seen.epoch,
        inputs={"instance": to_row_json(seen)},
        outcome={"placements": to_row_json(placements), "targets": change.targets},
        reasons=reasons,
    )
    return Growth(seen=seen, change=change, decision=decision, grants=tuple(granted.values()))
