"""Other commits of this project, checked out beside it, for tests that mix releases."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS_RELEASE = ROOT / "tests" / "upgrade" / "previous_release"
"""Holds the commit of the release before this one; `tests/upgrade/README.md` says when it moves on.
"""
GIT_DEADLINE_S = 60.0
PACKAGES = (
    "policy",
    "checkpoint",
    "common",
    "text",
    "dataplane",
    "gateway",
    "scheduler",
    "cache",
    "loader",
    "worker",
    "materializer",
)
_WHERE = "import importlib, json; print(json.dumps([importlib.import_module('pilotlight.' + name).__file__ for name in {names!r}]))"


@dataclass(frozen=True)
class Code:
    """One release's code, run with this one's environment."""

    name: str
    root: Path | None = None
    """Where it is checked out; None for the code that is tested."""

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to run it: PYTHONPATH goes before what is installed."""
        if self.root is None:
            return {}
        folders = sorted((*self.root.glob("libs/*/src"), *self.root.glob("services/*/src")))
        return {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)}


THIS = Code("this")


def previous_release() -> str:
    """The commit that the project names as its last release."""
    return PREVIOUS_RELEASE.read_text().strip()


def previous_commit() -> str:
    """The commit before what is tested: HEAD while there are changes that are not committed, else
    the one before it.
    """
    _need(
        ROOT / ".git",
        "the tests run on an archive of the project, which has no history; use a clone",
    )
    changed = _git("status", "--porcelain", "--untracked-files=no").strip()
    return _git("rev-parse", "HEAD" if changed else "HEAD~1").strip()


def checkout(commit: str, folder: Path) -> Code:
    """Write a commit's code into a folder; skips the test where the clone does not have it."""
    _need(
        ROOT / ".git",
        "the tests run on an archive of the project, which has no history; use a clone",
    )
    folder.mkdir(parents=True)
    archive = folder.parent / f"{folder.name}.tar"
    _git("archive", f"--output={archive}", commit, "libs", "services")
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True, timeout=GIT_DEADLINE_S)
    archive.unlink()
    code = Code(commit[:12], folder)
    found = _imported(code)
    assert all(Path(file).is_relative_to(folder) for file in found), (
        f"not the code of {commit}: {found}"
    )
    return code


def _imported(code: Code) -> list[str]:
    """Where a process that runs this code imports it from."""
    command = [sys.executable, "-c", _WHERE.format(names=PACKAGES)]
    environment = {**os.environ, **code.environment}
    result = subprocess.run(
        command,
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=GIT_DEADLINE_S,
        check=True,
    )
    return json.loads(result.stdout)


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_DEADLINE_S,
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no git to get an earlier commit with")
    except subprocess.CalledProcessError as error:
        pytest.skip(
            f"this clone does not have the commit: `git fetch --unshallow` gets it ({error.stderr.strip()})"
        )
    return result.stdout


def _need(path: Path, why: str) -> None:
    if not path.exists():
        pytest.skip(why)
