"""Starts that failed: what cannot start is tried ever more rarely (``scaling``)."""

import math
from collections.abc import Iterable

from pilotlight.policy.instance import SERVING
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, InstanceState


def failed_starts_s(model: Model, instances: Iterable[Instance]) -> tuple[float, ...]:
    """When the last starts of a model failed, one after the other, the latest first.

    A worker that died under a serving instance says nothing against the next start: only instances
    that never served count, and those that ended before the last one that did serve are forgiven,
    also when that one has ended since.
    """
    ours = [one for one in instances if one.digest == model.digest and one.model == model.name]
    served_since_s = max(
        (
            one.state_since_s if one.state in SERVING else one.last_used_s
            for one in ours
            if one.state in SERVING or one.served
        ),
        default=-math.inf,
    )
    failed = (
        one.state_since_s
        for one in ours
        if one.state is InstanceState.FAILED
        and not one.served
        and one.state_since_s > served_since_s
    )
    return tuple(sorted(failed, reverse=True))
