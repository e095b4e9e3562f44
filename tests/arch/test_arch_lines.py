"""Lines of prose in code end at 100 columns, as the formatter's do.

Prose is what comments and docstrings say. Drawings and tables in them may be wider, and so may
strings: a message is easier to find when it stands in one piece (the linter bounds those).
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed_sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
MAX_COLUMNS = 100
PRAGMA = re.compile(r"#\s*(noqa|pyright:|type:|fmt:|ruff:|!)")
DRAWN = re.compile(r"\S {2,}\S|[─-▟<>^]{2,}|──|={8,}|→")
"""Columns, boxes and arrows: what makes a line a drawing or a row of a table."""


def files() -> list[Path]:
    """Every Python file of the repository."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines()]


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines that are of a comment or a docstring."""
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not PRAGMA.search(token.string):
            yield token.start[0], token.string
    for node in ast.walk(tree_of(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            last = node.value.end_lineno or node.value.lineno
            for number in range(node.value.lineno, last + 1):
                yield number, lines[number - 1].strip()


def too_long(source: str) -> list[int]:
    """Numbers of the lines of prose that end past the limit."""
    lines = source.split("\n")
    return [
        number
        for number, text in prose_of(source)
        if len(lines[number - 1]) > MAX_COLUMNS and not DRAWN.search(text)
    ]


def test_prose_ends_in_time() -> None:
    found = {
        str(path.relative_to(ROOT)): numbers
        for path in files()
        if (numbers := too_long(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        f'"""{"long " * 20}"""',
        f"# {'long ' * 20}",
        f"x = 1  # {'long ' * 20}",
        f'def f():\n    """Short.\n\n    {"long " * 20}\n    """',
    ],
)
def test_a_line_that_is_too_long_is_found(source: str) -> None:
    assert too_long(source)


@pytest.mark.parametrize(
    "source",
    [
        f'x = "{"long " * 20}"',
        f"# a    ──> {'b' * 100}",
        "x = 1  # pyright: ignore[" + "a" * 100 + "]",
    ],
)
def test_drawings_strings_and_pragmas_may_be_longer(source: str) -> None:
    assert not too_long(source)
