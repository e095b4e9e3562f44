"""A policy that knows what no service can: how often each model will be asked for."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import Priority
from pilotlight.policy.eviction.iam import utility
from pilotlight.policy.eviction.scored import ScoredPolicy
from pilotlight.policy.ids import ModelName


class TrueRates(ScoredPolicy):
    """The least utility goes first, by the rates that the workload was drawn with."""

    name = "true-rates"
    renewed_per_access = 8

    def __init__(self, phases: Sequence[tuple[float, Mapping[ModelName, float]]]) -> None:
        """``phases``: from when on, and the rates from then on."""
        super().__init__()
        self._phases = phases
        self._began = [began_s for began_s, _ in phases]

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        rates = self._phases[max(0, bisect_right(self._began, now_s) - 1)][1]
        return utility(candidate, rates.get(candidate.model, 0.0)), last_s
