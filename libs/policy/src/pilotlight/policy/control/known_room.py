"""What a tick has found out about room, so that it is asked once."""

from collections.abc import Callable, Iterable

from pilotlight.policy.control.rooms import Rooms
from pilotlight.policy.control.shapes import Shape
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.placement import PlacementRules


class Needs:
    """The least device bytes with which models are worth loading.

    Devices that count alike are asked once.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[ModelName, int], int] = {}

    def of(self, model: Model, granule_bytes: int) -> int:
        """Of one model."""
        key = model.name, granule_bytes
        if key not in self._known:
            self._known[key] = stage_room(model, model.spec.whole, granule_bytes).least_bytes
        return self._known[key]


class KnownRoom:
    """What workers can give now, each looked at once until something changes there."""

    def __init__(
        self,
        rules: PlacementRules,
        room_on: Callable[[WorkerId, PlacementRules], int],
        rooms: Callable[[], Rooms],
    ) -> None:
        """Nothing is known yet.

        Args:
            rules: What may be evicted.
            room_on: Looks at a worker.
            rooms: All workers, as they are at the moment.
        """
        self.rules = rules
        self._room_on = room_on
        self._rooms = rooms
        self._known: dict[WorkerId, int] = {}
        self._most: dict[Shape, int] = {}

    def __call__(self, worker_id: WorkerId) -> int:
        """Bytes of one worker."""
        if worker_id not in self._known:
            slot = self._rooms().slots.find(worker_id)
            # Where eviction frees nothing, room is what is free.
            self._known[worker_id] = (
                slot.free_bytes
                if slot is not None and not slot.is_evictable
                else self._room_on(worker_id, self.rules)
            )
        return self._known[worker_id]

    def most(self, shape: Shape) -> int:
        """Bytes of the roomiest worker of a shape."""
        if shape not in self._most:
            self._most[shape] = max(map(self, self._rooms().roomiest(shape, self, 1)), default=0)
        return self._most[shape]

    def forget(self, worker_ids: Iterable[WorkerId]) -> None:
        """Something has changed on these."""
        self._most.clear()
        for worker_id in worker_ids:
            self._known.pop(worker_id, None)
