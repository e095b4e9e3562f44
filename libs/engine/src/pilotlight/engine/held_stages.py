"""The stages that an engine holds, and whose turn it is."""

from collections.abc import Iterator

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.heap import give_back_heap
from pilotlight.engine.errors import BadRequest, StageBusy, UnknownInstance
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.request import RequestKey


class HeldStages(dict[InstanceId, ResidentStage]):
    """Resident stages by name; the one whose turn is longest ago comes first."""

    @property
    def working(self) -> list[ResidentStage]:
        """Those that have work."""
        return [stage for stage in self.values() if stage.has_work]

    def rest_s(self, now_s: float) -> float:
        """How long a step would do nothing but wait for the device, while more requests may come;
        0: it is time for a step, as always where several stages have work.
        """
        working = self.working
        return working[0].rest_s(now_s) if len(working) == 1 else 0.0

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

    def prepare(self) -> bool:
        """Does something for later (``Compute.ahead``), of one stage that has nothing to do.

        Returns:
            Whether there may be more to do.

        Raises:
            RuntimeError: see ``Prepares.one``.
        """
        for stage in self.values():
            quiet = stage.complete and stage.pipeline is None and not stage.in_flight
            left = (one for one in stage.compute.ahead if quiet and not one.is_over)
            if (ahead := next(left, None)) is not None:
                ahead.one()
                return True
        return False

    def rename(self, instance_id: InstanceId, new_id: InstanceId) -> None:
        """Gives a whole model that is in no pipeline another name, with all that it has.

        Raises:
            UnknownInstance: it is not held.
            StageBusy: requests are in flight on it, or it is one of a pipeline, or grows.
            BadRequest: it is no whole model, or the new name is taken.
        """
        resident = self.held(instance_id)
        if resident.pipeline is not None or resident.target is not None or resident.in_flight:
            raise StageBusy(f"{instance_id} runs in a pipeline, grows, or has requests")
        if not resident.serves or new_id in self:
            raise BadRequest(f"{instance_id} cannot be {new_id}: it is no whole model, or that is")
        resident.instance_id = new_id
        self[new_id] = self.pop(instance_id)

    def free(self, instance_id: InstanceId) -> None:
        """Gives a stage's memory back; it is held no longer."""
        self.pop(instance_id).close()
        give_back_heap()

    def cancel_all(self, instance_id: InstanceId) -> Iterator[Produced]:
        """Ends the requests on a stage, as cancelled, or, where parts are missing, with the error
        ``not_loaded``, for they can run elsewhere. The other stages of its pipeline notice.
        """
        resident = self.held(instance_id)
        lost = (
            None
            if resident.complete
            else UnknownInstance(f"{instance_id} was given up before it was loaded")
        )
        return (resident.cancel(request, lost) for request in resident.scheduler.requests)
