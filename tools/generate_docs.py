"""Writes the pages that are made from code: ``docs/settings.md`` and ``docs/states.md``.

``--check`` only compares.

Settings come from the descriptions of their fields, states from the tables of moves.
"""

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic_core import PydanticUndefined

from pilotlight.common.settings import PilotlightSettings
from pilotlight.engine.core import lifecycle as engine_request
from pilotlight.policy import builds, instance
from pilotlight.policy.instance import ENDED, SERVING, STARTING
from pilotlight.policy.plan import InstanceState
from pilotlight.worker import lifecycle

ROOT = Path(__file__).resolve().parents[1]
SHARED = (
    "pilotlight.common.settings",
    "pilotlight.common.model_roots",
    "pilotlight.common.natsconf",
    "pilotlight.common.db.migrate",
    "pilotlight.common.db.retention",
)
SERVICES = ("gateway", "scheduler", "cache", "loader", "worker", "materializer")
COMMAND_LINE = {
    "PILOTLIGHT_HOME": ("`.pilotlight`", "Folder of all state of the embedded system."),
    "PILOTLIGHT_URL": (
        "",
        "Address of the system that commands speak to; without it, the one that runs on the state folder.",
    ),
    "PILOTLIGHT_ADMIN_KEY": ("", "Admin key for that address."),
    "PILOTLIGHT_API_KEY": ("", "Inference key for that address: chats and load tests use it."),
}
SETTINGS_HEAD = """# Settings

<!-- made by tools/generate_docs.py; do not edit -->

Environment variables. Each process checks its own when it starts and ends with a message when one is wrong.
Embedded mode (`pilotlight up`) sets them for its services; what is set outside is passed on.
"""
STATES_HEAD = """# States

<!-- made by tools/generate_docs.py; do not edit -->

State machines, drawn from the tables in the code. A move that is not in a table is an error.
"""


def settings_page() -> str:
    """Every setting, under the class that declares it, with the services that read it."""
    readers: dict[type[PilotlightSettings], set[str]] = {}
    for module_name in SHARED:
        for settings in declared_in(module_name):
            readers.setdefault(settings, set())
    for service in SERVICES:
        for settings in declared_in(f"pilotlight.{service}.settings"):
            for base in settings.__mro__:
                if inspect.isclass(base) and issubclass(base, PilotlightSettings):
                    readers.setdefault(base, set()).add(service)
    sections = [
        section(settings, names) for settings, names in readers.items() if own_fields(settings)
    ]
    rows = [
        f"| `{name}` | {default} | {meaning} |" for name, (default, meaning) in COMMAND_LINE.items()
    ]
    sections.append(
        "\n".join(
            [
                "## Command line\n",
                "Read by the `pilotlight` command itself.\n",
                *table_head(),
                *rows,
                "",
            ]
        )
    )
    return "\n".join([SETTINGS_HEAD, *sections])


def declared_in(module_name: str) -> list[type[PilotlightSettings]]:
    """The settings classes that a module defines."""
    if importlib.util.find_spec(module_name) is None:
        return []
    module = importlib.import_module(module_name)
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module_name
    ]
    return [value for value in classes if issubclass(value, PilotlightSettings)]


def own_fields(settings: type[PilotlightSettings]) -> list[str]:
    """The fields that a class adds to those of its bases."""
    return [name for name in settings.model_fields if name in settings.__annotations__]


def section(settings: type[PilotlightSettings], services: set[str]) -> str:
    """One class's fields as a table."""
    title = re.sub(
        r"(?<=[a-z])(?=[A-Z])", " ", settings.__name__.removesuffix("Settings")
    ).capitalize()
    read_by = ", ".join(service for service in SERVICES if service in services)
    lines = [
        f"## {title}\n",
        (inspect.getdoc(settings) or "").replace("``", "`")
        + (f" Read by: {read_by}." if read_by else "")
        + "\n",
        *table_head(),
    ]
    for name in own_fields(settings):
        field = settings.model_fields[name]
        if not field.description:
            raise ValueError(f"{settings.__name__}.{name} has no description")
        lines.append(
            f"| `PILOTLIGHT_{name.upper()}` | {shown(field.get_default())} | {field.description} |"
        )
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


