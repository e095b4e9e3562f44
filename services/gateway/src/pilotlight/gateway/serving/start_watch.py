"""Whose cold starts are, and what they took: told once of each, to be written down.

A start is for the requests that are held for its model when this gateway hears of it: it was begun
for them. What its load had of a device is in its worker's reports, for as long as the stage is
held, so that any gateway that hears one can tell of it.
"""

from collections.abc import Mapping
from typing import Protocol

from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.policy.ids import InstanceId, ModelName, WorkerId
from pilotlight.policy.instance import STARTING
from pilotlight.policy.plan import Instance


class StartBook(Protocol):
    """Where starts are noted; never waits (``StartCosts``)."""

    def held(self, instance_id: InstanceId, waited: Mapping[str, int]) -> None:
        """An instance is started while so many requests of each key wait for its model."""
        ...

    def took(
        self, instance_id: InstanceId, worker_id: WorkerId, model: ModelName, device_s: float
    ) -> None:
        """The load of an instance's stage is over.

        Args:
            instance_id: the instance.
            worker_id: who loaded the stage.
            model: its model.
            device_s: device-seconds that the load had.
        """
        ...


class StartWatch:
    """Looks at what changes in the fleet."""

    def __init__(self, fleet: Fleet, queue: PendingQueue, book: StartBook) -> None:
        self._fleet = fleet
        self._queue = queue
        self._book = book
        self._told: dict[InstanceId, set[WorkerId]] = {}
        """Instances that are known, and the workers whose loads were told of."""
        fleet.on_change(self._look)
        fleet.on_gone(self._forget)

    def _forget(self, instance_id: InstanceId) -> None:
        self._told.pop(instance_id, None)

    def _look(self, model: ModelName) -> None:
        for seen in self._fleet.instances(model):
            instance = seen.instance
            told = self._told.get(instance.instance_id)
            if told is None:
                told = self._told[instance.instance_id] = set()
                waited = self._queue.waiting_keys(model)
                if waited and instance.state in STARTING:
                    self._book.held(instance.instance_id, waited)
            if len(told) < len(instance.placements):
                self._tell_loads(instance, told)

    def _tell_loads(self, instance: Instance, told: set[WorkerId]) -> None:
        for worker_id in {placement.worker_id for placement in instance.placements} - told:
            facts = self._fleet.worker(worker_id)
            for stage in facts.held if facts is not None else ():
                if stage.instance_id == instance.instance_id and stage.start_device_s > 0:
                    told.add(worker_id)
                    self._book.took(
                        instance.instance_id, worker_id, instance.model, stage.start_device_s
                    )
