"""The map of the code (``docs/architecture.md``) and the glossary: each file and name in them
exists.

Each room is on the map, and its picture is what is imported.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from parsed_sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = {
    path.name: path
    for path in ROOT.glob("*/*/src/pilotlight/*")
    if (path / "__init__.py").is_file()
}
GLOSSARY = (ROOT / "docs/glossary.md").read_text()


def references_in(page: str) -> set[str]:
    """Code spans that are a path, or a path and a name."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return set(re.findall(r"`(\w[\w.-]*/[\w./-]*(?:::[\w.]+)?)`", prose))


REFERENCES = references_in(PAGE)


def file_of(path: str) -> Path:
    """The file or folder that the page means: in a package of that name, else from the root of the
    repository.
    """
    package, _, rest = path.partition("/")
    return PACKAGES[package] / rest if package in PACKAGES else ROOT / path


@cache
def names_in(file: Path) -> frozenset[str]:
    """Names that a module defines, and ``Class.member`` for each class."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], before: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(before + name)
                case ast.ClassDef(name=name, body=members):
                    found.add(before + name)
                    collect(members, f"{before}{name}.")
                case ast.Assign(targets=targets):
                    found.update(
                        before + target.id for target in targets if isinstance(target, ast.Name)
                    )
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(before + name)
                case _:
                    pass

    collect(tree_of(file.read_text()).body, "")
    return frozenset(found)


def imports() -> dict[str, set[str]]:
    """Packages, and the packages that each imports."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            lines = file.read_text()
            found[package] |= set(
                re.findall(r"^\s*(?:from|import) pilotlight\.(\w+)", lines, re.MULTILINE)
            )
        found[package].discard(package)
    return found


def reached(arrows: dict[str, set[str]], start: str) -> set[str]:
    """Everything below a package."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        following = arrows.get(ahead.pop(), set()) - found
        found |= following
        ahead += following
    return found


@pytest.mark.parametrize("reference", sorted(REFERENCES | references_in(GLOSSARY)))
def test_what_the_pages_name_exists(reference: str) -> None:
    path, _, name = reference.partition("::")
    file = file_of(path)
    assert file.is_dir() if path.endswith("/") else file.exists(), f"there is no {path}"
    if name:
        assert name in names_in(file), f"{path} has no {name}"


def test_the_page_names_files_and_names() -> None:
    """The pattern that finds references still finds them."""
    assert len([one for one in REFERENCES if "::" in one]) > 100
    assert {
        "policy/",
        "gateway/app.py::build_http",
        "tests/arch/test_arch_architecture.py",
    } <= REFERENCES
    assert len(references_in(GLOSSARY)) > 40


def test_tests_that_a_page_names_exist() -> None:
    """Decisions say which tests enforce them: a test that was renamed is followed there."""
    named = {
        name: page.name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"\btest_\w+\.py\b", page.read_text())
    }
    there = {
        file.name
        for folder in ("libs", "services", "tests", "tools")
        for file in (ROOT / folder).rglob("test_*.py")
    }
    assert len(named) > 40
    assert {name: page for name, page in named.items() if name not in there} == {}


def test_each_room_is_on_the_map() -> None:
    rooms = {f"{name}/" for name in PACKAGES}
    for name, folder in PACKAGES.items():
        rooms |= {
            f"{name}/{file.parent.relative_to(folder)}/" for file in folder.rglob("*/__init__.py")
        }
    assert rooms <= REFERENCES


def test_the_picture_of_rooms_is_what_is_imported() -> None:
    """Each arrow is an import, and each import is an arrow or follows from some."""
    drawn: defaultdict[str, set[str]] = defaultdict(set)
    for source, target in re.findall(r"^    (\w+) --> (\w+)$", PAGE, re.MULTILINE):
        drawn[source].add(target)
    real = imports()
    assert drawn.keys() | set().union(*drawn.values()) == PACKAGES.keys()
    assert all(targets <= real[source] for source, targets in drawn.items())
    assert all(targets <= reached(drawn, source) for source, targets in real.items())


def test_the_table_of_changes_has_the_usual_ones() -> None:
    table = PAGE[PAGE.index("\n## Where do I change") :]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)[2:]
    assert len(rows) >= 10
    assert all("`" in begins for _, begins in rows)
