"""The stages that an engine holds, and whose turn it is."""

from collections.abc import Iterator

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.heap import give_back_heap
from pilotlight.engine.errors import UnknownInstance
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.request import RequestKey


class HeldStages(dict[InstanceId, ResidentStage]):
    """Resident stages by name; the one whose turn is longest ago comes first."""

    @property
    def working(self) -> list[ResidentStage]:
        """Those that have work."""
        return [stage for stage in self.values() if stage.has_work]

    @property
    def due_s(self) -> float | None:
        """The next deadline of requests that wait for parts."""
        loading = (
            stage
            for stage in self.values()
            if not stage.complete or (stage.pipeline is not None and stage.pipeline.waits)
        )
        deadlines_s = (
            request.deadline_s for stage in loading for request in stage.scheduler.requests
        )
        return min(
            (deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None
        )

    def held(self, instance_id: InstanceId) -> ResidentStage:
        """The stage of this name.

        Raises:
            UnknownInstance: there is none.
        """
        resident = self.get(instance_id)
        if resident is None:
            raise UnknownInstance(f"{instance_id} is not held here")
        return resident

    def find(self, key: RequestKey) -> tuple[ResidentStage, Request] | None:
        """A request that has not ended, and its stage."""
        for resident in self.values():
            request = resident.scheduler.find(key)
            if request is not None:
                return resident, request
        return None

    def take_turn(self) -> ResidentStage | None:
        """The stage with work whose turn is longest ago; it goes to the end.

        One model a step: its tokens need not wait for another's batch.
        """
        for instance_id, resident in self.items():
            if resident.has_work:
                self[instance_id] = self.pop(instance_id)
                return resident
        return None

    def free(self, instance_id: InstanceId) -> None:
        """Gives a stage's memory back; it is held no longer."""
        self.pop(instance_id).close()
        give_back_heap()

    def cancel_all(self, instance_id: InstanceId) -> Iterator[Produced]:
        """Ends the requests on a stage; see ``Engine.drop``."""
        resident = self.held(instance_id)
        lost = (
            None
            if resident.complete
            else UnknownInstance(f"{instance_id} was given up before it was loaded")
        )
        return (resident.cancel(request, lost) for request in resident.scheduler.requests)
