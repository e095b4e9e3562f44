"""A line of a log for people: when, who, what happened, and the rest.

Services write JSON, one object a line; what is none, such as a server's own words, is shown as it
is.
"""

import json
from collections.abc import Mapping
from typing import Any

from rich.text import Text

LEVELS = {"debug": "bright_black", "info": "green", "warning": "yellow", "error": "bold red"}
_TOLD_ELSEWHERE = frozenset(
    {"timestamp", "level", "service", "event", "action", "exception", "what_to_do"}
)
NAME_WIDTH = 12


def told(line: str, process: str = "") -> Text:
    """One line of the log of a process, which is named where there are several."""
    record = _record(line)
    named = f"{process:<{NAME_WIDTH}} " if process else ""
    if record is None:
        return Text(named, style="cyan").append(line, style="default")
    # Of 2026-11-23T00:42:10.227288Z the time, in milliseconds.
    moment = str(record.get("timestamp", ""))
    level = str(record.get("level", ""))
    text = Text(f"{moment[11:23]:<12} ", style="bright_black")
    text.append(f"{level:<7} ", style=LEVELS.get(level, "default"))
    text.append(named, style="cyan")
    text.append(str(record.get("event", "")), style="default")
    rest = {key: value for key, value in record.items() if key not in _TOLD_ELSEWHERE}
    for key, value in rest.items():
        text.append(f" {key}=", style="bright_black")
        text.append(_shown(value), style="default")
    if advice := record.get("what_to_do"):
        text.append(f"\n    {advice}", style="yellow")
    for stack_line in str(record.get("exception", "")).splitlines():
        text.append(f"\n    {stack_line}", style="bright_black")
    return text


def _record(line: str) -> Mapping[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if "event" in found or "action" in found else None


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
