"""Clients' own tests in environments of their own, against a whole system."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from embedded_system import RunningSystem

SUITES = Path(__file__).parent.parent / "clients" / "suites"
LIMIT_S = 600
ASYNC_INI = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"


def told(system: RunningSystem, **more: str) -> dict[str, str]:
    """The environment of a client: none of this project's packages in it."""
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {
        "PILOTLIGHT_URL": system.url,
        "PILOTLIGHT_API_KEY": system.key("api"),
        **more,
    }


def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a client's tests; all must pass."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def passed(report: Path) -> int:
    """How many tests of a report passed."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "skipped")}
    return counts["tests"] - counts["skipped"]
