"""The phases of cold starts: each process records what it does itself.

``PhaseRecorder`` is the one place where phases are made: a new phase is a name in ``PhaseName`` and
a call of ``record``. Recorded phases stay there until they are taken: by ``phase_reports``, which
sends them to the leader, by the leader itself, or by the engine child, whose worker has them sent.
Recording reads a clock and no more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.messages.phases import FirstToken
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.phase import Phase, PhaseName

log = structlog.get_logger()

MAX_PENDING = 1024
"""Instances whose phases wait to be taken; past it the oldest are dropped."""
MAX_PHASES = 1024
"""Phases of one instance that wait; past it the oldest are dropped."""
MERGE_GAP_S = 0.001
"""Intervals that are closer than this touch: the gap is the process's own loop."""


@dataclass(slots=True, kw_only=True)
class Recorded:
    """What was recorded of one instance's cold start."""

    since_s: float
    """When the first of it was recorded."""
    phases: list[Phase] = field(default_factory=list[Phase])
    first_token: FirstToken | None = None


class PhaseRecorder:
    """The phases that one process measures, by instance, until they are taken."""

    def __init__(self, clock: Clock, process: str, detail: str = "") -> None:
        """``process`` and ``detail`` are those of its phases; ``record`` may override the
        detail.
        """
        self._clock = clock
        self._process = process
        self._detail = detail
        self._pending: dict[InstanceId, Recorded] = {}
        self.on_recorded: Callable[[], None] | None = None
        """Called when there is something to take."""

    @property
    def pending(self) -> tuple[InstanceId, ...]:
        """The instances of which something can be taken, the oldest first."""
        return tuple(self._pending)

    def record(
        self,
        instance_id: InstanceId,
        name: PhaseName,
        start_s: float,
        end_s: float | None = None,
        *,
        detail: str | None = None,
    ) -> None:
        """Record a phase. It prolongs the one before it where both are the same and they touch.

        Args:
            instance_id: whose cold start it belongs to.
            name: of the phase.
            start_s: when it began, on the host's monotonic clock.
            end_s: when it ended, on the same clock; None: now. If it is before ``start_s``, the
                phase takes no time.
            detail: what is told beside its name; None: the recorder's own.
        """
        phase = Phase(
            name=name,
            start_s=start_s,
            end_s=max(start_s, self._clock.monotonic_s() if end_s is None else end_s),
            wall_offset_s=wall_offset_s(self._clock),
            process=self._process,
            detail=self._detail if detail is None else detail,
        )
        phases = self._of(instance_id).phases
        if phases and _touch(phases[-1], phase):
            last = phases.pop()
            phase = replace(last, end_s=max(last.end_s, phase.end_s))
        self._add(instance_id, phase)

    def add(self, instance_id: InstanceId, *phases: Phase) -> None:
        """Add phases that another process has recorded."""
        self._add(instance_id, *phases)

    def first_token(self, instance_id: InstanceId, first_token: FirstToken) -> None:
        """Record the end of a cold start."""
        self._of(instance_id).first_token = first_token
        self._tell()

    def start_s(self, instance_id: InstanceId, begun_s: float) -> float:
        """When an interval that began at ``begun_s`` starts, in a process that does one thing at a
        time.

        Not before the end of the last one, and with that end if they touch.
        """
        pending = self._pending.get(instance_id)
        if pending is None or not pending.phases:
            return begun_s
        last_s = pending.phases[-1].end_s
        return last_s if begun_s - last_s < MERGE_GAP_S else begun_s

    def take(self, instance_id: InstanceId) -> Recorded:
        """Everything that was recorded of an instance since it was last taken."""
        return self._pending.pop(instance_id, None) or Recorded(since_s=self._clock.monotonic_s())

    def put_back(self, instance_id: InstanceId, taken: Recorded) -> None:
        """Keep what was taken, and could not be handed on."""
        newer = self._pending.get(instance_id)
        if newer is not None:
            phases = [*taken.phases, *newer.phases][-MAX_PHASES:]
            taken = Recorded(
                since_s=taken.since_s,
                phases=phases,
                first_token=newer.first_token or taken.first_token,
            )
        self._pending[instance_id] = taken

    def drop(self, instance_id: InstanceId) -> None:
        """Forget what was recorded of an instance."""
        self._pending.pop(instance_id, None)

    def _add(self, instance_id: InstanceId, *phases: Phase) -> None:
        pending = self._of(instance_id)
        pending.phases.extend(phases)
        del pending.phases[:-MAX_PHASES]
        self._tell()

    def _of(self, instance_id: InstanceId) -> Recorded:
        pending = self._pending.get(instance_id)
        if pending is None:
            if len(self._pending) >= MAX_PENDING:
                dropped = next(iter(self._pending))
                self.drop(dropped)
                log.warning(
                    "phases dropped: too many wait", action="phases_dropped", instance_id=dropped
                )
            pending = self._pending[instance_id] = Recorded(since_s=self._clock.monotonic_s())
        return pending

    def _tell(self) -> None:
        if self.on_recorded is not None:
            self.on_recorded()


def _touch(last: Phase, phase: Phase) -> bool:
    same = (last.name, last.process, last.detail) == (phase.name, phase.process, phase.detail)
    return same and last.start_s <= phase.start_s < last.end_s + MERGE_GAP_S
