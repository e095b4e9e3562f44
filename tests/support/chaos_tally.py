"""What schedules of faults came to."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """What all schedules came to."""

    schedules: int = 0
    requests: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    lost: int = 0
    wrong: int = 0
    seen: Counter[str] = field(default_factory=lambda: Counter(tried_again=0, resumed=0, resends=0))
    """What gateways had to do for it."""
    faults: Counter[str] = field(default_factory=Counter[str])
    failures: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def counts(self) -> dict[str, int]:
        """For the line that sums up a run of the chaos tests."""
        return {
            "schedules": self.schedules,
            "requests": self.requests,
            "lost": self.lost,
            "wrong_tokens": self.wrong,
            **self.seen,
        }

    def line(self) -> str:
        """For people."""
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        errors = (
            ", ".join(f"{count} {code}" for code, count in sorted(self.errors.items())) or "none"
        )
        seen = ", ".join(f"{count} {name}" for name, count in sorted(self.seen.items()))
        return (
            f"chaos schedules: {self.schedules} run, {self.schedules - len(self.failures)} passed; {self.requests} requests, "
            f"{self.lost} lost, {self.wrong} wrong tokens, {self.left} left by their clients; errors: {errors}; "
            f"faults: {faults}; {seen}"
        )

    def failed(self, file: str) -> str:
        """What went wrong, and how to see it again by the test in this file."""
        lines = [self.line()]
        for seed, problems in sorted(self.failures.items()):
            lines.append(
                f"PILOTLIGHT_CHAOS_SEEDS={seed} PILOTLIGHT_CHAOS_LOG=all python -m pytest {file} -s"
            )
            lines += [f"    {problem}" for problem in problems]
        return "\n".join(lines)
