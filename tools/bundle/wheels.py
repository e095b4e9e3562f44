"""Which packages an archive needs, and their wheels: versions from constraints.txt, files from
where pip's configuration says.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from image_requirements import list_of, projects, split

ROOT = Path(__file__).resolve().parents[2]
GLIBC = "2.31"
"""The oldest C library that a bundle runs on: nats-server's and PostgreSQL's wheels need it, and so
does torch."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(31, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
OF_THE_MACHINE = ("torch", "numpy")
"""What the engine needs and a machine for engines has; hundreds of megabytes of it."""
NOT_IN_BUNDLES = ("nixl",)
"""Extras of members that an archive does not hold: hundreds of megabytes that few machines have a
use for."""
NOT_FOR_RUNNING_TESTS = ("import-linter", "pyright", "ruff")
OF_A_NEWER_LIBC = ("libcachesim",)
"""For tests, too, and with no wheel for ``GLIBC``: the tests that need it stay behind."""
COMMAND_DEADLINE_S = 1800.0


class BundleError(Exception):
    """The bundle cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Pinned packages (``name==version``), each in one group."""

    runtime: tuple[str, ...]
    tests: tuple[str, ...]
    torch: tuple[str, ...]
    """Empty when the machine's own torch is to be used."""


def needed(uv: "Uv", *, with_torch: bool) -> Groups:
    """Resolve everything for the target, group by group."""
    direct = direct_requirements()
    own_torch = sorted(item for item in direct if split(item)[0] in OF_THE_MACHINE)
    others = sorted(direct - set(own_torch))
    development = [
        line
        for line in (ROOT / "requirements-dev.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for_tests = [
        item
        for item in development
        if split(item)[0] not in (*NOT_FOR_RUNNING_TESTS, *OF_A_NEWER_LIBC)
    ]
    runtime = uv.resolve([*others, "pip"])
    torch = uv.resolve([*others, "pip", *own_torch]) if with_torch else runtime
    tests = uv.resolve([*others, "pip", *for_tests, *(own_torch if with_torch else ())])
    return Groups(
        runtime=tuple(runtime),
        torch=tuple(item for item in torch if item not in runtime),
        tests=tuple(
            item
            for item in tests
            if item not in torch and (with_torch or split(item)[0] not in OF_THE_MACHINE)
        ),
    )


def direct_requirements() -> set[str]:
    """What the members ask for beside each other, extras included."""
    known = projects()
    asked: set[str] = set()
    for _, project in known.values():
        asked |= set(list_of(project, "dependencies"))
        extras = cast("dict[str, list[str]]", project.get("optional-dependencies", {}))
        asked.update(*(needed for extra, needed in extras.items() if extra not in NOT_IN_BUNDLES))
    return {item for item in asked if split(item)[0] not in known}


def version_range(name: str) -> str:
    """The versions of a package that the members take: ``>=1,<2``, or nothing when they take
    any.
    """
    for item in direct_requirements():
        if split(item)[0] == name:
            return re.sub(r"^[A-Za-z0-9._-]+(\[[^]]*\])?", "", item)
    raise BundleError(f"no member asks for {name}")


class Uv:
    """uv and pip of the environment that runs this, for a target Python on Linux x86-64."""

    def __init__(self, python: str, constraints: Path) -> None:
        self._python = python
        self._constraints = constraints
        self._environment = _with_pips_configuration(os.environ)

    def resolve(self, requirements: Sequence[str]) -> list[str]:
        """The requirements with all they need, pinned.

        Raises:
            BundleError: there is no solution, or no index can be reached.
        """
        command = [
            _uv(),
            "pip",
            "compile",
            "-",
            "--quiet",
            "--no-header",
            "--no-annotate",
            "-c",
            str(self._constraints),
        ]
        target = [
            "--python-version",
            self._python,
            "--python-platform",
            f"x86_64-manylinux_{GLIBC.replace('.', '_')}",
        ]
        text = self._run([*command, *target], "\n".join(requirements))
        return [
            line.strip() for line in text.splitlines() if "==" in line and not line.startswith("#")
        ]

    def download(self, pinned: Sequence[str], folder: Path) -> list[Path]:
        """Wheels of the pinned packages, all of them new in the folder; what comes as source alone
        is built.

        Raises:
            BundleError: one cannot be had for the target.
        """
        before = set(folder.iterdir())
        target = [f"--platform={platform}" for platform in PLATFORMS]
        flags = [
            "--no-deps",
            "--prefer-binary",
            "--implementation=cp",
            f"--python-version={self._python}",
        ]
        self._run([*_pip(), "download", "--quiet", *flags, *target, f"--dest={folder}", *pinned])
        arrived = sorted(set(folder.iterdir()) - before)
        for source in [path for path in arrived if path.suffix != ".whl"]:
            self._run(
                [*_pip(), "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(source)]
            )
            source.unlink()
        wheels = sorted(set(folder.iterdir()) - before)
        for wheel in wheels:
            check_fits(wheel, self._python)
        return wheels

    def build(self, members: Iterable[Path], folder: Path) -> list[Path]:
        """The members' own wheels."""
        before = set(folder.glob("*.whl"))
        for member in members:
            self._run(
                [
                    _uv(),
                    "build",
                    "--quiet",
                    "--wheel",
                    "--no-create-gitignore",
                    "--out-dir",
                    str(folder),
                    str(member),
                ]
            )
        return sorted(set(folder.glob("*.whl")) - before)

    def _run(self, command: Sequence[str], text: str = "") -> str:
        done = subprocess.run(
            command,
            input=text,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise BundleError(
                f"{' '.join(command[:4])} ... failed:\n{(done.stderr or done.stdout).strip()[-2000:]}"
            )
        return done.stdout


def check_fits(wheel: Path, python: str) -> None:
    """Is this wheel one for the target?

    Raises:
        BundleError: a source distribution was built for this machine instead.
    """
    *_, tag, abi, platform = wheel.stem.split("-")
    own = f"cp{python.replace('.', '')}"
    fits_python = any(word in (own, "py3") for word in tag.split(".")) or "abi3" in abi
    if not fits_python or not (
        platform == "any" or any(word in PLATFORMS for word in platform.split("."))
    ):
        raise BundleError(
            f"{wheel.name} does not fit Python {python} on Linux x86-64 with glibc {GLIBC}: pin a version that has a wheel"
        )


def _uv() -> str:
    return str(Path(sys.executable).parent / "uv")


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _with_pips_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """As ``tools/bootstrap.sh``: pip's configuration alone says where packages come from, to uv
    too.
    """
    found = dict(environment)
    for variable, pip_variable, setting in (
        ("UV_FIND_LINKS", "PIP_FIND_LINKS", "find-links"),
        ("UV_DEFAULT_INDEX", "PIP_INDEX_URL", "index-url"),
    ):
        told = subprocess.run(
            [*_pip(), "config", "get", f"global.{setting}"],
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        value = found.get(pip_variable) or (told.stdout.strip() if told.returncode == 0 else "")
        if value:
            found.setdefault(variable, value)
    return found
