"""What the scheduler says of a model that fits on no worker ends what waits for it, at once."""

import msgspec
import pytest

from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import NoWorker
from pilotlight.common.messages.demand import NEVER_FITS_SUBJECT, NeverFits
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.gateway.serving.demand import GATHER_S, REPEAT_S, DemandPublisher, gather_s
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.ticket import Ticket
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.ids import Digest, GatewayId, ModelName

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class NothingServes:
    """A router without instances."""

    def pick(self, *_: object) -> None:
        return None

    pick_open = pick

    def is_warm(self, _: ModelName) -> bool:
        return False


def ticket(model: str, digest: str) -> Ticket:
    return Ticket(
        model=ModelName(model),
        digest=Digest(digest),
        needed_tokens=1,
        held_tokens=1,
        since_s=0.0,
        deadline_s=3600.0,
        trace_parent="00-a-b-01",
    )


async def test_requests_for_what_never_fits_are_told_at_once(bus: Bus) -> None:
    queue = PendingQueue(NothingServes(), ManualClock(), QueueBounds())
    publisher = DemandPublisher(queue, bus, Background(), GatewayId("g"))
    await publisher.start()
    large, newer, other = (
        queue.enter(ticket(*each)) for each in (("large", "d"), ("large", "e"), ("other", "o"))
    )
    told = NeverFits(model=ModelName("large"), digest=Digest("d"), message="it needs 9 bytes")
    await bus.publish(NEVER_FITS_SUBJECT, told)
    await until(lambda: large.error is not None)
    assert isinstance(large.error, NoWorker)
    assert "9 bytes" in str(large.error)
    assert (newer.error, other.error) == (None, None), "another version may fit"
    assert queue.held == 2
    await publisher.stop()


def test_demand_tells_the_prompt_of_its_oldest_request() -> None:
    queue = PendingQueue(NothingServes(), ManualClock(), QueueBounds())
    for since_s, tokens in ((2.0, 7), (1.0, 161), (3.0, 9)):
        asked = ticket("m", "d")
        queue.enter(msgspec.structs.replace(asked, since_s=since_s, held_tokens=tokens))
    (told,) = queue.demand()
    assert (told.waiting, told.prompt_tokens) == (3, 161)


def test_a_long_line_is_told_of_as_often_as_it_repeats_itself_at_least() -> None:
    assert [gather_s(held) for held in (0, 10, 100_000)] == [
        GATHER_S,
        pytest.approx(0.006),
        REPEAT_S,
    ]
