"""Writes the pages that are made from code: ``docs/settings.md`` and ``docs/states.md``. ``--check`` only compares.

Settings come from the descriptions of their fields, states from the table of moves.
"""

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

from pydantic_core import PydanticUndefined

from pilotlight.common.settings import PilotlightSettings
from pilotlight.policy import instance
from pilotlight.policy.instance import ENDED, SERVING, STARTING, TRANSITIONS, InstanceEvent
from pilotlight.policy.types import InstanceState

ROOT = Path(__file__).resolve().parents[1]
SHARED = ("pilotlight.common.settings", "pilotlight.common.model_roots", "pilotlight.common.db.migrate")
SERVICES = ("gateway", "scheduler", "cache", "loader", "worker", "materializer")
COMMAND_LINE = {
    "PILOTLIGHT_HOME": ("`.pilotlight`", "Folder of all state of the embedded system."),
    "PILOTLIGHT_URL": ("", "Address of the system that commands speak to; without it, the one that runs on the state folder."),
    "PILOTLIGHT_ADMIN_KEY": ("", "Admin key for that address."),
}
SETTINGS_HEAD = """# Settings

<!-- made by tools/generate_docs.py; do not edit -->

Environment variables. Each process checks its own when it starts and ends with a message when one is wrong.
Embedded mode (`pilotlight up`) sets them for its services; what is set outside is passed on.
"""
STATES_HEAD = """# States

<!-- made by tools/generate_docs.py; do not edit -->

The lifecycle of an instance, drawn from the table in `pilotlight.policy.instance`. A move that is not in it is an error.
"""


def settings_page() -> str:
    """Every setting, under the class that declares it, with who reads it."""
    readers: dict[type[PilotlightSettings], set[str]] = {}
    for module_name in SHARED:
        for settings in declared_in(module_name):
            readers.setdefault(settings, set())
    for service in SERVICES:
        for settings in declared_in(f"pilotlight.{service}.settings"):
            for base in settings.__mro__:
                if inspect.isclass(base) and issubclass(base, PilotlightSettings):
                    readers.setdefault(base, set()).add(service)
    sections = [section(settings, names) for settings, names in readers.items() if own_fields(settings)]
    rows = [f"| `{name}` | {default} | {meaning} |" for name, (default, meaning) in COMMAND_LINE.items()]
    sections.append("\n".join(["## Command line\n", "Read by the `pilotlight` command itself.\n", *table_head(), *rows, ""]))
    return "\n".join([SETTINGS_HEAD, *sections])


def declared_in(module_name: str) -> list[type[PilotlightSettings]]:
    """The settings classes that a module defines."""
    if importlib.util.find_spec(module_name) is None:
        return []
    module = importlib.import_module(module_name)
    classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module_name]
    return [value for value in classes if issubclass(value, PilotlightSettings)]


def own_fields(settings: type[PilotlightSettings]) -> list[str]:
    """The fields that a class adds to those of its bases."""
    return [name for name in settings.model_fields if name in settings.__annotations__]


def section(settings: type[PilotlightSettings], services: set[str]) -> str:
    """One class's fields as a table."""
    title = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", settings.__name__.removesuffix("Settings")).capitalize()
    read_by = ", ".join(service for service in SERVICES if service in services)
    lines = [
        f"## {title}\n",
        (inspect.getdoc(settings) or "").replace("``", "`") + (f" Read by: {read_by}." if read_by else "") + "\n",
        *table_head(),
    ]
    for name in own_fields(settings):
        field = settings.model_fields[name]
        if not field.description:
            raise ValueError(f"{settings.__name__}.{name} has no description")
        lines.append(f"| `PILOTLIGHT_{name.upper()}` | {shown(field.get_default())} | {field.description} |")
    return "\n".join([*lines, ""])


def table_head() -> list[str]:
    """The first two lines of every table."""
    return ["| variable | default | meaning |", "|---|---|---|"]


def shown(default: object) -> str:
    """A default as it would be typed; a path of this checkout relative to it."""
    if isinstance(default, Path) and default.is_relative_to(ROOT):
        return f"`{default.relative_to(ROOT)}/` of the checkout"
    if default is None or default == "" or default == () or default is PydanticUndefined:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def states_page() -> str:
    """The moves of an instance, as a diagram and as a table."""
    moves = [(source, event, target) for (source, event), target in TRANSITIONS.items()]
    diagram = [f"    [*] --> {InstanceState.PLANNED.value}"]
    diagram += [f"    {source.value} --> {target.value}: {event.value}" for source, event, target in moves]
    diagram += [f"    {state.value} --> [*]" for state in InstanceState if state in ENDED]
    groups = {
        "on its way to its first token": STARTING,
        "takes new requests": SERVING,
        "holds nothing, and never will again": ENDED,
    }
    lines = [STATES_HEAD, "```mermaid", "stateDiagram-v2", *diagram, "```", "", "| from | event | to |", "|---|---|---|"]
    lines += [f"| {source.value} | `{event.value}` | {target.value} |" for source, event, target in moves]
    lines += ["", "## Events", "", "| event | when |", "|---|---|"]
    lines += [f"| `{event.value}` | {meaning} |" for event, meaning in event_meanings().items()]
    lines += ["", "## Groups", "", "| states | meaning |", "|---|---|"]
    for meaning, states in groups.items():
        lines.append(f"| {', '.join(state.value for state in InstanceState if state in states)} | {meaning} |")
    return "\n".join([*lines, ""])


def event_meanings() -> dict[InstanceEvent, str]:
    """Each event with the docstring below it; an event without one is told by its name."""
    source = inspect.getsource(instance.InstanceEvent).splitlines()
    found: dict[InstanceEvent, str] = {}
    for event in InstanceEvent:
        line = next(index for index, text in enumerate(source) if text.strip().startswith(f"{event.name} ="))
        following = source[line + 1].strip() if line + 1 < len(source) else ""
        plain = event.value.replace("_", " ").capitalize() + "."
        found[event] = following.strip('"') if following.startswith('"""') else plain
    return found


def main() -> int:
    """Write the pages, or compare them; the process's exit status."""
    parser = argparse.ArgumentParser(description="Pages of docs/ that are made from code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is not current")
    check = parser.parse_args().check
    stale: list[str] = []
    for name, text in (("settings.md", settings_page()), ("states.md", states_page())):
        path = ROOT / "docs" / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if check and stale:
        print(f"not current: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