@dataclass(frozen=True)
class Machine:
    """A state machine that is written down as a table of moves."""

    title: str
    about: str
    transitions: Mapping[tuple[StrEnum | None, StrEnum], StrEnum | None]
    events: type[StrEnum]


MACHINES = (
    Machine(
        "Instance",
        "A complete copy of a model that serves, or is on its way to; moved by the scheduler. Its table: `pilotlight.policy.instance`.",
        instance.TRANSITIONS,
        instance.InstanceEvent,
    ),
    Machine(
        "Held stage",
        "A stage on its worker; moved by the worker. The table is in `pilotlight.worker.lifecycle`; `[*]` is a stage that is not held.",
        lifecycle.TRANSITIONS,
        lifecycle.HeldEvent,
    ),
    Machine(
        "Build of an artifact",
        "Of one fingerprint; moved by the materializer. The table is in `pilotlight.policy.builds`; `[*]` is a fingerprint without a row.",
        builds.TRANSITIONS,
        builds.BuildEvent,
    ),
    Machine(
        "Request on an engine",
        "From submit to its last token; moved by the engine's scheduler. The table is in `pilotlight.engine.core.lifecycle`.",
        engine_request.TRANSITIONS,
        engine_request.RequestEvent,
    ),
)


def states_page() -> str:
    """Every state machine, as a diagram and as a table."""
    return "\n".join(
        [STATES_HEAD, *(machine_section(machine) for machine in MACHINES), groups_section()]
    )


def machine_section(machine: Machine) -> str:
    """One state machine."""
    moves = [
        (shown_state(source), event, shown_state(target))
        for (source, event), target in machine.transitions.items()
    ]
    sources, targets = [source for source, _, _ in moves], [target for _, _, target in moves]
    diagram = [
        f"    [*] --> {state}"
        for state in dict.fromkeys(sources)
        if state != "[*]" and state not in targets
    ]
    diagram += [f"    {source} --> {target}: {event.value}" for source, event, target in moves]
    diagram += [
        f"    {state} --> [*]"
        for state in dict.fromkeys(targets)
        if state != "[*]" and state not in sources
    ]
    lines = [
        f"## {machine.title}",
        "",
        machine.about,
        "",
        "```mermaid",
        "stateDiagram-v2",
        *diagram,
        "```",
        "",
    ]
    lines += ["| from | event | to |", "|---|---|---|"]
    lines += [f"| {source} | `{event.value}` | {target} |" for source, event, target in moves]
    lines += ["", "| event | when |", "|---|---|"]
    lines += [
        f"| `{event.value}` | {meaning} |"
        for event, meaning in event_meanings(machine.events).items()
    ]
    return "\n".join([*lines, ""])


def groups_section() -> str:
    """The sets of instance states that code asks about."""
    groups = {
        "on its way to its first token": STARTING,
        "takes new requests": SERVING,
        "holds nothing, and never will again": ENDED,
    }
    lines = ["## Groups of instance states", "", "| states | meaning |", "|---|---|"]
    for meaning, states in groups.items():
        lines.append(
            f"| {', '.join(state.value for state in InstanceState if state in states)} | {meaning} |"
        )
    return "\n".join([*lines, ""])


def shown_state(state: StrEnum | None) -> str:
    """A state's name; outside of the machine there is none."""
    return state.value if state is not None else "[*]"


def event_meanings(events: type[StrEnum]) -> dict[StrEnum, str]:
    """Each event with the docstring below it; an event without one is told by its name."""
    source = inspect.getsource(events).splitlines()
    found: dict[StrEnum, str] = {}
    for event in events:
        line = next(
            index for index, text in enumerate(source) if text.strip().startswith(f"{event.name} =")
        )
        following = source[line + 1].strip() if line + 1 < len(source) else ""
        plain = event.value.replace("_", " ").capitalize() + "."
        found[event] = following.strip('"') if following.startswith('"""') else plain
    return found


def main() -> int:
    """Write the pages, or compare them; the process's exit status."""
    parser = argparse.ArgumentParser(description="Pages of docs/ that are made from code.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a page is not current"
    )
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
