"""Timings of a model, learned from its own cold starts."""

from dataclasses import dataclass, replace

from pilotlight.policy.types import DeviceKind, Estimate, ModelName

WEIGHT = 0.3
"""Of the newest sample: five cold starts forget a change of hardware, one outlier does not own the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartSample:
    """What one finished cold start showed. None where it shows nothing: a model that was in the host pool was not fetched."""

    model: ModelName
    device_kind: DeviceKind
    ttft_s: float
    fetch_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None
    prefill_s: float | None = None


def learn(known: Estimate | None, sample: ColdStartSample) -> Estimate:
    """The estimate after one more sample: an exponentially weighted mean, the first sample as it is."""
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


def _mixed(known: float, sample: float | None) -> float:
    if sample is None or sample <= 0:
        return known
    if known <= 0:
        return sample
    return (1 - WEIGHT) * known + WEIGHT * sample
