"""Gateway to scheduler and cache: how often each model is asked for."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.arrivals import ArrivalCount, CounterLife
from pilotlight.policy.ids import GatewayId

ARRIVAL_SUBJECTS = "v1.arrivals.*"


def arrivals_subject(gateway_id: GatewayId) -> str:
    """``Arrivals``, on change and every second once anything has been counted."""
    return f"v1.arrivals.{gateway_id}"


class Arrivals(Message, frozen=True, kw_only=True):
    """Totals of the models that were asked for since the last message, and of some others in turn.

    A listener compares them with the highest totals that it has heard of the same life
    (``policy.arrivals``): order and repetition do not matter, and what is lost is told again.
    """

    life: CounterLife
    counts: tuple[ArrivalCount, ...] = ()
