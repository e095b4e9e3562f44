"""Which requests go on elsewhere when workers of a group have become instances (ParaServe, section
6: the load of the group is shared by what it became).

A request that moves takes its tokens along, and its keys and values come behind as far as they can
be had; what does not come is computed again. Until then it waits; so those move that have the
least to bring for what they still want.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pilotlight.policy.ids import InstanceId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """A request that an instance has, and that has not ended."""

    request_id: RequestId
    instance_id: InstanceId
    computed_tokens: int
    """Prompt and output so far: what is brought or computed again if it moves. 0 of one that
    waits."""
    left_tokens: int
    """It may want so many more."""

    @property
    def price(self) -> float:
        """Tokens to bring or to compute again for each that is still wanted."""
        return self.computed_tokens / max(1, self.left_tokens)


def spread(
    running: Iterable[RunningRequest], lead: InstanceId, others: Iterable[InstanceId]
) -> tuple[RequestId, ...]:
    """The requests that leave the instance which led a group.

    1. each instance is to have an equal share of them all; the lead keeps what does not divide
    2. what the lead has beyond its share leaves; nothing ever leaves another instance
    3. those leave first that have the least to bring for what they still want

    Args:
        running: Requests on the lead and on the others.
        lead: The instance that has the group's requests.
        others: What its workers have become.
    """
    family = {lead, *others}
    counted = [one for one in running if one.instance_id in family]
    share = math.ceil(len(counted) / len(family))  # 1
    mine = [one for one in counted if one.instance_id == lead]
    mine.sort(key=lambda one: (one.price, one.request_id))  # 3
    return tuple(one.request_id for one in mine[: max(0, len(mine) - share)])  # 2
