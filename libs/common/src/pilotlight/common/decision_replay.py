"""Decides again what a decision log says was decided."""

from dataclasses import dataclass
from pathlib import Path

from pilotlight.common.decision_digest import digest_of, said
from pilotlight.common.decision_log import LogReader
from pilotlight.common.errors import BadRequest
from pilotlight.policy.control.books import Books
from pilotlight.policy.control.plan import Memory
from pilotlight.policy.control.tick import tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first tick that came out differently."""

    tick: int
    now_s: float
    then: tuple[str, ...]
    """What it said when the log was written."""
    again: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    ticks: int
    decisions: int
    logged_version: str
    """Of the code that wrote the log."""
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Every tick said the same again."""
        return self.difference is None


def replay(path: Path) -> Replayed:
    """Decide everything again, up to the first difference.

    Raises:
        BadRequest: the file is no decision log, or cannot be read.
    """
    try:
        reader = LogReader(path)
        return _replayed(reader)
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from error


def _replayed(reader: LogReader) -> Replayed:
    books, memory = Books(), Memory()
    ticks = decisions = 0
    difference: Difference | None = None
    for logged in reader.ticks():
        memory = logged.memory or memory
        facts = logged.with_books(books)
        plan = tick(facts, memory, reader.rules)
        ticks += 1
        decisions += len(logged.said)
        if digest_of(plan) != logged.digest:
            difference = Difference(
                tick=logged.number, now_s=facts.now_s, then=logged.said, again=tuple(said(plan))
            )
            break
        books, memory = plan.books, plan.memory
    return Replayed(
        ticks=ticks,
        decisions=decisions,
        logged_version=reader.header.policy_version,
        difference=difference,
    )
