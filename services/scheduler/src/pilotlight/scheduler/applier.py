"""Carries a change of an instance out: row first, then memory, then the bucket; grants go back at
the end.
"""

from dataclasses import dataclass, replace

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import Conflict, NotLeader
from pilotlight.policy.control.reconcile import Change, moved
from pilotlight.policy.ids import Epoch
from pilotlight.policy.instance import ENDED
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.effects import Effects
from pilotlight.scheduler.publisher import InstancePublisher
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
    publisher: InstancePublisher
    cold_starts: ColdStarts
    effects: Effects

    async def apply(self, change: Change, decision: Decision | None = None) -> Instance | None:
        """The instance after the change; None when it has ended meanwhile, or is not a row yet.

        Raises:
            NotLeader: the term is over, or the row is not what this leader believes: the next term
                reads it anew.
            DatabaseUnavailable: the database cannot be reached.
            IllegalTransition: the change is not one that the table allows: a bug.
        """
        record = self.book.get(change.instance_id)
        if record is None or not record.is_row:
            return None
        before = record.instance
        after = moved(before, change, self.epoch, self.clock.monotonic_s())
        try:
            await self.repository.move(before, after, decision)
        except Conflict as error:
            raise NotLeader(f"rows differ from what this leader knows: {error.message}") from error
        # Read again: reports may have said more of it while the row was written.
        self.book.put(replace(self.book.get(change.instance_id) or record, instance=after))
        log.info(
            "instance changed",
            action=f"instance_{after.state.value}",
            instance_id=after.instance_id,
            model=after.model,
            was=before.state.value,
            reason=after.reason,
        )
        self._follow(before, after, change)
        return after

    def _follow(self, before: Instance, after: Instance, change: Change) -> None:
        if after.state is InstanceState.READY:
            awaited = self.effects.is_awaited(after.model)
            self.publisher.publish(
                after,
                lambda: self.cold_starts.activated(
                    after.instance_id, change.heard_s, change.loaded, awaited=awaited
                ),
            )
        else:
            self.publisher.publish(after)
        # Grants of stages that a group gave away end with them.
        staying = () if after.state in ENDED else {one.worker_id for one in after.placements}
        for placement in before.placements:
            if placement.grant_id is not None and placement.worker_id not in staying:
                self.effects.release(placement.grant_id)
