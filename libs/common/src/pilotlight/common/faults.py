"""Injected delays, for tests: a setting names points in the code and how long each one takes
longer.
"""

from dataclasses import dataclass, field

from pilotlight.common.waiting import pause

POINTS = frozenset({"fetch", "load", "prefill", "step"})
"""``fetch``: once for each fetch order. ``load``: once for each stage. ``prefill``: once for the
first prefill of a stage. Each lies within the phase of its name. ``step``: before each step of an
engine, so that a stream lasts as long as a test needs."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Delays by point, in seconds. None at all unless a test asks."""

    delays_s: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def parse(cls, text: str) -> "Faults":
        """Read ``fetch=0.2,load=0.2``.

        Raises:
            ValueError: a point is not known, or its delay is not a number of seconds.
        """
        delays_s: dict[str, float] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            point, _, seconds = entry.partition("=")
            if point not in POINTS:
                raise ValueError(
                    f"no fault can be injected at {point!r}; points are {', '.join(sorted(POINTS))}"
                )
            delays_s[point] = float(seconds)
            if not 0 <= delays_s[point] < 3600:
                raise ValueError(
                    f"a delay of {seconds} s at {point}: give 0 or more, and less than 3600"
                )
        return cls(delays_s)

    def delay_s(self, point: str) -> float:
        """The delay at a point; 0 where none is injected."""
        return self.delays_s.get(point, 0.0)

    async def delay(self, point: str) -> None:
        """Take the point's delay; returns at once where none is injected."""
        seconds = self.delay_s(point)
        if seconds > 0:
            await pause(seconds)
