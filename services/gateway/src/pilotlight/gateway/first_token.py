"""The end of a cold start, as a gateway sees it: told to the scheduler once for each instance."""

from collections import OrderedDict
from dataclasses import dataclass

from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.messages.phases import FirstToken
from pilotlight.common.phases import PhaseReporter
from pilotlight.gateway.hold import Place
from pilotlight.gateway.relay import Attempt
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.types import InstanceId, Moment, PhaseName, RequestId

MAX_CLAIMED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """When a request came, and was accepted by a worker."""

    request_id: RequestId
    arrived_s: float
    accepted_s: float


class FirstTokens:
    """Reports the gateway's phases of cold starts, and their first tokens."""

    def __init__(self, phases: PhaseReporter, clock: Clock) -> None:
        self._phases = phases
        self._clock = clock
        self._claimed: OrderedDict[InstanceId, None] = OrderedDict()

    def came(self, submitted: Submitted, place: Place, attempt: Attempt) -> None:
        """A request has its first token. That ends a cold start if it waited until this instance was ready, or loading."""
        seen = place.assigned
        if seen is None or not place.waited or attempt.first_heard_s is None:
            return
        ready_s = seen.serving_since_s
        if ready_s is not None and ready_s < submitted.arrived_s:
            return
        instance_id, request_id = seen.instance.instance_id, submitted.request_id
        if not self._claim(instance_id):
            return
        now_s, phases = self._clock.monotonic_s(), self._phases
        offset_s = wall_offset_s(self._clock)
        demanded_s = place.demanded_s if place.demanded_s is not None else submitted.arrived_s
        shown_s = max(submitted.arrived_s, seen.shown_s) if seen.serving else place.assigned_s
        sampled_s = departed_s(attempt.first_sampled, Moment(at_s=attempt.first_heard_s, wall_offset_s=offset_s))
        phases.record(
            instance_id,
            phases.phase(PhaseName.QUEUE, submitted.arrived_s, demanded_s, request_id),
            phases.phase(PhaseName.SUBMIT, shown_s, submitted.accepted_s, request_id),
            phases.phase(PhaseName.DELIVER, sampled_s, now_s, request_id),
        )
        first = FirstToken(request_id=request_id, at_s=now_s, wall_offset_s=offset_s, arrived_s=submitted.arrived_s)
        phases.first_token(instance_id, first)

    def _claim(self, instance_id: InstanceId) -> bool:
        """True once for each instance: its cold start ends with one first token."""
        if instance_id in self._claimed:
            return False
        self._claimed[instance_id] = None
        while len(self._claimed) > MAX_CLAIMED:
            self._claimed.popitem(last=False)
        return True
