"""Profiles that were measured offline, in the place of starts that were not seen yet.

::

    of a profile        stands for                           until
    prefill, decode     t_p, t_d of its model and kind       starts outweigh it
    init_s, restore_s   init, restore of its model and kind  the first start that shows one
    load_s              p of its kind; in estimates of       the first start that shows one
                        its model
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import NO_LINE, Point, offline
from pilotlight.policy.coldstart.timings import (
    ANY,
    UNKNOWN_DEVICE,
    UNKNOWN_MODEL,
    OfDevice,
    OfModel,
    StageSample,
    Timings,
    step_bytes,
)
from pilotlight.policy.cost import estimate_for
from pilotlight.policy.ids import ModelName, NodeId
from pilotlight.policy.materialized import Profile
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Estimate, Estimates

Profiles = Iterable[tuple[Model, DeviceKind, Profile]]
"""The newest first: of one model and kind it alone counts."""


def seeded(timings: Timings, profiles: Profiles) -> tuple[Timings, int]:
    """Timings with what profiles say of models of which no start has shown it yet.

    Returns:
        The timings, and the number of models that were taken over.
    """
    newest = _newest(profiles)
    samples: list[StageSample] = []
    for (_, kind), (model, profile) in newest.items():
        known = timings.models.get((model.name, kind), UNKNOWN_MODEL)
        samples += _lines(
            model,
            kind,
            profile,
            prefill=known.prefill == NO_LINE,
            decode=known.decode == NO_LINE,
        )
    # Of no node: what is learned of nodes must come from starts on them.
    models = dict(timings.learned(samples).models)
    for of_model, (_, profile) in newest.items():
        known = models.get(of_model, UNKNOWN_MODEL)
        if (after := _penalties(known, profile)) != known:
            models[of_model] = after
    taken = sum(models.get(key) is not timings.models.get(key) for key in newest)
    return (
        Timings(
            models=models,
            devices=_loads(timings.devices, newest),
            rates=timings.rates,
            hops=timings.hops,
        ),
        taken,
    )


def seeded_estimates(
    estimates: Estimates, timings: Timings, profiles: Profiles
) -> tuple[Estimate, ...]:
    """Estimates of models with profiles that are others than those that are known.

    Of a model that was never started it has what its profile says, with ``samples`` 0: what a start
    shows takes its place (``estimates.learn``). What a start takes beside the bytes is that of its
    timings, which a start has corrected or not.

    Args:
        estimates: Those that are known.
        timings: With the profiles (``seeded``).
        profiles: What was measured.
    """
    found: list[Estimate] = []
    for (name, kind), (model, profile) in _newest(profiles).items():
        known = estimate_for(name, kind, estimates)
        after = known
        if known is None or known.samples == 0:
            after = Estimate(
                model=name,
                device_kind=kind,
                fetch_bytes_per_s=0.0,
                load_bytes_per_s=profile.model_bytes_per_s(model.device_bytes(model.spec.whole)),
                prefill_s=0.0,
                cold_ttft_s=0.0,
                samples=0,
            )
        assert after is not None
        after = replace(after, init_s=timings.init_s(name, kind))
        shows = after.samples or after.load_bytes_per_s or after.init_s
        if shows and after != known:
            found.append(after)
    return tuple(found)


_Newest = Mapping[tuple[ModelName, DeviceKind], tuple[Model, Profile]]


def _newest(profiles: Profiles) -> _Newest:
    found: dict[tuple[ModelName, DeviceKind], tuple[Model, Profile]] = {}
    for model, kind, profile in profiles:
        found.setdefault((model.name, kind), (model, profile))
    return found


def _lines(
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


def _penalties(known: OfModel, profile: Profile) -> OfModel:
    """With init and restore. A start that was not restored has said that there is no artifact any
    more: the profile of that one is not taken over again, that of another build is.
    """
    restore, restore_s = known.restore, known.profiled_restore_s
    if profile.restore_s != restore_s:
        restore, restore_s = offline(restore, profile.restore_s), profile.restore_s
    return replace(
        known,
        init=offline(known.init, profile.init_s),
        restore=restore,
        profiled_restore_s=restore_s,
    )


def _loads(
    devices: Mapping[tuple[NodeId, DeviceKind], OfDevice], newest: _Newest
) -> Mapping[tuple[NodeId, DeviceKind], OfDevice]:
    """With p of each kind: the bytes of all its profiled loads over the seconds that they took. The
    same mapping where nothing is new.
    """
    news: dict[tuple[NodeId, DeviceKind], OfDevice] = {}
    for kind in dict.fromkeys(kind for _, kind in newest):
        loads = [
            (model.device_bytes(model.spec.whole), profile.load_s)
            for (_, of_kind), (model, profile) in newest.items()
            if of_kind is kind and profile.load_s > 0
        ]
        took_s = sum(seconds for _, seconds in loads)
        rate = sum(size_bytes for size_bytes, _ in loads) / took_s if loads else 0.0
        known = devices.get((ANY, kind), UNKNOWN_DEVICE)
        load = offline(known.load, rate)
        if load != known.load:
            news[ANY, kind] = replace(known, load=load)
    return {**devices, **news} if news else devices
