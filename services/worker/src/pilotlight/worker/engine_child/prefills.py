"""What the first prefill of each stage took, in intervals of work: a prefill that waits for parts
is not prefilling.
"""

from dataclasses import dataclass, field, replace

from pilotlight.common.messages.engine import Prefilled
from pilotlight.common.phases import PhaseRecorder
from pilotlight.engine.results import FirstPrefill
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import PhaseName


@dataclass(slots=True, kw_only=True)
class _Stage:
    sent_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """When each of its requests was sent here; of those that came while parts were on their way,
    when the last one was in place."""
    loaded: bool = False
    delayed_s: float | None = None
    """Since when it was held up by an injected fault."""


class Prefills:
    """The stages that are yet to give their first token.

    ::

        parts     ──0──1──2──────────3──4────5│loaded
        request       │sent                   │
        prefill          [1)        [2)[3)    [4, head, sampled)
                         while it loads       from ``loaded``, or from ``sent`` if it came later
    """

    def __init__(self, phases: PhaseRecorder) -> None:
        self._phases = phases
        self._stages: dict[InstanceId, _Stage] = {}

    def begin(self, instance_id: InstanceId) -> None:
        """A load has begun."""
        self._stages[instance_id] = _Stage()

    def drop(self, instance_id: InstanceId) -> None:
        """The stage is held no longer."""
        self._stages.pop(instance_id, None)

    def loaded(self, instance_id: InstanceId, at_s: float) -> None:
        """Every part is in place since then: nothing is waited for any more."""
        if (stage := self._stages.get(instance_id)) is not None:
            stage.loaded, stage.delayed_s = True, None
            stage.sent_s = dict.fromkeys(stage.sent_s, at_s)

    def sent(self, instance_id: InstanceId, request_id: RequestId, sent_s: float) -> bool:
        """A request has come; whether it is the first one of a stage without a token."""
        stage = self._stages.get(instance_id)
        if stage is None:
            return False
        stage.sent_s[request_id] = sent_s
        return len(stage.sent_s) == 1

    def delayed(self, instance_id: InstanceId, start_s: float) -> None:
        """An injected fault held the stage up from then until now."""
        self.ran(instance_id, start_s)
        if (stage := self._stages.get(instance_id)) is not None:
            stage.delayed_s = start_s

    def ran(self, instance_id: InstanceId, start_s: float) -> None:
        """A batch of the stage ran from then until now."""
        stage = self._stages.get(instance_id)
        if stage is not None and not stage.loaded:
            self._phases.record(
                instance_id, PhaseName.PREFILL, self._phases.start_s(instance_id, start_s)
            )

    def ended(self, first: FirstPrefill) -> Prefilled:
        """The stage has its first token."""
        stage = self._stages.pop(first.instance_id, _Stage())
        start_s = stage.sent_s.get(first.request_id, first.start_s)
        if stage.delayed_s is not None:
            start_s = min(start_s, stage.delayed_s)
        self._phases.record(first.instance_id, PhaseName.PREFILL, start_s, first.end_s)
        *earlier, last = self._phases.take(first.instance_id).phases
        return Prefilled(
            instance_id=first.instance_id,
            request_id=first.request_id,
            phase=replace(last, tokens=first.tokens),
            earlier=tuple(earlier),
        )
