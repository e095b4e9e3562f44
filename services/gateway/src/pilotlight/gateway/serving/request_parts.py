"""What requests share on their way."""

from dataclasses import dataclass

from pilotlight.common.clock import Clock
from pilotlight.common.phases import PhaseRecorder
from pilotlight.gateway.serving.arrivals import ArrivalPublisher
from pilotlight.gateway.serving.explain import Explainer
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.relay import Relay
from pilotlight.gateway.serving.route import Router
from pilotlight.policy.ids import GatewayId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParts:
    """What a request needs on its way."""

    gateway_id: GatewayId
    clock: Clock
    fleet: Fleet
    router: Router
    queue: PendingQueue
    arrivals: ArrivalPublisher
    relay: Relay
    phases: PhaseRecorder
    explainer: Explainer
    hold_timeout_s: float
    hold_slo_factor: float
