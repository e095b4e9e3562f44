"""Parts that have come, and are not placed yet."""

from collections import deque

from pilotlight.common.messages.engine import PlacePart
from pilotlight.policy.ids import InstanceId


class PartQueue(deque[tuple[PlacePart, float]]):
    """Each with the time since when it is ready."""

    def drop(self, instance_id: InstanceId) -> None:
        """Forget those of a load that is over. The next one of the same stage has a lease of its
        own, and perhaps another pool.
        """
        kept = [one for one in self if one[0].instance_id != instance_id]
        self.clear()
        self.extend(kept)
