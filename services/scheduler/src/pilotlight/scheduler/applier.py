"""Carries a change of an instance out: row first, then memory, then the bucket; grants go back at the end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import Conflict, NotLeader
from pilotlight.policy.instance import ENDED, SERVING, InstanceEvent, step
from pilotlight.policy.types import Epoch, Generation, GrantId, Instance, InstanceId, InstanceState, ModelName
from pilotlight.scheduler.board import InstanceBoard
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.reconcile import Change
from pilotlight.scheduler.records import Decision
from pilotlight.scheduler.repository import SchedulerRepository

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class Applier:
    """Applies changes, one after the other."""

    epoch: Epoch
    clock: Clock
    book: Book
    repository: SchedulerRepository
    board: InstanceBoard
    cold_starts: ColdStarts
    release: Callable[[GrantId], None]
    is_awaited: Callable[[ModelName], bool]
    """Whether some gateway holds requests for a model."""

    async def apply(self, change: Change, decision: Decision | None = None) -> Instance | None:
        """The instance after the change; None when it has ended meanwhile, or is not a row yet.

        Raises:
            NotLeader: the term is over, or the row is not what this leader believes: the next term reads it anew.
            DatabaseUnavailable: the database cannot be reached.
            IllegalTransition: the change is not one that the table allows: a bug.
        """
        entry = self.book.get(change.instance_id)
        if entry is None or entry.tentative or entry.instance.state in ENDED:
            return None
        before = entry.instance
        after = moved(before, change, self.epoch, self.clock.monotonic_s())
        try:
            await self.repository.move(before, after, decision)
        except Conflict as error:
            raise NotLeader(f"rows differ from what this leader knows: {error.message}") from error
        entry.instance = after
        log.info(
            "instance changed",
            action=f"instance_{after.state.value}",
            instance_id=after.instance_id,
            model=after.model,
            was=before.state.value,
            reason=after.reason,
        )
        self._follow(after, change)
        return after

    def _follow(self, after: Instance, change: Change) -> None:
        if after.state is InstanceState.READY:
            awaited = self.is_awaited(after.model)
            self.board.show(
                after,
                lambda: self.cold_starts.activated(after.instance_id, change.heard_s, change.loaded, awaited=awaited),
            )
        else:
            self.board.show(after)
        if after.state in ENDED:
            for placement in after.placements:
                if placement.grant_id is not None:
                    self.release(placement.grant_id)


def moved(before: Instance, change: Change, epoch: Epoch, now_s: float) -> Instance:
    """The instance after its events.

    A drain is a new generation: workers that already obey the old one must hear of it. Time spent in a state counts from the last
    event.
    """
    state = before.state
    for event in change.events:
        state = step(state, event)
    drains = InstanceEvent.DRAIN in change.events and state not in ENDED
    return replace(
        before,
        state=state,
        generation=Generation(before.generation + 1) if drains else before.generation,
        epoch=epoch,
        state_since_s=now_s,
        last_used_s=now_s if state in SERVING else before.last_used_s,
        in_flight=0 if state in ENDED else before.in_flight,
        reason=change.reason,
        served=before.served or state in SERVING,
    )


def drain_of(instance_id: InstanceId, reason: str) -> Change:
    """The change that takes an instance out of service."""
    return Change(instance_id=instance_id, events=(InstanceEvent.DRAIN,), reason=reason)
