"""Workers' room while it is being shared out among models that are to have one more instance
(``turns``).
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pilotlight.policy.cluster import NodeFacts, WorkerFacts
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance

Importance = tuple[bool, float, str]
"""Of an instance, see ``turns``: the least important makes room first."""


@dataclass(slots=True, kw_only=True)
class Place:
    """One worker's room while it is being shared out."""

    worker: WorkerFacts
    node: NodeFacts
    room_bytes: int
    """Free, or free as soon as it is asked for."""
    coming_bytes: int
    """On its way out."""
    models: frozenset[ModelName]
    """Those of which it has an instance that serves or starts."""
    victims: list[tuple[Instance, int]]
    """The instances that may make room, and what that frees here."""
    claimed: bool = False
    least_important: Importance = (False, 0.0, "")
    """Of the victims, before any was chosen."""

    def give(self, victim: Instance) -> None:
        """What the victim has here, if it has anything, is on its way out."""
        self.coming_bytes += sum(
            size_bytes for one, size_bytes in self.victims if one.instance_id == victim.instance_id
        )
        self.victims = [one for one in self.victims if one[0].instance_id != victim.instance_id]

    def claim(self, least_bytes: int) -> None:
        """Keep room for one instance, from what is there first."""
        self.claimed = True
        from_room = min(max(self.room_bytes, 0), least_bytes)
        self.room_bytes -= from_room
        self.coming_bytes -= least_bytes - from_room


class Need:
    """What one model needs of a place. Devices and pools that count alike are asked once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._device_bytes: dict[int, int] = {}
        self._host_bytes: dict[int, int] = {}

    def device_bytes(self, place: Place) -> int:
        """The least with which it is worth loading there."""
        granule_bytes = place.worker.device.granule_bytes
        if granule_bytes not in self._device_bytes:
            room = stage_room(self._model, self._model.spec.whole, granule_bytes)
            self._device_bytes[granule_bytes] = room.least_bytes
        return self._device_bytes[granule_bytes]

    def is_met_by(self, place: Place) -> bool:
        """Whether the node's host pool could ever hold it, and it is not there yet."""
        unit_bytes = place.node.pool_unit_bytes
        if unit_bytes not in self._host_bytes:
            self._host_bytes[unit_bytes] = place.node.pool_room_bytes(self._model.spec.part_bytes)
        return (
            self._model.name not in place.models
            and self._host_bytes[unit_bytes] <= place.node.pool_bytes
        )


Entry = tuple[int, WorkerId, Place]
"""Bytes, and the place that has them."""


def _rank(entry: Entry) -> tuple[int, WorkerId]:
    return entry[:2]


class Rooms:
    """Places by their room, so that the roomiest is found without a look at the others.

    Devices that count alike are a shelf: what a model needs is the same on each.
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        shelves = defaultdict[int, list[tuple[int, WorkerId, Place]]](list)
        for place in places:
            shelves[place.worker.device.granule_bytes].append(self._entry(place))
        self._shelves = {size: sorted(shelf, key=_rank) for size, shelf in shelves.items()}

    def most_bytes(self, need: Need) -> int:
        """What a model needs of any place at most."""
        return max((need.device_bytes(shelf[0][2]) for shelf in self._shelves.values()), default=0)

    def free(self, need: Need) -> Place | None:
        """The place with the most room to spare; None where the model fits nowhere."""
        found: list[Entry] = []
        for shelf in self._shelves.values():
            for room_bytes, worker_id, place in reversed(shelf):
                spare_bytes = room_bytes - need.device_bytes(place)
                if spare_bytes < 0:
                    break
                if need.is_met_by(place):
                    found.append((spare_bytes, worker_id, place))
                    break
        return max(found, key=_rank)[2] if found else None

    def coming(self, need: Need) -> Place | None:
        """The same, with what is on its way out."""
        sizes: Iterable[Entry] = (
            (one.room_bytes + one.coming_bytes - need.device_bytes(one), one.worker.worker_id, one)
            for one in self._places
            if one.coming_bytes > 0 and need.is_met_by(one)
        )
        best = max((one for one in sizes if one[0] >= 0), key=_rank, default=None)
        return best[2] if best is not None else None

    def claim(self, place: Place, need: Need) -> None:
        """Keep room for one instance."""
        shelf = self._shelves[place.worker.device.granule_bytes]
        del shelf[bisect.bisect_left(shelf, _rank(self._entry(place)), key=_rank)]
        place.claim(need.device_bytes(place))
        bisect.insort(shelf, self._entry(place), key=_rank)

    def _entry(self, place: Place) -> Entry:
        return place.room_bytes, place.worker.worker_id, place
