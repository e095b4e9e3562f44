"""What a run of the chaos tests adds up to."""

from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of one test session."""

    cells: int = 0
    schedules: int = 0
    requests: int = 0
    retried: int = 0
    """Cut off together with their gateway, and asked again."""
    lost: int = 0
    wrong_tokens: int = 0
    """Requests whose tokens, text or end differ from those of an undisturbed run."""
    recovery_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds from the end of each fault until everything was healthy again."""

    def recovered(self, cell: str, seconds: float) -> None:
        self.recovery_s[cell] = seconds

    def line(self) -> str:
        parts = [
            f"cells: {self.cells}",
            f"schedules: {self.schedules}",
            f"requests: {self.requests}",
            f"asked again after their gateway was killed: {self.retried}",
            f"requests lost: {self.lost}",
            f"wrong tokens: {self.wrong_tokens}",
        ]
        if self.recovery_s:
            slowest = max(self.recovery_s, key=lambda cell: self.recovery_s[cell])
            parts.append(f"slowest recovery: {self.recovery_s[slowest]:.1f} s ({slowest})")
        return ", ".join(parts)


TALLY = Tally()
"""Of this session."""
