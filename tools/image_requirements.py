"""What an image holds: ``image_requirements.py packages SERVICE`` prints what comes from the index,
``members`` what comes from here.

An image is given what its service needs and nothing else: only ``node`` has torch. Runs with the
standard library alone.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_IMAGE = {
    "setup": ("pilotlight-common",),
    "gateway": ("pilotlight-gateway",),
    "scheduler": ("pilotlight-scheduler",),
    "cache": ("pilotlight-cache",),
    "materializer": ("pilotlight-materializer",),
    "node": ("pilotlight-loader", "pilotlight-worker[native]"),
}
"""By SERVICE, the members that its image is made for."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[([A-Za-z0-9,._-]+)\])?")


def split(requirement: str) -> tuple[str, tuple[str, ...]]:
    """Name and extras of a requirement.

    Raises:
        ValueError: it has neither.
    """
    found = _REQUIREMENT.match(requirement)
    if found is None:
        raise ValueError(f"{requirement!r} is no requirement")
    return found[1], tuple(found[2].split(",")) if found[2] else ()


def projects() -> dict[str, tuple[Path, dict[str, object]]]:
    """Every member's folder and ``project`` table, by name."""
    found: dict[str, tuple[Path, dict[str, object]]] = {}
    for path in sorted(ROOT.glob("*/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        found[project["name"]] = (path.parent, project)
    return found


def needs(service: str) -> tuple[list[Path], list[str]]:
    """The members' folders and the other packages of one image, without duplicates.

    Raises:
        KeyError: there is no such service.
    """
    known = projects()
    members: dict[str, Path] = {}
    packages: set[str] = set()
    waiting = list(OF_IMAGE[service])
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if requirement in seen:
            continue
        seen.add(requirement)
        name, extras = split(requirement)
        if name not in known:
            packages.add(requirement)
            continue
        folder, project = known[name]
        members[name] = folder
        waiting += list_of(project, "dependencies")
        optional = project.get("optional-dependencies", {})
        assert isinstance(optional, dict)
        for extra in extras:
            waiting += list_of(optional, extra)
    return sorted(members.values()), sorted(packages)


def list_of(table: dict[str, object], key: str) -> list[str]:
    """A list of strings in a table."""
    found = table[key]
    assert isinstance(found, list)
    return [str(item) for item in found]


def main() -> int:
    """Print one kind, a line each; the process's exit status."""
    parser = argparse.ArgumentParser(description="What an image holds.")
    parser.add_argument("kind", choices=["packages", "members"])
    parser.add_argument("service")
    asked = parser.parse_args()
    if asked.service not in OF_IMAGE:
        print(
            f"SERVICE={asked.service!r} is not one of {', '.join(OF_IMAGE)}: --build-arg SERVICE=...",
            file=sys.stderr,
        )
        return 2
    members, packages = needs(asked.service)
    lines = (
        packages
        if asked.kind == "packages"
        else [f"./{member.relative_to(ROOT)}" for member in members]
    )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
