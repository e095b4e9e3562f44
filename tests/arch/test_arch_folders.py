"""Rooms: within a package no module or folder imports another both ways, not even by way of others;
and no file is too long.

A folder's *entries* are its modules and its folders. The graph that is looked at has one node for
each entry and an arrow for each import from within one entry into another, wherever it stands in
its file. Every folder of every package has such a graph.
"""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from parsed_sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    folder for folder in ROOT.glob("*/*/src/pilotlight/*") if (folder / "__init__.py").is_file()
)
MAX_LINES = 400
CODE = frozenset({".py", ".sh", ".js", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h"})

CIRCLES: dict[tuple[str, tuple[str, ...]], str] = {}
"""Circles that are there, by folder and entries, and why. One that is gone leaves this list."""
PUBLISHED = "libs/native/src/pilotlight/native/blake3/"
"""Another project's files, unchanged."""
LONG_FILES = ("tools/local_images.sh",)
"""Our files over ``MAX_LINES``. The list only shrinks: a file that is short enough leaves it, and
none joins it."""


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """One import statement's arrow, by full module names."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.imported}"


Graph = Mapping[str, Mapping[str, list[Import]]]
"""Entry → entries that it imports → the imports that do so."""


def modules_of(package: Path) -> dict[str, Path]:
    """Files of a package by module name; a folder's ``__init__.py`` has the folder's name."""
    found: dict[str, Path] = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(package: Path) -> Iterator[Import]:
    """Every import of one of the package's modules by another."""
    modules = modules_of(package)
    for importer, file in modules.items():
        for node in ast.walk(tree_of(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = _base(node, importer, is_folder=file.name == "__init__.py")
                wanted = [
                    f"{base}.{name.name}" if f"{base}.{name.name}" in modules else base
                    for name in node.names
                ]
            elif isinstance(node, ast.Import):
                wanted = [name.name for name in node.names]
            else:
                continue
            for imported in wanted:
                if imported in modules and imported != importer:
                    yield Import(importer, imported, node.lineno)


def _base(node: ast.ImportFrom, importer: str, *, is_folder: bool) -> str:
    """The module after ``from``, in full."""
    if not node.level:
        return node.module or ""
    parts = importer.split(".")
    up = node.level - is_folder
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def graphs_of(package: Path) -> dict[str, Graph]:
    """The graph of each folder of a package, by the folder's full name."""
    graphs: dict[str, dict[str, dict[str, list[Import]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for one in imports_of(package):
        importer, imported = one.importer.split("."), one.imported.split(".")
        shared = 0
        while shared < min(len(importer), len(imported)) and importer[shared] == imported[shared]:
            shared += 1
        # An `__init__` is an entry of its own folder: it is what has the folder's name.
        folder = ".".join(importer[:shared])
        left = importer[shared] if shared < len(importer) else "__init__"
        right = imported[shared] if shared < len(imported) else "__init__"
        graphs[folder][left][right].append(one)
    return {folder: dict(graph) for folder, graph in graphs.items()}


def circles_of(graph: Graph) -> list[tuple[str, ...]]:
    """The largest sets of entries that all reach each other; each is sorted."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            fresh = [entry for entry in graph.get(ahead.pop(), {}) if entry not in found]
            found.update(fresh)
            ahead += fresh
        return found

    reaches = {entry: reached(entry) for entry in graph}
    circles = {
        tuple(sorted(other for other in reaches[entry] if entry in reaches.get(other, ())))
        for entry in graph
        if entry in reaches[entry]
    }
    return sorted(circles)


def told(folder: str, graph: Graph, circle: tuple[str, ...]) -> str:
    """A circle, and the imports that make it."""
    arrows = sorted(
        {
            one
            for left in circle
            for right in circle
            if left != right
            for one in graph[left].get(right, ())
        }
    )
    return "\n  ".join(
        [
            f"in {folder}, these import each other in a circle: {', '.join(circle)}",
            *map(str, arrows),
        ]
    )


def circles_in(package: Path) -> dict[tuple[str, tuple[str, ...]], str]:
    """Every circle of a package, by folder and entries, with what makes it."""
    return {
        (folder, circle): told(folder, graph, circle)
        for folder, graph in graphs_of(package).items()
        for circle in circles_of(graph)
    }


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_folder_imports_another_both_ways(package: Path) -> None:
    found = circles_in(package)
    fresh = [text for circle, text in found.items() if circle not in CIRCLES]
    assert not fresh, "\n".join(fresh)
    name = f"pilotlight.{package.name}"
    gone = [
        circle
        for circle in CIRCLES
        if circle[0].split(".")[:2] == name.split(".") and circle not in found
    ]
    assert not gone, f"these circles are gone; take them off the list: {gone}"


def test_all_packages_are_looked_at() -> None:
    assert {package.name for package in PACKAGES} >= {
        "policy",
        "common",
        "engine",
        "cli",
        "gateway",
        "scheduler",
        "worker",
    }
    assert {folder for folder, _ in CIRCLES} <= {
        f"pilotlight.{package.name}" for package in PACKAGES
    }


def test_a_circle_is_found_and_named(tmp_path: Path) -> None:
    """Folders in a circle of three, by way of nested folders, relative imports and imports within
    functions.
    """
    package = tmp_path / "pilotlight" / "house"
    files = {
        "__init__.py": "",
        "hall.py": "from pilotlight.house.kitchen.stove import heat\n",
        "kitchen/__init__.py": "",
        "kitchen/stove.py": "def heat():\n    from pilotlight.house import cellar\n    return cellar\n",
        "kitchen/pot.py": "from .stove import heat\n",
        "cellar/__init__.py": "from . import wine\n",
        "cellar/wine.py": "import pilotlight.house.attic.box\n",
        "attic/__init__.py": "",
        "attic/box.py": "from ..kitchen import pot\n",
        "attic/lid.py": "from pilotlight.house.attic import box\n",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    ((where, text),) = circles_in(package).items()
    assert where == ("pilotlight.house", ("attic", "cellar", "kitchen"))
    assert text.splitlines()[1:] == [
        "  pilotlight.house.attic.box, line 1: imports pilotlight.house.kitchen.pot",
        "  pilotlight.house.cellar.wine, line 1: imports pilotlight.house.attic.box",
        "  pilotlight.house.kitchen.stove, line 2: imports pilotlight.house.cellar",
    ]
    (package / "attic/box.py").write_text("")
    assert circles_in(package) == {}
    (package / "attic/box.py").write_text("from pilotlight.house.attic import lid\n")
    assert set(circles_in(package)) == {("pilotlight.house.attic", ("box", "lid"))}


def test_errors_have_one_import_place() -> None:
    """``pilotlight.common.errors`` offers them all; which of its modules defines one is no business
    of others.
    """
    for package in PACKAGES:
        for name, file in modules_of(package).items():
            if not name.startswith("pilotlight.common.errors"):
                assert "pilotlight.common.errors." not in file.read_text(), (
                    f"{name} imports from within the errors' package"
                )


def test_no_file_is_too_long() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    files = [
        name
        for name in listed.decode().split("\0")
        if Path(name).suffix in CODE and (ROOT / name).is_file() and not name.startswith(PUBLISHED)
    ]
    long = {
        name: lines
        for name in files
        if (lines := len((ROOT / name).read_text().splitlines())) > MAX_LINES
    }
    fresh = {name: lines for name, lines in long.items() if name not in LONG_FILES}
    assert not fresh, f"these have more than {MAX_LINES} lines: {fresh}"
    assert not set(LONG_FILES) - long.keys(), (
        "these are short enough now, or gone; take them off the list"
    )
