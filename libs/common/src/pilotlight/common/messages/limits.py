"""Gateway to gateway: what each has let in of the limits that they share."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import GatewayId

LIMIT_SUBJECTS = "v1.limits.*"


def limits_subject(gateway_id: GatewayId) -> str:
    """``LimitTotals``, 20 times a second while requests with limits come, and every second."""
    return f"v1.limits.{gateway_id}"


class LimitTotal(Message, frozen=True, kw_only=True):
    """One key's or project's requests on one gateway.

    Totals count from the beginning of a life; a listener charges what they grew by since it heard
    them last.
    """

    subject: str
    """``key/ID`` or ``project/NAME``."""
    life: int
    """Another number, other totals: the gateway had forgotten it in between."""
    age_s: float
    """Of the life. One that began while a listener listened is all news to it."""
    requests: float = 0.0
    tokens: float = 0.0
    """Estimates, corrected at the requests' ends."""
    running: int = 0
    """Requests at the moment."""
    requests_owed: float = 0.0
    """Of all gateways' requests together, as this one knows: what a minute has not paid back."""
    tokens_owed: float = 0.0


class LimitTotals(Message, frozen=True, kw_only=True):
    """Those that have changed, and in turn all others."""

    gateway_id: GatewayId
    seq: int
    """Counts the gateway's messages from 1: one that comes late is known to be old."""
    totals: tuple[LimitTotal, ...] = ()
