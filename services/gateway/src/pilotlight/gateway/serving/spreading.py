"""Requests of a group are shared out when its workers have become instances.

They ran where the group's lead is. Each gateway looks after its own: when it first sees an instance
that was a stage of the group, it has some of them go on elsewhere, from the tokens that they have
(``policy.spreading``). Their submits say where they ran: the engine there is asked for their keys
and values. Which instance takes each is the router's choice, as for any other request.
"""

import structlog

from pilotlight.common.errors import NotLoaded
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.relay import Attempt, Relay
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.plan import Instance
from pilotlight.policy.spreading import RunningRequest, spread

log = structlog.get_logger()


class Spreader:
    """Watches for instances that were stages."""

    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        """Listens to the fleet."""
        self._fleet = fleet
        self._relay = relay
        self._seen: set[InstanceId] = set()
        """Instances that have had their share, or found nothing to share."""
        fleet.on_change(self.look)
        fleet.on_gone(self._seen.discard)

    def look(self, model: ModelName) -> None:
        """Share the requests of a model's groups out, where an instance is new."""
        serving = [seen.instance for seen in self._fleet.serving(model)]
        new = [one for one in serving if _group_of(one) and one.instance_id not in self._seen]
        self._seen.update(one.instance_id for one in new)
        for lead in {_group_of(one) for one in new}:
            if lead is not None and self._fleet.serves(lead):
                others = [one.instance_id for one in serving if _group_of(one) == lead]
                self._share_out(lead, others)

    def _share_out(self, lead: InstanceId, others: list[InstanceId]) -> None:
        family = {lead, *others}
        attempts = {
            one.request_id: one
            for one in self._relay.attempts
            if one.instance_id in family and one.accepted and one.finish is None
        }
        shared = spread(map(_running, attempts.values()), lead, others)
        # Two instances may come at one moment: those that leave for the first one have not yet.
        leaving = [one for one in shared if attempts[one].error is None]
        for request_id in leaving:
            attempts[request_id].fail(
                NotLoaded(f"workers of {lead} have become instances: it goes on at one of them")
            )
        if leaving:
            log.info(
                "requests of a group go on at the instances that it became",
                action="requests_spread",
                instance_id=lead,
                requests=len(leaving),
            )


def _group_of(instance: Instance) -> InstanceId | None:
    """The group of which an instance was a stage; None: of none."""
    return instance.placements[0].grown_from


def _running(attempt: Attempt) -> RunningRequest:
    output_tokens = attempt.log.next_seq
    computed = attempt.first_heard_s is not None
    return RunningRequest(
        request_id=attempt.request_id,
        instance_id=attempt.instance_id,
        computed_tokens=attempt.prompt_tokens + output_tokens if computed else 0,
        left_tokens=max(0, attempt.max_tokens - output_tokens),
    )
