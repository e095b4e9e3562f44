"""What a run of the chaos tests adds up to."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """What one fault cost, in seconds."""

    healthy_s: float
    """From the end of the fault until everything was well again, less what others took of the
    machine meanwhile."""
    first_token_s: float | None
    """The longest that a stream waited for its first token; None when none had to wait for the
    model."""
    pause_s: float | None
    """The longest pause between two tokens of a stream; None when none was running."""


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
    tried_again: int = 0
    """Submits of schedules that followed an attempt without a token."""
    resumed: int = 0
    """Submits of schedules that went on after an attempt's tokens."""
    resends: int = 0
    """Resends that gateways asked for in schedules."""
    groups: int = 0
    """Schedules of groups of stages; a test says itself what was wrong in them."""
    group_requests: int = 0
    group_moved: int = 0
    """As many of them were moved to another instance that their group became."""
    costs: dict[str, Cost] = field(default_factory=dict[str, Cost])
    """Of each cell that passed."""

    def table(self) -> Iterator[str]:
        """One line for each cell that passed."""
        yield f"{'cell':<44}{'healthy':>10}{'first token':>14}{'pause':>10}"
        for cell, cost in self.costs.items():
            yield f"{cell:<44}{_seconds(cost.healthy_s):>10}{_seconds(cost.first_token_s):>14}{_seconds(cost.pause_s):>10}"

    def line(self) -> str:
        """The counts."""
        parts = [
            f"cells: {self.cells}",
            f"schedules: {self.schedules}",
            f"requests: {self.requests}",
            f"asked again after their gateway was killed: {self.retried}",
            f"requests lost: {self.lost}",
            f"wrong tokens: {self.wrong_tokens}",
        ]
        if self.schedules:
            parts.append(
                f"of schedules: {self.tried_again} tried again, {self.resumed} resumed, {self.resends} resends"
            )
        if self.groups:
            parts.append(
                f"of groups: {self.groups} schedules, {self.group_requests} requests, {self.group_moved} of them moved"
            )
        if self.costs:
            slowest = max(self.costs, key=lambda cell: self.costs[cell].healthy_s)
            parts.append(f"slowest recovery: {self.costs[slowest].healthy_s:.1f} s ({slowest})")
        return ", ".join(parts)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


TALLY = Tally()
"""Of this run of the tests."""
