"""Lets a release that was installed without torch use the machine's own.

It is copied into archives with ``install.py``, and needs the standard library alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE_DEADLINE_S = 60.0
IMPORT_DEADLINE_S = 300.0
TORCH_PATHS = "pilotlight-torch.pth"
PROBE = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "found": found, "folders": folders}))
"""


class InstallError(Exception):
    """Nothing was switched over; the message says what to do."""


@dataclass(frozen=True)
class Lender:
    """A Python whose torch the engine uses."""

    python: str
    versions: dict[str, str]
    folders: tuple[str, ...]


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(word) for word in found[0].split(".")) if found else ()


def borrow_torch(manifest: dict[str, Any], release: Path, torch_from: str | None) -> None:
    """Let the release's Python find the machine's torch, after all that it has itself; or say what
    to do where there is none.
    """
    site = next(release.glob("lib/python*/site-packages"))
    asked = [torch_from] if torch_from else candidates(manifest["python"])
    lender, looked_at = find_lender(asked, manifest["python"], manifest["machine"])
    (site / TORCH_PATHS).unlink(missing_ok=True)
    ranges = " and ".join(f"{name}{wanted}" for name, wanted in manifest["machine"].items())
    if lender is None:
        if torch_from:
            raise InstallError(f"{torch_from} does not have {ranges}: {'; '.join(looked_at)}")
        print(
            f"\nNo {ranges} for Python {manifest['python']} here ({'; '.join(looked_at)}). Everything but the engine will work.\n"
            f"For workers of kind cpu or cuda, do one of these and run install.sh again:\n"
            f"  - install them for this Python: {sys.executable} -m pip install {' '.join(quoted(manifest['machine']))}\n"
            f"  - name a Python that has them: ./install.sh FOLDER --torch-from /path/to/python\n"
            f"  - use an archive that holds them: make bundle PYTHON={manifest['python']} WITH_TORCH=1\n",
            file=sys.stderr,
            flush=True,
        )
        return
    (site / TORCH_PATHS).write_text("".join(f"{folder}\n" for folder in lender.folders))
    found = ", ".join(f"{name} {version}" for name, version in lender.versions.items())
    print(f"Using {found} of {lender.python}.", flush=True)
    try:
        command = [str(release / "bin" / "python"), "-c", "import numpy, torch; torch.zeros(1)"]
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(
            f"the torch of {lender.python} was not imported within {IMPORT_DEADLINE_S:g} s"
        ) from error
    if told.returncode != 0:
        raise InstallError(
            f"the torch of {lender.python} does not work in {release}: {told.stderr.strip()[-800:]}"
        )


def quoted(machine: dict[str, str]) -> list[str]:
    """Requirements as typed in a shell."""
    return [f"'{name}{wanted}'" for name, wanted in machine.items()]


def candidates(python: str) -> list[str]:
    """Where a torch may be: the Python that runs this, an active environment, those on the path."""
    active = [
        str(Path(os.environ[name]) / "bin" / "python")
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX")
        if name in os.environ
    ]
    on_path = [found for name in (f"python{python}", "python3") if (found := shutil.which(name))]
    return list(dict.fromkeys([sys.executable, *active, *on_path]))


def find_lender(
    asked: Sequence[str], python: str, machine: dict[str, str]
) -> tuple[Lender | None, list[str]]:
    """The first Python that has all that the machine must bring, and what was found in each one
    looked at.
    """
    looked_at: list[str] = []
    for candidate in asked:
        try:
            told = subprocess.run(
                [candidate, "-c", PROBE, *machine],
                capture_output=True,
                text=True,
                timeout=PROBE_DEADLINE_S,
                check=False,
            )
            answer = json.loads(told.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            looked_at.append(f"{candidate} does not run")
            continue
        versions: dict[str, str] = answer["found"]
        if answer["python"] != python:
            looked_at.append(f"{candidate} is Python {answer['python']}")
        elif all(
            name in versions and in_range(versions[name], wanted)
            for name, wanted in machine.items()
        ):
            return Lender(candidate, versions, tuple(answer["folders"])), looked_at
        else:
            looked_at.append(
                f"{candidate} has "
                + ", ".join(f"{name} {versions.get(name, 'not')}" for name in machine)
            )
    return None, looked_at


def in_range(version: str, wanted: str) -> bool:
    """Does a version lie in a range like ``>=2.11,<2.16``?"""
    have = numbers(version)
    for clause in filter(None, wanted.split(",")):
        if clause.startswith(">="):
            fits = have >= numbers(clause[2:])
        elif clause.startswith("<"):
            fits = have < numbers(clause[1:])
        else:
            raise InstallError(
                f"manifest.json asks for {clause!r}, which install.py does not understand"
            )
        if not fits:
            return False
    return True
