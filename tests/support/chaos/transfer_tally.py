"""What the schedules of transfers add up to."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chaos.transfer_runs import DEATHS, Run

DEAD = "died with its node"


@dataclass(slots=True)
class TransferTally:
    """Counts of some schedules."""

    schedules: int = 0
    failed: int = 0
    parts: int = 0
    """That were given to engines, and looked at."""
    wrong: int = 0
    slowest_s: float = 0.0
    """That an engine waited for the model or an error."""
    faults: Counter[str] = field(default_factory=Counter[str])
    outcomes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    """What receivers ended with, for each kind of fault that was in their schedules."""

    def add(self, run: Run) -> None:
        """What one came to."""
        self.schedules += 1
        self.failed += bool(run.problems)
        self.faults.update(str(fault.kind) for fault in run.plan.faults)
        dead = {fault.node for fault in run.plan.of(*DEATHS)}
        for name, read in run.reads.items():
            self.parts += read.parts
            self.wrong += len(read.wrong)
            for kind in {str(fault.kind) for fault in run.plan.faults}:
                self.outcomes.setdefault(kind, Counter())[
                    DEAD if name in dead else read.outcome
                ] += 1
            if name not in dead:
                self.slowest_s = max(self.slowest_s, read.seconds)

    def counts(self) -> dict[str, Any]:
        """As what a test's report can carry from one process to another."""
        outcomes = {kind: dict(counts) for kind, counts in self.outcomes.items()}
        plain = {
            name: getattr(self, name)
            for name in ("schedules", "failed", "parts", "wrong", "slowest_s")
        }
        return {**plain, "faults": dict(self.faults), "outcomes": outcomes}

    def take(self, counts: dict[str, Any]) -> None:
        """Add the counts of another one."""
        for name in ("schedules", "failed", "parts", "wrong"):
            setattr(self, name, getattr(self, name) + counts[name])
        self.slowest_s = max(self.slowest_s, counts["slowest_s"])
        self.faults.update(counts["faults"])
        for kind, outcomes in counts["outcomes"].items():
            self.outcomes.setdefault(kind, Counter()).update(outcomes)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"transfers: {self.schedules} schedules, {self.schedules - self.failed} passed; {self.parts} parts given to engines, "
            f"{self.wrong} wrong; slowest answer {self.slowest_s:.1f} s"
        )
        for kind, count in sorted(self.faults.items()):
            outcomes = ", ".join(
                f"{number} {outcome}" for outcome, number in self.outcomes[kind].most_common()
            )
            yield f"  {kind:<36}{count:>4} schedules; receivers: {outcomes}"


TRANSFERS = TransferTally()
"""Of this run of the tests."""
