"""The micro-batch that the leading stage runs next: planned, then run as far as its parts are in
place, until it can be sent.
"""

from torch import Tensor

from pilotlight.engine.core.batch import Plan
from pilotlight.engine.core.lifecycle import RequestState
from pilotlight.engine.core.request import Request
from pilotlight.engine.pipeline.arriving import ArrivingLayers
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.under_way import token_ids_of


class NextMicroBatch:
    """At most one. Nothing of it is booked before it has run through the stage, so dropping it is
    always right.
    """

    def __init__(self, resident: ResidentStage) -> None:
        self._resident = resident
        self._arriving = ArrivingLayers(resident)
        self._planned: tuple[Plan, tuple[int, ...]] | None = None
        """What waits for parts, and its requests' runs."""
        self._nothing_for: tuple[int, int] | None = None
        """Requests waiting and running, of which none could run."""

    @property
    def can_go(self) -> bool:
        """``take`` would run something."""
        scheduler = self._resident.scheduler
        if not scheduler.has_work:
            return False
        if self._going is not None:
            return self._arriving.can_go
        counts = scheduler.waiting, scheduler.running
        return counts != self._nothing_for and self._resident.reach > self._resident.stage.start

    def answered(self) -> None:
        """Requests have their tokens: what could not run may now."""
        self._nothing_for = None

    def take(self, now_s: float, depth: int) -> tuple[Plan, Tensor] | None:
        """What is to be sent, with its hidden states; None if no request can run now, or parts are
        missing.

        The requests are divided evenly among the micro-batches, so that no stage waits while
        another has two.

        Args:
            now_s: on the engine's clock.
            depth: micro-batches that may be under way.
        """
        plan = self._going or self._begun(now_s, depth)
        if plan is None or (hidden := self._arriving.go(self._resident.stage)) is None:
            return None
        self._planned = None
        return plan, hidden

    @property
    def _going(self) -> Plan | None:
        """What waits for parts, while all of its requests own the blocks that it has."""
        if self._planned is None:
            return None
        plan, takes = self._planned
        return plan if all(map(runs, plan.requests, takes)) else None

    def _begun(self, now_s: float, depth: int) -> Plan | None:
        scheduler, stage = self._resident.scheduler, self._resident.stage
        self._planned = None
        self._arriving.drop()
        if self._resident.reach == stage.start:
            return None
        plan = scheduler.schedule(
            now_s, at_most=-(-(scheduler.running + scheduler.waiting) // depth)
        )
        self._nothing_for = None
        if not plan.requests:
            self._nothing_for = scheduler.waiting, scheduler.running
            return None
        self._planned = plan, tuple(request.takes for request in plan.requests)
        self._arriving.begin(plan.batch, token_ids_of(plan), stage)
        return plan


def runs(request: Request, takes: int) -> bool:
    """The request still owns the blocks that it had in that run."""
    return request.state is RequestState.RUNNING and request.takes == takes
