"""Grammars that hold a model to calls which its dialect's parser reads, of functions that there
are, with arguments of their schemas.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.policy.request import Grammar, GrammarKind
from pilotlight.text.tools.dialects import ToolDialect

_BLANKS = r"\x20"
"""Between the parts of a JSON text, at most once at each place, as models and templates write
calls. With more of them a model that has nothing to say would write blanks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function that may be called."""

    name: str
    """Letters, digits, ``_`` and ``-``."""
    parameters: dict[str, Any]
    """The JSON schema of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Which of a tokenizer's added tokens have a meaning here.

    Plain text in a grammar stands for none of them.
    """

    ids: dict[str, int]
    """Those that are a dialect's markers. A marker that is no token of its own is spelled."""
    others: tuple[int, ...] = ()
    """Those that may stand in free text (``<think>``): neither markers nor ends."""


def call_grammar(
    dialect: ToolDialect,
    functions: Sequence[Function],
    markers: Markers,
    *,
    forced: bool,
    several: bool,
) -> Grammar:
    """A grammar of answers with calls.

    Args:
        dialect: how calls are written.
        functions: those that may be called, at least one.
        markers: how the tokenizer writes the dialect's markers.
        forced: the answer is a call, and nothing else. Otherwise it is free text, in which a call
            that is begun must be right.
        several: there may be more than one call, where the dialect has that.
    """
    writer = _Writer(dialect, markers, several=several and dialect.several)
    rules = writer.forced() if forced else writer.free()
    rules.append("call: " + " | ".join(f"f{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        head = _quoted(f'{{"name": "{function.name}", "{dialect.arguments_key}": ')
        rules.append(f'f{number}: {head} a{number} "}}"')
        rules.append(f"a{number}: %json {_schema(function.parameters)}")
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules) + "\n")


class _Writer:
    """The rules around ``call``, which is one JSON object."""

    def __init__(self, dialect: ToolDialect, markers: Markers, *, several: bool) -> None:
        self._dialect = dialect
        self._ids = markers.ids
        self._others = f"<[{_ranges(markers.others)}]>" if markers.others else ""
        self._several = several

    def forced(self) -> list[str]:
        """Nothing but calls."""
        if self._dialect.unmarked:
            return ["start: call"]
        start = (
            'start: one ("\\n" one)*' if self._several and not self._dialect.array else "start: one"
        )
        return [start, f"one: {self._written(self._dialect.opening)} {self._rest()}"]

    def free(self) -> list[str]:
        """Text, until a call is begun."""
        if self._dialect.unmarked:
            return self._free_unmarked()
        again = self._several and not self._dialect.array
        if self._dialect.opening in self._ids:
            start = "start: free (one free)*" if again else "start: free one?"
            return [
                start,
                f"one: {self._written(self._dialect.opening)} {self._rest()}",
                *self._text(),
            ]
        # A marker that is spelled is looked for in all text; where it ends, a call follows.
        before = f"(TEXT? {self._others})* " if self._others else ""
        return [
            "start: one* free" if again else "start: free | one",
            f"one: {before}opening {self._rest()}",
            f"opening[lazy]: /(?s:.*){re.escape(self._dialect.opening)}/",
            *self._text(),
        ]

    def _free_unmarked(self) -> list[str]:
        opening = self._dialect.opening
        marked = f" | {self._written(opening)} call" if opening in self._ids else ""
        other = f" | {self._others} free" if self._others else ""
        return [
            f"start: (FIRST free{other})? | call{marked}",
            # What begins with a brace would be taken for a call.
            r"FIRST: /[ \t\r\n]*[^{ \t\r\n]/",
            *self._text(),
        ]

    def _text(self) -> list[str]:
        other = f" | {self._others}" if self._others else ""
        return [f"free: (TEXT{other})*", r"TEXT: /(.|\n)+/"]

    def _rest(self) -> str:
        """What follows an opening marker."""
        if self._dialect.array:
            more = ' (", " call)*' if self._several else ""
            return rf'/ ?\[/ call{more} "]"'
        return rf'"\n" call "\n" {self._written(self._dialect.closing)}'

    def _written(self, marker: str) -> str:
        return f"<[{self._ids[marker]}]>" if marker in self._ids else _quoted(marker)


def _ranges(token_ids: Iterable[int]) -> str:
    """Token ids as llguidance writes sets of them: ``3-5,9``."""
    runs: list[list[int]] = []
    for token_id in sorted(set(token_ids)):
        if runs and token_id == runs[-1][1] + 1:
            runs[-1][1] = token_id
        else:
            runs.append([token_id, token_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _schema(parameters: dict[str, Any]) -> str:
    return json.dumps(
        {**parameters, "type": "object", "x-guidance": {"whitespace_pattern": _BLANKS}}
    )


def _quoted(text: str) -> str:
    return json.dumps(text)
