"""Carries a change of an instance out: row first, then memory, then the bucket; grants go back at
the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import Conflict, NotLeader
from pilotlight.common.ids import new_decision_id
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.reconcile import Change, drain_of, moved, retargeted
from pilotlight.policy.control.splitting import instances_of
from pilotlight.policy.ids import Epoch, InstanceId, ModelName
from pilotlight.policy.instance import ENDED, InstanceEvent
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.scaling import Drain
from pilotlight.policy.targets import Retarget
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.effects import Effects
from pilotlight.scheduler.publisher import InstancePublisher
from pilotlight.scheduler.records import Decision
from pilotlight.scheduler.repository import SchedulerRepository
from pilotlight.scheduler.rows import Move

log = structlog.get_logger()

NO_DECISIONS: Mapping[InstanceId, Decision] = {}


@dataclass(frozen=True, slots=True)
class _Step:
    """One change that is being written."""

    change: Change
    record: Record
    after: Instance
    decision: Decision | None
    become: tuple[Instance, ...]

    @property
    def before(self) -> Instance:
        """As the row says."""
        return self.record.instance


@dataclass(slots=True, kw_only=True)
class Applier:
    """Applies changes: those of one turn together."""

    epoch: Epoch
    clock: Clock
    book: Book
    repository: SchedulerRepository
    publisher: InstancePublisher
    cold_starts: ColdStarts
    effects: Effects

    async def apply(
        self, changes: Iterable[Change], decisions: Mapping[InstanceId, Decision] = NO_DECISIONS
    ) -> tuple[Instance, ...]:
        """Write changes of different instances, all at once.

        Args:
            changes: What is to be done.
            decisions: That say so, by instance; most changes follow from reports alone.

        Returns:
            The instances after that, without those that have ended meanwhile, or are no rows yet.

        Raises:
            NotLeader: the term is over, or a row is not what this leader believes: the next term
                reads it anew.
            DatabaseUnavailable: the database cannot be reached.
            IllegalTransition: a change is not one that the table allows: a bug.
        """
        now_s = self.clock.monotonic_s()
        known = ((change, self.book.get(change.instance_id)) for change in changes)
        steps = [
            self._step(change, record, decisions.get(change.instance_id), now_s)
            for change, record in known
            if record is not None and record.is_row
        ]
        if not steps:
            return ()
        await self._write(steps)
        # Read again: reports may have said more of them while the rows were written.
        self.book.put(
            *(
                replace(self.book.get(one.before.instance_id) or one.record, instance=one.after)
                for one in steps
            ),
            *(Record(instance=new, model=one.record.model) for one in steps for new in one.become),
        )
        for one in steps:
            self._follow(one)
        return tuple(one.after for one in steps)

    async def fail(self, record: Record, reason: str) -> None:
        """Have an instance fail that is a row, and that no turn knows of as one yet: nobody has
        been told of it.

        Args:
            record: As its row says.
            reason: For the row.

        Raises:
            NotLeader, DatabaseUnavailable: as for ``apply``.
        """
        instance_id = record.instance.instance_id
        change = Change(instance_id=instance_id, events=(InstanceEvent.FAIL,), reason=reason)
        step = self._step(change, record, None, self.clock.monotonic_s())
        await self._write([step])
        self.book.joined(replace(record, instance=step.after))
        self._follow(step)

    async def carry_out(
        self, changes: Sequence[Change], drains: Sequence[Drain]
    ) -> tuple[tuple[Instance, ...], tuple[Drain, ...]]:
        """Write what reports show, and have instances take no new requests, with the decisions that
        say why: in one transaction, but for what is changed and then drained.

        Returns:
            What changed, as ``apply`` says; those that were drained.

        Raises:
            NotLeader, DatabaseUnavailable: as for ``apply``.
        """
        asked = {one.model for one in drains if one.unless_pinned}
        pinned = await self.repository.pinned_of(asked) if asked else frozenset[ModelName]()
        changing = {one.instance_id for one in changes}
        drained: list[Drain] = []
        going, decisions = self._going(drains, pinned)
        first = [one for one in going if one.instance_id not in changing]
        after = await self.apply((*changes, *map(drain_of, first)), decisions)
        drained += first
        if len(first) < len(going):
            then = [one for one in drains if one.instance_id in changing]
            going, decisions = self._going(then, pinned)
            await self.apply(map(drain_of, going), decisions)
            drained += going
        return tuple(one for one in after if one.instance_id in changing), tuple(drained)

    async def _write(self, steps: Sequence[_Step]) -> None:
        try:
            await self.repository.move(
                [Move(before=one.before, after=one.after) for one in steps],
                [one.decision for one in steps if one.decision is not None],
                [new for one in steps for new in one.become],
            )
        except Conflict as error:
            raise NotLeader(f"rows differ from what this leader knows: {error.message}") from error

    def _going(
        self, drains: Iterable[Drain], pinned: AbstractSet[ModelName]
    ) -> tuple[list[Drain], dict[InstanceId, Decision]]:
        """Those of some drains that are carried out, and the decisions that say so."""
        going: list[Drain] = []
        decisions: dict[InstanceId, Decision] = {}
        for drain in drains:
            record = self.book.get(drain.instance_id)
            if record is None or not record.is_row:
                continue
            if drain.unless_pinned and drain.model in pinned:
                continue
            going.append(drain)
            decisions[drain.instance_id] = self._drained(drain, record)
        return going, decisions

    def _drained(self, drain: Drain, record: Record) -> Decision:
        return Decision(
            decision_id=new_decision_id(),
            kind="drain",
            model=drain.model,
            instance_id=drain.instance_id,
            epoch=self.epoch,
            inputs={"instance": record.instance, "now_s": self.clock.monotonic_s()},
            outcome={
                "drained": drain.instance_id,
                "within_s": drain.within_s,
                "makes_way_for": drain.makes_way_for,
            },
            reasons=(drain.reason,),
        )

    async def retarget(self, retargets: Iterable[Retarget]) -> None:
        """Have groups become another number of instances, with the decisions that say why.

        Raises:
            NotLeader, DatabaseUnavailable: as for ``apply``.
        """
        changes: list[Change] = []
        decisions: dict[InstanceId, Decision] = {}
        for retarget in retargets:
            record = self.book.get(retarget.instance_id)
            if record is None or not record.is_row:
                continue
            changes.append(retargeted(retarget))
            decisions[retarget.instance_id] = Decision(
                decision_id=new_decision_id(),
                kind="targets",
                model=retarget.model,
                instance_id=retarget.instance_id,
                epoch=self.epoch,
                inputs={"instance": to_row_json(record.instance)},
                outcome={"targets": retarget.targets},
                reasons=(retarget.reason,),
            )
        await self.apply(changes, decisions)

    def _step(
        self, change: Change, record: Record, decision: Decision | None, now_s: float
    ) -> "_Step":
        before = record.instance
        after = moved(before, change, self.epoch, now_s)
        become = instances_of(before, change.become, self.epoch, now_s)
        if InstanceEvent.STAGE_LOST in change.events:
            decision = _repair(record, after)
        if become:
            decision = _split(record, after, become)
            become = tuple(replace(one, decision_id=decision.decision_id) for one in become)
        return _Step(change, record, after, decision, tuple(become))

    def _follow(self, done: "_Step") -> None:
        """What others are told of an instance that has changed."""
        change, before, after = done.change, done.before, done.after
        for one in done.become:
            self.publisher.publish(one)
        log.info(
            "instance changed",
            action=f"instance_{after.state.value}",
            instance_id=after.instance_id,
            model=after.model,
            was=before.state.value,
            reason=after.reason,
        )
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
