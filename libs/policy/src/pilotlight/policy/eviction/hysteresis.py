"""Against models that take each other's places: what came back lately stays for a while.

::

    model A   loaded, evicted, loaded again: it is left alone for 2 s, the next time for 4, ...
    model B   waits; its importance grows with its waiting, beyond all bounds at its patience

A copy that was never evicted and loaded again goes as ever: a cluster that does not thrash waits
for nothing here. Under thrash a place changes its model no oftener than once in a load and
``(1 - 1 / margin)`` of the newcomer's patience, where both are equally important. No model waits
for longer than its patience on account of this: what its time to first token leaves beside its
load.
"""

import math
from dataclasses import dataclass

from pilotlight.policy.model import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """The model that room is for."""

    loss: float
    """What it costs to be without it, as of a candidate: seconds of waiting for each second."""
    waited_s: float
    """Its oldest request."""
    patience_s: float
    """Waiting on account of others is bounded by this."""

    @property
    def worth(self) -> float:
        """Its loss, the more the longer it has waited; infinite from its patience on."""
        left = 1.0 - self.waited_s / self.patience_s if self.patience_s > 0 else 0.0
        return self.loss / left if left > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """Figures."""

    first_s: float = 2.0
    """How long a copy is left alone that was evicted and loaded again once. Each further time
    within the window of ``thrash`` doubles it."""
    longest_s: float = 60.0
    margin: float = 2.0
    """A newcomer that is worth so many times as much need not wait."""

    def patience_s(self, slo: Slo, load_s: float) -> float:
        """How long a model may have to wait: with its load it is still in time."""
        return max(0.0, slo.ttft_ms / 1000 - load_s)

    def why_kept(
        self, reloads: int, loss: float, age_s: float, newcomer: Newcomer | None
    ) -> str | None:
        """Why a copy stays for now; None: it may go.

        Args:
            reloads: How often it was evicted and loaded again lately.
            loss: What it costs to be without it.
            age_s: How long it has been there.
            newcomer: What the room is for; None: it is not said, and nothing waits for it.
        """
        if not reloads or newcomer is None:
            return None
        stays_s = min(self.longest_s, self.first_s * 2.0 ** min(reloads - 1, 32))
        if age_s >= stays_s or newcomer.worth > self.margin * loss:
            return None
        return (
            f"it was evicted and loaded again {reloads} times lately and is left alone for"
            f" {stays_s:g} s; what waits is not {self.margin:g} times as important yet"
        )
