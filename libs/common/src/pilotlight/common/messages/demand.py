"""Between gateway and scheduler: what is held, what an operator wants, what can never start."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import Digest, GatewayId, InstanceId, ModelName
from pilotlight.policy.request import Demand

DEMAND_SUBJECTS = "v1.demand.*"
WARM_SUBJECT = "v1.scheduler.warm"
"""Request/reply to the leader: ``Warm`` → ``Warming``."""
EVICT_SUBJECT = "v1.scheduler.evict"
"""Request/reply to the leader: ``Evict`` → ``Evicting``."""

NEVER_FITS_SUBJECT = "v1.scheduler.never-fits"
"""``NeverFits``, to all gateways, with each attempt to start such a model."""


def demand_subject(gateway_id: GatewayId) -> str:
    """``DemandVector``, on change and every 250 ms while not empty."""
    return f"v1.demand.{gateway_id}"


class DemandVector(Message, frozen=True, kw_only=True):
    """Everything that one gateway holds. A model that is not in it has no demand there."""

    gateway_id: GatewayId
    demands: tuple[Demand, ...]
    seq: int = 0
    """Counts the gateway's vectors from 1, so that one that comes late is known to be old. 0: of a
    release that does not."""


class Warm(Message, frozen=True, kw_only=True):
    """Start an instance of a model that has none, as if a request waited."""

    model: ModelName
    trace_parent: str = ""


class Warming(Message, frozen=True, kw_only=True):
    """The instance that is on its way or ready."""

    instance_id: InstanceId


class Evict(Message, frozen=True, kw_only=True):
    """Drain and release every instance of a model."""

    model: ModelName


class Evicting(Message, frozen=True, kw_only=True):
    """The instances that are being released."""

    instance_ids: tuple[InstanceId, ...]


class NeverFits(Message, frozen=True, kw_only=True):
    """Every worker there is has too little memory for a model: its requests need not wait."""

    model: ModelName
    digest: Digest
    message: str
    """In a sentence: what it needs."""
