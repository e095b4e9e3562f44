"""Each test runs by one target of the Makefile, and continuous integration runs what asks for
nothing special.
"""

import re
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ("compose", "ceph", "gpu", "bundle", "chaos", "hostile", "browser", "clients")
"""Markers of what needs more than a checkout, or takes hours."""


def selections(target: str) -> list[str]:
    """Marker expressions of a target's calls of pytest."""
    lines = re.search(
        rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
    )
    assert lines is not None
    return [quoted or word for quoted, word in re.findall(r' -m (?:"([^"]+)"|(\w+))', lines[1])]


def selects(expression: str, markers: set[str]) -> bool:
    """As pytest reads it: words with ``and``, ``or`` and ``not``."""
    words = re.sub(r"\b(?!and\b|or\b|not\b)\w+", lambda word: str(word[0] in markers), expression)
    # Nothing else is evaluated.
    assert set(words.split()) <= {"True", "False", "and", "or", "not"}
    return eval(words)


@pytest.mark.parametrize(
    "special", [(), *((marker,) for marker in SPECIAL), *combinations(SPECIAL, 2)]
)
@pytest.mark.parametrize("whole", [(), ("e2e",), ("e2e", "smoke")])
def test_a_test_is_run_once_by_what_continuous_integration_runs(
    special: tuple[str, ...], whole: tuple[str, ...]
) -> None:
    """Unless it is special and has no part in the end-to-end tests."""
    found = [
        one
        for target in ("test", "test-e2e")
        for one in selections(target)
        if selects(one, {*special, *whole, "slow"})
    ]
    assert len(found) == (1 if whole or not special else 0)


def test_tests_on_whole_systems_lie_where_they_are_looked_for() -> None:
    """Both targets look there alone, unless they are told where: `SYSTEMS` in the Makefile."""
    marked = re.compile(r"\bmark\.(e2e|smoke)\b")
    modules = [
        path
        for folder in ("libs", "services", "tools")
        for path in (ROOT / folder).rglob("test_*.py")
    ]
    assert modules
    assert [path for path in modules if marked.search(path.read_text())] == []
    assert any(marked.search(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))


def test_continuous_integration_runs_them_in_order() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in commands if line.startswith("make ")] == [
        "make check",
        "make test",
        "make test-e2e",
    ]


@pytest.mark.parametrize("marker", SPECIAL)
def test_what_is_special_has_a_target_of_its_own(marker: str) -> None:
    described = next(
        line
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if f'    "{marker}: ' in line
    )
    target = re.search(r"`make ([\w-]+)`", described)
    assert target is not None
    assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
