"""Carries a change of an instance out: row first, then memory, then the bucket; grants go back at
the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import Conflict, NotLeader
from pilotlight.common.ids import new_decision_id
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.reconcile import Change, moved, retargeted
from pilotlight.policy.control.splitting import instances_of
from pilotlight.policy.ids import Epoch
from pilotlight.policy.instance import ENDED, InstanceEvent
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.targets import Retarget
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
        before, now_s = record.instance, self.clock.monotonic_s()
        after = moved(before, change, self.epoch, now_s)
        become = instances_of(before, change.become, self.epoch, now_s)
        if InstanceEvent.STAGE_LOST in change.events:
            decision = _repair(record, after)
        if become:
            decision = _split(record, after, become)
            become = tuple(replace(one, decision_id=decision.decision_id) for one in become)
        try:
            await self.repository.move(before, after, decision, become)
        except Conflict as error:
            raise NotLeader(f"rows differ from what this leader knows: {error.message}") from error
        # Read again: reports may have said more of it while the row was written.
        self.book.put(
            replace(self.book.get(change.instance_id) or record, instance=after),
            *(Record(instance=one, model=record.model) for one in become),
        )
        for one in become:
            self.publisher.publish(one)
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

    async def retarget(self, retarget: Retarget) -> None:
        """Have a group become another number of instances, with the decision that says why.

        Raises:
            NotLeader, DatabaseUnavailable: as for ``apply``.
        """
        record = self.book.get(retarget.instance_id)
        if record is None or not record.is_row:
            return
        decision = Decision(
            decision_id=new_decision_id(),
            kind="targets",
            model=retarget.model,
            instance_id=retarget.instance_id,
            epoch=self.epoch,
            inputs={"instance": to_row_json(record.instance)},
            outcome={"targets": retarget.targets},
            reasons=(retarget.reason,),
        )
        await self.apply(retargeted(retarget), decision)

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


def _repair(record: Record, after: Instance) -> Decision:
    """The decision by which another worker brings a lost stage.

    Args:
        record: The group, as it was.
        after: As it is.
    """
    before = record.instance
    return Decision(
        decision_id=new_decision_id(),
        kind="repair",
        model=before.model,
        instance_id=before.instance_id,
        epoch=after.epoch,
        inputs={"instance": to_row_json(before), "models": [to_row_json(record.model)]},
        outcome={"placements": to_row_json(after.placements), "repairs": after.repairs},
        reasons=(after.reason,),
    )


def _split(record: Record, after: Instance, become: Sequence[Instance]) -> Decision:
    """The decision by which workers of a group are instances; their model is read from it.

    Args:
        record: The group, as it was.
        after: As it is.
        become: The new instances.
    """
    before = record.instance
    return Decision(
        decision_id=new_decision_id(),
        kind="consolidation",
        model=before.model,
        instance_id=before.instance_id,
        epoch=after.epoch,
        inputs={"instance": to_row_json(before), "models": [to_row_json(record.model)]},
        outcome={
            "become": {one.instance_id: one.lead for one in become},
            "targets": after.targets,
            "placements": to_row_json(after.placements),
        },
        reasons=(after.reason,),
    )
