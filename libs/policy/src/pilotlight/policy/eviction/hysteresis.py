"""Against models that take each other's places: what comes back again and again stays longer.

With ``N + 1`` equally important models in turn over ``N`` places, recency evicts the very one that
is asked for next, and every request loads. It is better to let ``N - 1`` of them stay and two share
the last place. So a copy whose model came back more than once counts for more the longer it has
been there. A comeback is a load soon after the model's copy went without having been asked for
again: a load for a single request::

    factor = 1 + margin (n - 1)/n (1 - e^(-age / settled))      n > 1 comebacks, decayed

No request waits for it: a load takes the place of a copy that came later. What never comes back,
and what is more important by more than the margin, is ordered as ever.
"""

import math
from dataclasses import dataclass

from pilotlight.policy.arrivals import MAX_MODELS
from pilotlight.policy.ids import ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class HysteresisRules:
    """Figures, chosen on tuning seeds (decision 63)."""

    margin: float = 0.5
    """No copy counts for more than ``1 + margin`` times what it is worth."""
    settled_s: float = 300.0
    """A copy of this age has 63 % of its margin."""
    soon_s: float = 300.0
    """A load so soon after a copy went in vain is a comeback."""
    half_life_s: float = 600.0
    """Of a comeback."""


class Hysteresis:
    """Told of models that come and go. One owner, no clock."""

    def __init__(self, rules: HysteresisRules | None = None) -> None:
        """``rules``: figures."""
        self._rules = HysteresisRules() if rules is None else rules
        self._gone_s: dict[ModelName, float] = {}
        """When a model's last copy went in vain, the longest ago first."""
        self._comebacks: dict[ModelName, tuple[float, float]] = {}
        """How often each model came back, and when it was that."""

    def gone(self, model: ModelName, now_s: float, *, used: bool) -> None:
        """A model's last copy went. ``used``: the model was asked for while the copy was there."""
        self._gone_s.pop(model, None)
        if used:
            return
        self._gone_s[model] = now_s
        if len(self._gone_s) > MAX_MODELS:
            del self._gone_s[next(iter(self._gone_s))]

    def came(self, model: ModelName, now_s: float) -> None:
        """A copy of a model is there that was not."""
        gone_s = self._gone_s.pop(model, None)
        if gone_s is None or now_s - gone_s > self._rules.soon_s:
            return
        count = self._count(model, now_s) + 1.0
        self._comebacks.pop(model, None)
        self._comebacks[model] = (count, now_s)
        if len(self._comebacks) > MAX_MODELS:
            del self._comebacks[next(iter(self._comebacks))]

    def factor(self, model: ModelName, since_s: float, now_s: float) -> float:
        """What the worth of a copy is multiplied by: from 1 to ``1 + margin``.

        Args:
            model: Whose copy.
            since_s: When it came.
            now_s: On the same clock.
        """
        if model not in self._comebacks:
            return 1.0
        count = self._count(model, now_s)
        if count <= 1.0:
            return 1.0
        settled = 1.0 - math.exp(-max(0.0, now_s - since_s) / self._rules.settled_s)
        return 1.0 + self._rules.margin * (count - 1.0) / count * settled

    def _count(self, model: ModelName, now_s: float) -> float:
        count, at_s = self._comebacks.get(model, (0.0, now_s))
        return count * math.exp2(min(0.0, at_s - now_s) / self._rules.half_life_s)
