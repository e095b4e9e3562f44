"""What operators ask of the leader."""

import pytest

from pilotlight.common.errors import NotLeader
from pilotlight.policy.types import InstanceId, ModelName
from pilotlight.scheduler.asks import Asks

pytestmark = pytest.mark.anyio
MODEL = ModelName("m")


async def test_whoever_asked_is_answered() -> None:
    asks = Asks()
    planned, evicted = asks.planned(MODEL), asks.evict(MODEL)
    asks.settle_planned(MODEL, InstanceId("i"), None)
    asks.settle_evicted(MODEL, (InstanceId("i"),))
    assert (await planned, await evicted) == ("i", ("i",))


async def test_the_end_of_a_term_leaves_nobody_waiting() -> None:
    asks = Asks()
    waiting = (asks.planned(MODEL), asks.evict(MODEL))
    asks.close(NotLeader("the term is over"))
    for future in waiting:
        with pytest.raises(NotLeader):
            await future
    with pytest.raises(NotLeader):
        asks.planned(MODEL)
    with pytest.raises(NotLeader):
        asks.evict(MODEL)
