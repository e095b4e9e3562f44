"""Where the time of a restore goes."""

from collections.abc import Callable, Mapping


class RestoreTimes:
    """Milliseconds: of reading and opening the archive and of loading the first kernels, which is
    done before the stage has its steps, or while; then, since it had them, until ``reserved``,
    ``begun``, ``first`` and ``all``; of the first graph, and of all, by part.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Has none yet.

        Args:
            now_s: a clock, in seconds.
        """
        self._now_s = now_s
        self._begun_s = 0.0
        self.steps: dict[str, float] = {}

    def now_s(self) -> float:
        """On its clock."""
        return self._now_s()

    def begin(self) -> None:
        """What follows counts from now on."""
        self._begun_s = self._now_s()

    def until(self, step: str) -> None:
        """A step is reached."""
        self.steps[step] = self._ms(self._begun_s)

    def part(self, name: str, since_s: float) -> float:
        """A part is done that began then; when it ended."""
        self.steps[name] = self._ms(since_s)
        return self._now_s()

    def made(self, step: str, now: Mapping[str, float], before: Mapping[str, float]) -> None:
        """A step is reached, if it was not: until when, and what was spent on each part of it."""
        if step not in self.steps:
            self.until(step)
            for part, ms in now.items():
                self.steps[f"{step}_{part}"] = round(ms - before.get(part, 0.0), 1)

    def _ms(self, since_s: float) -> float:
        return round((self._now_s() - since_s) * 1e3, 1)
