"""Whether one more request may be held for a model that is not ready, and when to come back if
not.
"""

from dataclasses import dataclass

from pilotlight.policy.plan import Estimate

_GUESSED_COLD_TTFT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """Limits of one gateway's queue of held requests."""

    total_requests: int = 2048
    model_requests: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What the gateway holds at the moment."""

    total_requests: int
    model_requests: int
    """For the model that the new request asks for."""
    oldest_age_s: float = 0.0
    """Of that model's held requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Held, or turned away with the seconds after which a retry is worth it."""

    admitted: bool
    retry_after_s: float = 0.0
    reason: str = ""


def admit_held(facts: QueueFacts, bounds: QueueBounds, estimate: Estimate | None) -> Admission:
    """Decide over one more held request.

    1. below both bounds: held
    2. the model's share is full: come back when its cold start should be over, which frees the
       whole share at once
    3. the gateway is full with other models: come back after a usual cold start of this one
    """
    if (
        facts.total_requests < bounds.total_requests
        and facts.model_requests < bounds.model_requests
    ):  # 1
        return Admission(admitted=True)
    cold_s = (
        estimate.cold_ttft_s
        if estimate is not None and estimate.cold_ttft_s > 0
        else _GUESSED_COLD_TTFT_S
    )
    if facts.model_requests >= bounds.model_requests:  # 2
        reason = f"{facts.model_requests} requests already wait for this model"
        return Admission(
            admitted=False, retry_after_s=max(1.0, cold_s - facts.oldest_age_s), reason=reason
        )
    reason = f"{facts.total_requests} requests already wait for models to load"  # 3
    return Admission(admitted=False, retry_after_s=max(1.0, cold_s), reason=reason)
