"""The end of a cold start, as a gateway sees it: told to the scheduler once for each instance."""

from collections import OrderedDict
from dataclasses import dataclass

from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.messages.phases import FirstToken
from pilotlight.common.phases import PhaseRecorder
from pilotlight.gateway.serving.queue import Place
from pilotlight.gateway.serving.relay import Attempt
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import PhaseName

MAX_CLAIMED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """When a request came, and was accepted by a worker."""

    request_id: RequestId
    arrived_s: float
    accepted_s: float


class FirstTokens:
    """Records the gateway's phases of cold starts, and their first tokens: once for each
    instance.
    """

    def __init__(self, phases: PhaseRecorder, clock: Clock) -> None:
        self._phases = phases
        self._clock = clock
        self._claimed: OrderedDict[InstanceId, None] = OrderedDict()

    def came(self, submitted: Submitted, place: Place, attempt: Attempt) -> None:
        """A request has its first token.

        That ends a cold start if it waited until this instance was ready, or loading.
        """
        route = place.assigned
        if route is None or not place.waited or attempt.first_sampled_s is None:
            return
        seen = route.prefill
        ready_s = seen.serving_since_s
        if ready_s is not None and ready_s < submitted.arrived_s:
            return
        instance_id, request_id = seen.instance.instance_id, submitted.request_id
        if not self._claim(instance_id):
            return
        now_s, phases = self._clock.monotonic_s(), self._phases
        demanded_s = place.demanded_s if place.demanded_s is not None else submitted.arrived_s
        shown_s = max(submitted.arrived_s, seen.shown_s) if seen.serving else place.assigned_s
        phases.record(
            instance_id, PhaseName.QUEUE, submitted.arrived_s, demanded_s, detail=request_id
        )
        phases.record(
            instance_id, PhaseName.SUBMIT, shown_s, submitted.accepted_s, detail=request_id
        )
        phases.record(
            instance_id, PhaseName.DELIVER, attempt.first_sampled_s, now_s, detail=request_id
        )
        first = FirstToken(
            request_id=request_id,
            at_s=now_s,
            wall_offset_s=wall_offset_s(self._clock),
            arrived_s=submitted.arrived_s,
        )
        phases.first_token(instance_id, first)

    def _claim(self, instance_id: InstanceId) -> bool:
        """True once for each instance: its cold start ends with one first token."""
        if instance_id in self._claimed:
            return False
        self._claimed[instance_id] = None
        while len(self._claimed) > MAX_CLAIMED:
            self._claimed.popitem(last=False)
        return True
