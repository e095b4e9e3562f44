"""How often each model is asked for, estimated from its accesses: 1/T of mCache, eq. (1).

mCache, section 4.3.2, names a sliding window and an exponentially weighted moving average; neither
says anything of a model that was not asked for lately, so the third has a prior.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from pilotlight.policy.arrivals import MAX_MODELS, Access
from pilotlight.policy.ids import ModelName


class Rates(Protocol):
    """An estimator of rates."""

    def on_access(self, access: Access) -> None:
        """A model was asked for."""
        ...

    def rate_per_s(self, model: ModelName, now_s: float) -> float:
        """How often a model is asked for; 0 where nothing is known and there is no prior."""
        ...


@dataclass(slots=True)
class WindowRates:
    """Accesses within a sliding window, by its length. The window ends now."""

    window_s: float = 600.0
    _times: dict[ModelName, deque[tuple[float, int]]] = field(
        default_factory=dict[ModelName, "deque[tuple[float, int]]"]
    )
    _counts: dict[ModelName, int] = field(default_factory=dict[ModelName, int])
    _began_s: float | None = None

    def on_access(self, access: Access) -> None:
        if self._began_s is None:
            self._began_s = access.at_s
        known = self._times.pop(access.model, None)
        times = deque[tuple[float, int]]() if known is None else known
        self._times[access.model] = times
        times.append((access.at_s, access.count))
        self._counts[access.model] = self._counts.get(access.model, 0) + access.count
        self._prune(access.model, access.at_s)
        if len(self._times) > MAX_MODELS:
            oldest = next(iter(self._times))
            del self._times[oldest], self._counts[oldest]

    def rate_per_s(self, model: ModelName, now_s: float) -> float:
        if model not in self._times or self._began_s is None:
            return 0.0
        self._prune(model, now_s)
        return self._counts[model] / min(self.window_s, max(1.0, now_s - self._began_s))

    def _prune(self, model: ModelName, now_s: float) -> None:
        times = self._times[model]
        while times and times[0][0] <= now_s - self.window_s:
            self._counts[model] -= times.popleft()[1]


@dataclass(slots=True)
class EwmaRates:
    """An exponentially weighted moving average of the gaps between a model's accesses.

    A single gap is noisy: with weight 0.25 the average is one of about seven gaps.
    """

    weight: float = 0.25
    """Of the latest gap."""
    _known: dict[ModelName, tuple[float, float | None]] = field(
        default_factory=dict[ModelName, "tuple[float, float | None]"]
    )
    """When it was asked for last, and the average gap."""

    def on_access(self, access: Access) -> None:
        known = self._known.pop(access.model, None)
        gap_s: float | None = None
        if known is not None:
            last_s, before_s = known
            latest_s = max(1e-3, access.at_s - last_s) / access.count
            gap_s = (
                latest_s
                if before_s is None
                else self.weight * latest_s + (1.0 - self.weight) * before_s
            )
        self._known[access.model] = (access.at_s, gap_s)
        if len(self._known) > MAX_MODELS:
            del self._known[next(iter(self._known))]

    def rate_per_s(self, model: ModelName, now_s: float) -> float:
        _, gap_s = self._known.get(model, (0.0, None))
        return 0.0 if gap_s is None else 1.0 / gap_s


@dataclass(slots=True)
class DecayedRates:
    """A count in which an access is worth half after each half-life, over the length that such a
    count sees, with a prior: what is known of a model before its first access.

    The estimate is (count + prior_count) / (seen + prior_s), where seen is half-life / ln 2 once
    several half-lives have passed, the expectation under a gamma prior.
    """

    half_life_s: float = 1800.0
    prior_count: float = 0.5
    prior_s: float = 600.0
    _known: dict[ModelName, tuple[float, float]] = field(
        default_factory=dict[ModelName, "tuple[float, float]"]
    )
    """The count, and when it was that."""
    _began_s: float | None = None
    _seen: tuple[float, float] = (-math.inf, 0.0)
    """The length that a count sees, and the time for which it was found: many models are scored at
    one time."""

    def on_access(self, access: Access) -> None:
        if self._began_s is None:
            self._began_s = access.at_s
            self._seen = (-math.inf, 0.0)
        count, at_s = self._known.pop(access.model, (0.0, access.at_s))
        count *= math.exp2((at_s - access.at_s) / self.half_life_s)
        self._known[access.model] = (count + access.count, access.at_s)
        if len(self._known) > MAX_MODELS:
            del self._known[next(iter(self._known))]

    def rate_per_s(self, model: ModelName, now_s: float) -> float:
        count, at_s = self._known.get(model, (0.0, now_s))
        count *= math.exp2((at_s - now_s) / self.half_life_s)
        if self._seen[0] != now_s:
            listened_s = 0.0 if self._began_s is None else max(0.0, now_s - self._began_s)
            mean_life_s = self.half_life_s / math.log(2.0)
            self._seen = now_s, mean_life_s * (1.0 - math.exp(-listened_s / mean_life_s))
        return (count + self.prior_count) / (self._seen[1] + self.prior_s)
