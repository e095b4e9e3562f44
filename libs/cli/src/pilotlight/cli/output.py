"""How commands speak: tables and sentences for people, JSON with ``--json``."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from pilotlight.common.errors import PilotlightError

MAX_TABLE_CHARS = 1000
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def emit_json(value: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def say(value: Any, sentence: str, *, as_json: bool) -> None:
    """What a command did: JSON for programs, or a sentence for people.

    Args:
        value: The document.
        sentence: Printed as it stands: nothing in it is markup.
        as_json: Print the document.
    """
    emit_json(value) if as_json else console.print(sentence, markup=False, soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """A table, or a sentence when there is nothing to show.

    Nothing in it is cut or wrapped: names in it are there to be typed.
    """
    listed = list(rows)
    if not listed:
        console.print(empty)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in listed:
        table.add_row(*map(escape, row))
    print_whole(table)


def print_whole(content: RenderableType) -> None:
    """Print something as wide as it is: beyond the screen's width it is the terminal that wraps."""
    needed = Measurement.get(
        console, console.options.update(max_width=MAX_TABLE_CHARS), content
    ).maximum
    Console(highlight=False, width=needed).print(content, crop=False)


def show_error(error: PilotlightError, *, as_json: bool = False) -> int:
    """Say what is wrong and what to do; the exit status."""
    if as_json:
        emit_json(
            {"error": {"code": error.code, "message": error.message, "what_to_do": error.action}}
        )
    else:
        errors.print(f"[bold red]{error.code}[/]: {escape(error.message)}", soft_wrap=True)
        errors.print(f"  {error.action}", soft_wrap=True, markup=False)
    return 1
