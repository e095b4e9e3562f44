"""What of a restore took how long."""

from collections.abc import Callable, Mapping

from pilotlight.engine.cuda.graph_device import GraphDevice


class Took:
    """Milliseconds, by the name of what took them."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        """Knows of nothing yet.

        Args:
            monotonic_s: a clock, in seconds.
        """
        self.now_s = monotonic_s
        self._begun_s = 0.0
        self.ms: dict[str, float] = {}

    def begin(self) -> None:
        """The stage has its steps: ``until`` counts from now."""
        self._begun_s = self.now_s()

    def until(self, step: str) -> None:
        """Something is reached."""
        self.ms[step] = round((self.now_s() - self._begun_s) * 1e3, 1)

    def lasted(self, part: str, since_s: float) -> float:
        """Something is over that began then; when that is."""
        now_s = self.now_s()
        self.ms[part] = round((now_s - since_s) * 1e3, 1)
        return now_s

    def spent(self, step: str, device: GraphDevice, before: Mapping[str, float]) -> None:
        """What graphs took until now, by part, beyond what they had taken before."""
        for part, ms in device.spent_ms.items():
            self.ms[f"{step}_{part}"] = round(ms - before.get(part, 0.0), 1)
