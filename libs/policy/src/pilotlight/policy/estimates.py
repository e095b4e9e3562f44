"""Timings of a model, learned from its own cold starts, and those of a usual one."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.cost import estimate_for
from pilotlight.policy.ids import ModelName
from pilotlight.policy.model import Model
from pilotlight.policy.plan import ANY_MODEL, Estimate, Estimates

WEIGHT = 0.3
"""Of the newest sample: five cold starts forget a change of hardware, one outlier does not own the
figure."""
USUAL_SAMPLES = 8.0
"""For how many of a model's own loads counts what models usually take. On one kind of device loads
differ by their bytes first; one load beside another takes twice as long."""
MUCH = 1.25
"""Times what it was: then what copies cost is told anew."""
FEW_MODELS = 64
"""Among so many the usual model is found anew with each estimate, else with an eighth more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartSample:
    """What one finished cold start showed.

    None where it shows nothing: a model that was in the host pool was not fetched.
    """

    model: ModelName
    device_kind: DeviceKind
    ttft_s: float
    fetch_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None
    prefill_s: float | None = None
    prompt_tokens: int = 0
    """That were run for the first token; 0: not known."""
    init_s: float | None = None
    restore_s: float | None = None
    """In the place of ``init_s``, where an artifact was restored."""
    overhead_s: float | None = None
    """Beside the work on parameters and prompt."""


def learn(known: Estimate | None, sample: ColdStartSample) -> Estimate:
    """The estimate after one more sample: an exponentially weighted mean, the first sample as it
    is. What a start takes beside the bytes stays: that is learned by ``Timings``.
    """
    if known is None or known.samples == 0:
        profiled = (0.0, 0.0) if known is None else (known.load_bytes_per_s, known.init_s)
        return Estimate(
            model=sample.model,
            device_kind=sample.device_kind,
            fetch_bytes_per_s=sample.fetch_bytes_per_s or 0.0,
            load_bytes_per_s=sample.load_bytes_per_s or profiled[0],
            prefill_s=sample.prefill_s or 0.0,
            cold_ttft_s=sample.ttft_s,
            samples=1,
            init_s=profiled[1],
        )
    return replace(
        known,
        fetch_bytes_per_s=_mixed(known.fetch_bytes_per_s, sample.fetch_bytes_per_s),
        load_bytes_per_s=_mixed(known.load_bytes_per_s, sample.load_bytes_per_s),
        prefill_s=_mixed(known.prefill_s, sample.prefill_s),
        cold_ttft_s=_mixed(known.cold_ttft_s, sample.ttft_s),
        samples=known.samples + 1,
    )


def with_estimates(known: Estimates, learned: Iterable[Estimate]) -> Estimates:
    """Estimates by name, with newer ones in the place of those of the same model and device kind,
    and those of a usual model, which has the medians of all.
    """
    by_name = dict(known)
    for estimate in learned:
        others = by_name.get(estimate.model, ())
        kept = (one for one in others if one.device_kind is not estimate.device_kind)
        by_name[estimate.model] = (*kept, estimate)
    models = len(by_name.keys() - {ANY_MODEL})
    of_models = max((one.samples for one in by_name.get(ANY_MODEL, ())), default=0)
    if models and (models <= FEW_MODELS or models >= of_models + of_models / 8):
        by_name[ANY_MODEL] = _usual(by_name)
    return by_name


def estimates_of(models: Iterable[ModelName], estimates: Estimates) -> Estimates:
    """Those of some models, and of a usual one."""
    named = sorted({ANY_MODEL, *models})
    return {name: estimates[name] for name in named if name in estimates}


def estimate_among_others(
    model: Model, device_kind: DeviceKind | None, estimates: Estimates
) -> Estimate | None:
    """What is expected of a model, to be compared with what is expected of others.

    Raw figures of one or two loads differ by factors between equal models, and a guess for a model
    of which nothing is known by more: its copies would go before all others, or never.

    1. of a model that was never loaded, not even by a build, what is usual
    2. of one that was, its own pace of loading, and what its starts take beside that, count beside
       the usual ones as far as they were seen; a profile counts as one start

    Args:
        model: Whose.
        device_kind: On what kind of device; None: on any.
        estimates: As ``with_estimates`` makes them.
    """
    own = estimate_for(model.name, device_kind, estimates)
    usual = estimate_for(ANY_MODEL, device_kind, estimates)
    if own is None or usual is None:  # 1
        return own or usual
    # 2: a weighted mean is one of no more samples than this
    seen = min(max(1, own.samples), (2.0 - WEIGHT) / WEIGHT)
    all_seen = seen + USUAL_SAMPLES
    init_s = own.init_s or usual.init_s
    if own.init_s > 0 and usual.init_s > 0:
        init_s = (seen * own.init_s + USUAL_SAMPLES * usual.init_s) / all_seen
    load = own.load_bytes_per_s or usual.load_bytes_per_s
    if own.load_bytes_per_s > 0 and usual.load_bytes_per_s > 0:
        load = all_seen / (seen / own.load_bytes_per_s + USUAL_SAMPLES / usual.load_bytes_per_s)
    return replace(own, load_bytes_per_s=load, init_s=init_s)


def differ_much(before: Estimates, after: Estimates) -> bool:
    """Whether a usual model's cold starts are not about those of before."""

    def figures(estimates: Estimates) -> dict[tuple[DeviceKind, str], float]:
        return {
            (one.device_kind, name): figure
            for one in estimates.get(ANY_MODEL, ())
            for name, figure in (
                ("fetch", one.fetch_bytes_per_s),
                ("load", one.load_bytes_per_s),
                ("init", one.init_s),
            )
        }

    had, has = figures(before), figures(after)
    return had.keys() != has.keys() or any(
        max(had[key], has[key]) > MUCH * min(had[key], has[key]) for key in has
    )


def _usual(by_name: Estimates) -> tuple[Estimate, ...]:
    by_kind: defaultdict[DeviceKind, list[Estimate]] = defaultdict(list)
    for name, found in by_name.items():
        if name != ANY_MODEL:
            for one in found:
                by_kind[one.device_kind].append(one)
    return tuple(
        Estimate(
            model=ANY_MODEL,
            device_kind=kind,
            fetch_bytes_per_s=_median(one.fetch_bytes_per_s for one in found),
            load_bytes_per_s=_median(one.load_bytes_per_s for one in found),
            prefill_s=_median(one.prefill_s for one in found),
            cold_ttft_s=_median(one.cold_ttft_s for one in found),
            samples=len(by_name.keys() - {ANY_MODEL}),
            init_s=_median(one.init_s for one in found),
        )
        for kind, found in by_kind.items()
    )


def _median(values: Iterable[float]) -> float:
    """Of what is known; 0 where nothing is."""
    known = [one for one in values if one > 0]
    return median(known) if known else 0.0


def _mixed(known: float, sample: float | None) -> float:
    if sample is None or sample <= 0:
        return known
    if known <= 0:
        return sample
    return (1 - WEIGHT) * known + WEIGHT * sample
