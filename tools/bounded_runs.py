"""Programs and tests that run to their end within a deadline, with this tree's own code."""

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STOP_GRACE_S = 10.0
TAIL = 1500
PLUGINS = ("-p", "anyio.pytest_plugin", "-p", "_hypothesis_pytestplugin")
"""Named, because a machine's own packages bring plugins of their own."""


class CheckFailed(Exception):
    """What was expected is not so; the message says what to do."""


@dataclass(frozen=True)
class Case:
    """One test."""

    name: str
    outcome: str
    seconds: float
    detail: Any


def pytest(
    python: str, arguments: Sequence[str], left_s: float
) -> tuple[list[Case], subprocess.CompletedProcess[str] | None]:
    """Run tests; None in the place of the process when it was not done in time."""
    if left_s <= 0:
        return [], None
    with tempfile.TemporaryDirectory(prefix="pilotlight-") as folder:
        results = Path(folder) / "results.xml"
        # Warnings of a torch that is not the pinned one are shown, and fail nothing.
        command = [
            python,
            "-m",
            "pytest",
            *arguments,
            *PLUGINS,
            "-q",
            "-W",
            "default",
            f"--junitxml={results}",
            "-o",
            "junit_family=xunit1",
        ]
        try:
            done = finish(
                command, left_s, {**with_sources(os.environ), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            )
        except CheckFailed:
            return [], None
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr, flush=True)
        return (cases_of(results.read_text()) if results.is_file() else []), done


def cases_of(document: str) -> list[Case]:
    """The tests of a JUnit document; what a passed one recorded is its detail, why it did not pass
    is another's.
    """
    cases: list[Case] = []
    for case in ElementTree.fromstring(document).iter("testcase"):
        found = {child.tag: child for child in case}
        recorded: Any = {
            item.get("name", ""): item.get("value", "") for item in case.iter("property")
        }
        outcome = (
            "skipped"
            if "skipped" in found
            else "failed"
            if found.keys() & {"failure", "error"}
            else "passed"
        )
        reason = next(
            (
                found[tag].get("message") or ""
                for tag in ("failure", "error", "skipped")
                if tag in found
            ),
            "",
        )
        name = case.get("name", "?")
        cases.append(
            Case(
                name,
                outcome,
                float(case.get("time") or 0),
                recorded if outcome == "passed" else reason[:TAIL],
            )
        )
    return cases


def with_sources(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment in which this tree's own code goes before what is installed."""
    sources = [
        str(path)
        for path in sorted(ROOT.glob("*/*/src"))
        if path.parent.parent.name in ("libs", "services")
    ]
    return {**variables, "PYTHONPATH": os.pathsep.join(sources)} if sources else dict(variables)


def finish(
    command: Sequence[str], left_s: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end, in a session of its own.

    Raises:
        CheckFailed: it was not done in time; it was told to end, and then killed with all that it
            had started.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        output, errors = "", ""
        for number, wait_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
            try:
                os.killpg(process.pid, number)
                output, errors = process.communicate(timeout=wait_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        said = (errors.strip() or output.strip())[-TAIL:]
        raise CheckFailed(
            f"{Path(command[0]).name} was not done after {left_s:.0f} s: {said}"
        ) from None
    return subprocess.CompletedProcess(list(command), process.returncode, output, errors)


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what it said."""
    return f"status {done.returncode}: {(done.stderr.strip() or done.stdout.strip())[-TAIL:]}"
