"""Profiles that were measured offline, in the place of starts that were not seen yet."""

from collections.abc import Iterable

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import NO_LINE, Point
from pilotlight.policy.coldstart.timings import UNKNOWN_MODEL, StageSample, Timings, step_bytes
from pilotlight.policy.ids import NodeId
from pilotlight.policy.materialized import Profile
from pilotlight.policy.model import Model


def seeded(
    timings: Timings, profiles: Iterable[tuple[Model, DeviceKind, Profile]]
) -> tuple[Timings, int]:
    """Timings with what profiles say of models of which no start has shown it yet.

    Returns:
        The timings, and the number of models that were taken over.
    """
    samples: list[StageSample] = []
    taken: set[tuple[str, DeviceKind]] = set()
    for model, kind, profile in profiles:
        known = timings.models.get((model.name, kind), UNKNOWN_MODEL)
        if (model.name, kind) in taken:
            continue
        fresh = _samples(
            model,
            kind,
            profile,
            prefill=known.prefill == NO_LINE,
            decode=known.decode == NO_LINE,
        )
        if fresh:
            taken.add((model.name, kind))
            samples += fresh
    # Of no node: what is learned of nodes must come from starts on them.
    after = timings.learned(samples)
    return (
        Timings(
            models=after.models, devices=timings.devices, rates=timings.rates, hops=timings.hops
        ),
        len(taken),
    )


def _samples(
    model: Model, kind: DeviceKind, profile: Profile, *, prefill: bool, decode: bool
) -> list[StageSample]:
    points = [Point(float(one.tokens), one.seconds) for one in profile.prefill] if prefill else []
    reads = (
        [
            Point(float(step_bytes(model, one.batch, one.context_tokens)), one.seconds)
            for one in profile.decode
        ]
        if decode
        else []
    )
    nowhere = NodeId("")
    return [
        *(
            StageSample(model=model.name, device_kind=kind, node_id=nowhere, prefill=point)
            for point in points
        ),
        *(
            StageSample(model=model.name, device_kind=kind, node_id=nowhere, decode=point)
            for point in reads
        ),
    ]
