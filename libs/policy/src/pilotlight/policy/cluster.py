"""What is known of workers, as decisions look at it."""

from dataclasses import dataclass

from pilotlight.policy.types import Epoch, HeldStage, InstanceId, WorkerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker by its last report."""

    facts: WorkerFacts
    """With the receiver's judgement of its liveness."""
    heard_s: float
    """When the report came, on the receiver's monotonic clock."""
    incarnation: str
    epoch_seen: Epoch

    def held(self, instance_id: InstanceId) -> HeldStage | None:
        """The stage of an instance, if the worker reports one."""
        return next((held for held in self.facts.held if held.instance_id == instance_id), None)
