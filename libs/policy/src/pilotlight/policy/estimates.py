"""Timings of a model, learned from its own cold starts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import ModelName
from pilotlight.policy.plan import Estimate, Estimates

WEIGHT = 0.3
"""Of the newest sample: five cold starts forget a change of hardware, one outlier does not own the
figure."""


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
    is.
    """
    if known is None:
        return Estimate(
            model=sample.model,
            device_kind=sample.device_kind,
            fetch_bytes_per_s=sample.fetch_bytes_per_s or 0.0,
            load_bytes_per_s=sample.load_bytes_per_s or 0.0,
            prefill_s=sample.prefill_s or 0.0,
            cold_ttft_s=sample.ttft_s,
            samples=1,
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
    """Estimates by name, with newer ones in the place of those of the same model and device
    kind.
    """
    by_name = dict(known)
    for estimate in learned:
        others = by_name.get(estimate.model, ())
        kept = (one for one in others if one.device_kind is not estimate.device_kind)
        by_name[estimate.model] = (*kept, estimate)
    return by_name


def _mixed(known: float, sample: float | None) -> float:
    if sample is None or sample <= 0:
        return known
    if known <= 0:
        return sample
    return (1 - WEIGHT) * known + WEIGHT * sample
