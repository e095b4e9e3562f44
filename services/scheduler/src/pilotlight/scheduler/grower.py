"""Consolidation: asks for the room of a group's longer stage, and says when it may be written
down.

Which group is to become what is control's (``policy.control.growing``).
"""

import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import CapacityError, TransientError
from pilotlight.common.ids import new_decision_id
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.control.plan import GrowOrder
from pilotlight.policy.control.reconcile import Change
from pilotlight.policy.ids import Generation, GrantId, InstanceId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.effects import Effects
from pilotlight.scheduler.records import Decision
from pilotlight.scheduler.room import RoomClient

log = structlog.get_logger()

BACKOFF = Backoff(first_s=0.25, limit_s=5.0)
"""Between two tries: what fills the pool or the device may leave. The group serves meanwhile."""


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
    spawn: Callable[[Coroutine[Any, Any, None], str], object]
    """Owns a task of the term."""
    wake: Callable[[], None]
    _asking: set[InstanceId] = field(default_factory=set[InstanceId])
    _granted: list[Growth] = field(default_factory=list[Growth])
    _rng: random.Random = field(default_factory=random.Random)

    def begin(self, orders: Iterable[GrowOrder]) -> None:
        """Ask for the room of groups for which that is not under way."""
        for order in orders:
            record = self.book.get(order.instance_id)
            if record is None or not record.is_row or order.instance_id in self._asking:
                continue
            if record.instance.state is InstanceState.READY:
                self._asking.add(order.instance_id)
                self.spawn(self._ask(order, record.instance), f"grow {order.instance_id}")

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
        """Until there is room, or the group is another one.

        Raises:
            NotLeader: the term is over.
        """
        record = self.book.get(order.instance_id)
        assert record is not None, "a group that is a row stays in the books until it has ended"
        before = {one.worker_id: one for one in seen.placements}
        longer = next(one for one in order.placements if one != before.get(one.worker_id))
        attempt = 0
        while self._is_as_seen(seen):
            # The grant is of the generation that the change will make.
            later = replace(seen, generation=Generation(seen.generation + 1))
            try:
                answer = await self.room.reserve(later, record.model, longer)
            except (TransientError, CapacityError) as error:
                if attempt == 0:
                    log.info(
                        "a group waits for room to become one worker",
                        action="growth_waits",
                        instance_id=seen.instance_id,
                        code=error.code,
                        error=error.message,
                    )
                await pause(BACKOFF.delay_s(attempt, self._rng))
                attempt += 1
                continue
            self._granted.append(_growth(order, seen, longer, answer.grant_id))
            self.wake()
            return
        self._asking.discard(seen.instance_id)

    def _is_as_seen(self, seen: Instance) -> bool:
        record = self.book.get(seen.instance_id)
        if record is None:
            return False
        now = record.instance
        return now.state is InstanceState.READY and now.generation == seen.generation


def _growth(order: GrowOrder, seen: Instance, longer: Placement, grant_id: GrantId) -> Growth:
    placements = tuple(
        replace(one, grant_id=grant_id) if one is longer else one for one in order.placements
    )
    change = Change(
        instance_id=seen.instance_id,
        events=(InstanceEvent.CONSOLIDATION_STARTED,),
        reason=order.reason,
        placements=placements,
    )
    decision = Decision(
        decision_id=new_decision_id(),
        kind="consolidation",
        model=seen.model,
        instance_id=seen.instance_id,
        epoch=seen.epoch,
        inputs={"instance": to_row_json(seen)},
        outcome={"placements": to_row_json(placements)},
        reasons=(order.reason,),
    )
    return Growth(seen=seen, change=change, decision=decision, grants=(grant_id,))
