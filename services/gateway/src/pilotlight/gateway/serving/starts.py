"""Cold starts as clients see them: what a request allows, what state a model is in, and how long a
start takes.
"""

from dataclasses import dataclass
from enum import StrEnum

from pilotlight.common.clock import Clock
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.instance import STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance

MAX_REMEMBERED = 10_000
"""Models of which the last start is remembered."""


class ColdStart(StrEnum):
    """What a request allows."""

    ALLOW = "allow"
    """It waits for a start, and an instance starts for it."""
    REFUSE = "refuse"
    """It is refused while no instance is ready. Where one is, it counts as demand."""
    WARM_ONLY = "warm-only"
    """As ``REFUSE``, and it is no demand: no instance starts for it."""


class ModelState(StrEnum):
    """Whether a model can answer at once."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Readiness:
    """A model's state, and in how many seconds it is ready if it is asked for now.

    None: that is not known.
    """

    state: ModelState
    expected_s: float | None


@dataclass(frozen=True, slots=True)
class _Start:
    digest: Digest
    began_s: float


class Starts:
    """Watches the fleet for starts. The last one that this gateway saw is what the next is expected
    to take.
    """

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._under_way: dict[ModelName, _Start] = {}
        self._took_s: dict[tuple[ModelName, Digest], float] = {}
        fleet.on_change(self._look)

    def readiness(self, model: Model) -> Readiness:
        """A model's state as this gateway sees it."""
        if self._fleet.serving(model.name):
            return Readiness(ModelState.READY, 0.0)
        took_s = self._took_s.get((model.name, model.digest))
        start = self._under_way.get(model.name)
        if start is None or start.digest != model.digest:
            return Readiness(ModelState.COLD, took_s)
        elapsed_s = self._clock.monotonic_s() - start.began_s
        left_s = None if took_s is None else max(0.0, took_s - elapsed_s)
        return Readiness(ModelState.LOADING, left_s)

    def serving(self, model: Model) -> tuple[Instance, ...]:
        """Instances of a model that take requests."""
        return tuple(seen.instance for seen in self._fleet.serving(model.name))

    def _look(self, name: ModelName) -> None:
        """Begin, or end, the measure of a start."""
        serving = self._fleet.serving(name)
        start = self._under_way.get(name)
        if serving:
            if start is not None:
                del self._under_way[name]
                if serving[0].instance.digest == start.digest:
                    self._remember(name, start)
            return
        starting = [
            seen.instance for seen in self._fleet.instances(name) if seen.instance.state in STARTING
        ]
        if not starting:
            self._under_way.pop(name, None)
        elif start is None or start.digest not in {each.digest for each in starting}:
            self._under_way[name] = _Start(starting[0].digest, self._clock.monotonic_s())

    def _remember(self, name: ModelName, start: _Start) -> None:
        key = (name, start.digest)
        self._took_s.pop(key, None)
        if len(self._took_s) >= MAX_REMEMBERED:
            del self._took_s[next(iter(self._took_s))]
        self._took_s[key] = self._clock.monotonic_s() - start.began_s
