"""One start: room, rows, commands.

What is to be started, and where, is control's (``policy.control``).
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import structlog

from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import (
    CapacityError,
    DatabaseUnavailable,
    NotLeader,
    PilotlightError,
    TransientError,
)
from pilotlight.common.ids import new_decision_id, new_instance_id
from pilotlight.common.telemetry import current_traceparent, span, with_parent
from pilotlight.common.waiting import Begun
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.plan import Refusal, RefusedStart, StartOrder
from pilotlight.policy.ids import Digest, Generation, InstanceId, WorkerId
from pilotlight.policy.instance import InstanceEvent, step
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, InstanceState, Placement, Scheme
from pilotlight.scheduler.applier import Applier
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.chains import Joined, joined
from pilotlight.scheduler.cold_starts import ColdStarts
from pilotlight.scheduler.effects import Effects
from pilotlight.scheduler.explained import inputs_of, outcome_of, rejections
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.pacing import Pressing
from pilotlight.scheduler.publisher import InstancePublisher
from pilotlight.scheduler.records import ColdStart, Decision
from pilotlight.scheduler.repository import PROMISED, SchedulerRepository
from pilotlight.scheduler.room import Room, RoomClient
from pilotlight.scheduler.teller import Teller

log = structlog.get_logger()

_REFUSALS = (TransientError, CapacityError)
"""What the cache answers when there is no room; another worker may have some."""


@dataclass(slots=True, kw_only=True)
class Starter:
    """Carries out starts, and writes down those that nothing came of."""

    book: Book
    repository: SchedulerRepository
    applier: Applier
    room: RoomClient
    teller: Teller
    publisher: InstancePublisher
    cold_starts: ColdStarts
    metrics: SchedulerMetrics
    clock: Clock
    effects: Effects
    joins: WeakValueDictionary[Digest, asyncio.Lock] = field(
        default_factory=WeakValueDictionary["Digest", "asyncio.Lock"]
    )
    """By model."""
    pressing: Pressing = field(default_factory=Pressing)

    def begin(self, order: StartOrder) -> Record:
        """Count a start from now on, before there is a row of it."""
        scheme = _scheme_of(order)
        now_s = self.clock.monotonic_s()
        instance = Instance(
            instance_id=new_instance_id(),
            model=order.model.name,
            digest=order.model.digest,
            state=InstanceState.PLANNED,
            generation=Generation(1),
            epoch=order.seen.epoch,
            placements=scheme.placements,
            decision_id=new_decision_id(),
            state_since_s=now_s,
            last_used_s=now_s,
            reason=order.reason,
            targets=order.choice.instances,
        )
        record = Record(instance=instance, model=order.model, tentative=True)
        self.book.put(record)
        return record

    async def start(self, order: StartOrder, record: Record, place: str) -> InstanceId | Refusal:
        """Reserve, write, command. What was reserved is given back when the rest comes to nothing,
        unless that is not known.

        The cache promises room and writes its grants while the start is written. It is commanded
        when both are there; a start that is written and whose grants are not has failed.

        Args:
            order: What is to be started, and where.
            record: Under which it counts.
            place: Of the decision in the log.

        Raises:
            NotLeader: the term is over.
            DatabaseUnavailable: the start may be written or not; the next term reads it anew.
        """
        with with_parent(order.trace_parent), span("plan cold start", model=order.model.name):
            trace_parent = current_traceparent(keep=True)
            try:
                refusal = await self._start(
                    order, replace(record, trace_parent=trace_parent), place
                )
            except (DatabaseUnavailable, NotLeader):
                raise
            except (TransientError, CapacityError) as error:
                return _refusal(order, _scheme_of(order).placements[0], error)
            return refusal or record.instance.instance_id

    async def refuse(self, refused: RefusedStart, model: Model | None, place: str) -> None:
        """Write down why nothing was started, when that is new; tell gateways of a model that no
        worker can ever hold.

        Args:
            refused: What was decided.
            model: Which was to start, if it is still registered.
            place: Of the decision in the log.

        Raises:
            NotLeader, DatabaseUnavailable: as for ``start``.
        """
        if refused.never_fits and model is not None:
            await self.teller.tell_never_fits(model, refused.message)
        if not refused.record:
            return
        decision = Decision(
            decision_id=new_decision_id(),
            kind="cold_start",
            model=refused.model,
            instance_id=None,
            epoch=refused.seen.epoch,
            inputs=inputs_of(model, refused.seen, place),
            outcome={"refused": refused.code, "message": refused.message},
            reasons=refused.reasons,
        )
        reasons = list(refused.reasons)
        log.warning(
            "no room for a cold start",
            action="cold_start_refused",
            model=refused.model,
            code=refused.code,
            reasons=reasons,
        )
        self.metrics.decided("cold_start", refused.code)
        await self.repository.decide(decision)

    async def _start(self, order: StartOrder, record: Record, place: str) -> Refusal | None:
        instance = record.instance
        granted: list[Placement] = []
        rooms: list[Room] = []
        is_known = may_be_written = False
        try:
            asking = Begun(self._reserve(order, instance))
            # While the cache is at it.
            planned = _planned(instance, order, place)
            answers = asking.result() if asking.ended else await asking
            for placement, answer in answers:
                if isinstance(answer, Room):
                    rooms.append(answer)
                    granted.append(replace(placement, grant_id=answer.answer.grant_id))
            refusals = [
                (placement, answer) for placement, answer in answers if not isinstance(answer, Room)
            ]
            for _, error in refusals:
                if isinstance(error, NotLeader) or not isinstance(error, _REFUSALS):
                    raise error
            for placement, error in refusals:
                assert isinstance(error, _REFUSALS)
                return _refusal(order, placement, error)
            with self.pressing.one():
                async with self._joining(order.model.digest):
                    # Rows of the moment: of two starts of one decision, either may have its room
                    # first.
                    there = self.book.books.of_digest(order.model.digest)
                    places = joined(order.model, granted, order.seen.nodes, there)
                    fetching = step(instance.state, InstanceEvent.FETCH_STARTED)
                    instance = replace(
                        instance,
                        placements=places.placements,
                        state=fetching,
                        state_since_s=self.clock.monotonic_s(),
                    )
                    record = replace(record, instance=instance, tentative=False)
                    cold_start = self._cold_start_of(record, order)
                    decision = _started(planned, rooms, places)
                    try:
                        await self.repository.start(instance, decision, cold_start)
                    except (DatabaseUnavailable, asyncio.CancelledError):
                        # The next term reads it, and commands it with these grants; the cache has
                        # them lapse where there is none.
                        may_be_written = True
                        raise
                    # Whatever happens from here on, too.
                    may_be_written = True
                    refusal = await self._unwritten(order, instance, rooms)
                    if refusal is not None:
                        self.cold_starts.open(cold_start)
                        await self.applier.fail(record, f"{refusal.code}: {refusal.message}")
                        is_known = True
                        return refusal
                    self.book.joined(record)
                is_known = True
                # Not behind the commands: a turn may have changed it by then.
                self.publisher.publish(instance)
                await self._command(record, cold_start)
            self.metrics.decided("cold_start", "started")
        finally:
            if not is_known:
                self.book.remove(instance.instance_id)
                for placement in granted:
                    if placement.grant_id is not None and not may_be_written:
                        self.effects.release(placement.grant_id)
        return None

    def _joining(self, digest: Digest) -> asyncio.Lock:
        """Held while a start joins a model's chains, until the next one sees it there."""
        return self.joins.setdefault(digest, asyncio.Lock())

    async def _reserve(
        self, order: StartOrder, instance: Instance
    ) -> list[tuple[Placement, Room | BaseException]]:
        """Ask for the room of all stages at once: a group waits for its slowest answer alone."""
        placements = _scheme_of(order).placements
        stays = _on_devices(order) if order.ahead else {}
        asked = [
            self.room.promise(
                instance, order.model, one, stays.get(one.worker_id, ()), free_room=order.ahead
            )
            for one in placements
        ]
        if len(asked) == 1:
            # In this task: another one would begin a turn later.
            try:
                return [(placements[0], await asked[0])]
            except PilotlightError as error:
                return [(placements[0], error)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return list(zip(placements, answers, strict=True))

    async def _unwritten(
        self, order: StartOrder, instance: Instance, rooms: list[Room]
    ) -> Refusal | None:
        """Why a start may not be commanded: a grant that was promised is not written; None when all
        of them are.

        Raises:
            NotLeader: the term is over.
        """
        for placement, room in zip(instance.placements, rooms, strict=True):
            try:
                await self.room.until_written(room)
            except NotLeader:
                raise
            except PilotlightError as error:
                return _refusal(order, placement, error)
        return None

    async def _command(self, record: Record, cold_start: ColdStart) -> None:
        self.cold_starts.open(cold_start)
        start_s = self.clock.monotonic_s()
        instance = record.instance
        await self.teller.dispatch(
            instance, self.book, self.effects.nodes(), alone=self.pressing.has_one
        )
        self.cold_starts.dispatched(
            instance.instance_id, cold_start.demand_seen_s, start_s, self.clock.monotonic_s()
        )
        log.info(
            "cold start under way",
            action="instance_planned",
            instance_id=instance.instance_id,
            model=instance.model,
            worker_id=instance.lead,
        )

    def _cold_start_of(self, record: Record, order: StartOrder) -> ColdStart:
        parts = record.trace_parent.split("-")
        return ColdStart(
            instance_id=record.instance.instance_id,
            model=record.instance.model,
            decision_id=record.instance.decision_id,
            trace_id=parts[1] if len(parts) == 4 else "",
            demand_seen_s=order.demand_seen_s,
            wall_offset_s=wall_offset_s(self.clock),
        )


def _scheme_of(order: StartOrder) -> Scheme:
    assert order.choice.scheme is not None, "control orders no start without a scheme"
    return order.choice.scheme


def _on_devices(order: StartOrder) -> dict[WorkerId, tuple[InstanceId, ...]]:
    """Instances by worker: for a start that nobody waits for all of them stay."""
    return {
        one.worker_id: tuple(held.instance_id for held in one.held) for one in order.seen.workers
    }


def _refusal(order: StartOrder, placement: Placement, error: PilotlightError) -> Refusal:
    return Refusal(
        model=order.model.name,
        worker_id=placement.worker_id,
        code=error.code,
        message=error.message,
        transient=isinstance(error, TransientError),
    )


def _planned(instance: Instance, order: StartOrder, place: str) -> Decision:
    """The decision of a start, before there is room for it.

    Args:
        instance: What starts.
        order: As control gave it.
        place: In the decision log.
    """
    choice = order.choice
    return Decision(
        decision_id=instance.decision_id,
        kind="cold_start",
        model=instance.model,
        instance_id=instance.instance_id,
        epoch=instance.epoch,
        inputs=inputs_of(order.model, order.seen, place),
        outcome={"instance_id": instance.instance_id, **outcome_of(choice)},
        reasons=(instance.reason, choice.reason, *rejections(choice.rejected)),
    )


def _started(planned: Decision, rooms: list[Room], places: Joined) -> Decision:
    """The same, with what came of it.

    Args:
        planned: As it was before.
        rooms: Of its stages.
        places: In the chains of its model.
    """
    grants = [one.answer for one in rooms]
    outcome: dict[str, Any] = {
        **planned.outcome,
        "evicted_instances": [
            instance_id for grant in grants for instance_id in grant.evicted_instances
        ],
        "dropped_copies": [digest for grant in grants for digest in grant.dropped_copies],
        PROMISED: [grant.grant_id for grant in grants if not grant.written],
        "chains": to_row_json(places.chains),
    }
    why, chosen, *rejected = planned.reasons
    return replace(planned, outcome=outcome, reasons=(why, chosen, *places.reasons, *rejected))
