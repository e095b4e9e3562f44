"""Small pieces of English grammar, and the `Fact` that every question-and-answer table yields."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DATA_DIR = Path(__file__).parent / "data"

_VOWEL_SOUNDS = ("a", "e", "i", "o", "u")
_CONSONANT_SOUNDING = ("unicorn", "uniform", "useful", "one", "european")
_SILENT_H = ("hour", "honest")


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer and the ways to ask for it.

    `direct` holds whole questions or commands ("What is the capital of France?"); `clauses` holds
    what may follow "Can you tell me" ("what the capital of France is").
    """

    group: str
    answer: str
    direct: tuple[str, ...]
    clauses: tuple[str, ...] = ()

    @property
    def forms(self) -> tuple[str, ...]:
        """Every form of the question, direct ones first."""
        return self.direct + self.clauses


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun phrase."""
    word = noun.lower()
    if word.startswith(_SILENT_H):
        return f"an {noun}"
    if word.startswith(_VOWEL_SOUNDS) and not word.startswith(_CONSONANT_SOUNDING):
        return f"an {noun}"
    return f"a {noun}"


def capitalise(text: str) -> str:
    """Make the first letter large and leave the rest alone."""
    return text[:1].upper() + text[1:]


def uncapitalise(question: str) -> str:
    """Make the first letter small where the first word is one that may be; names keep their
    capital.
    """
    first_word = question.split(" ", 1)[0].split("'", 1)[0].lower()
    return question[:1].lower() + question[1:] if first_word in _OPENERS else question


def join_words(words: list[str]) -> str:
    """Join words as English does: "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def rows(table: str) -> Iterator[list[str]]:
    """Read a table written one row per line, its cells parted by " | "."""
    for line in table.strip().splitlines():
        yield [cell.strip() for cell in line.split("|")]


def pairs(table: str) -> Iterator[tuple[str, str]]:
    """Read a list of "left:right" entries parted by commas or line ends."""
    for entry in table.replace("\n", ",").split(","):
        if entry.strip():
            left, right = entry.split(":")
            yield left.strip(), right.strip()


def words_of(table: str) -> list[str]:
    """Read a list of entries parted by commas or line ends."""
    return [entry.strip() for entry in table.replace("\n", ",").split(",") if entry.strip()]


def read_data(name: str) -> str:
    """Read one of the tables beside this module; long hand-written lines live there."""
    return (_DATA_DIR / f"{name}.txt").read_text(encoding="utf-8")


def from_rows(group: str, table: str) -> list[Fact]:
    """Read hand-written facts: the answer, then its questions; a cell without end punctuation is a
    clause.
    """
    facts: list[Fact] = []
    for answer, *forms in rows(table):
        direct = tuple(form for form in forms if form[-1] in "?.!")
        clauses = tuple(form for form in forms if form[-1] not in "?.!")
        facts.append(Fact(group, answer, direct, clauses))
    return facts


def stable_hash(text: str) -> int:
    """A hash that is the same in every process (Python's own is salted)."""
    return zlib.crc32(text.encode())


_OPENERS = frozenset(
    words_of(
        """
        what, which, who, where, when, why, how, is, are, do, does, can, in, on, at, after, before, from, name, list
        say, count, give, add, take, tell, describe, explain, define, subtract, multiply, please, with
        """
    )
)
