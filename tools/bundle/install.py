"""Installs Pilotlight from the folder that this file lies in, with nothing but Python's standard
library and no package index.

    PREFIX/bin/pilotlight     -> current/bin/pilotlight
    PREFIX/current            -> releases/VERSION-DIGEST, switched when the new one is complete
    PREFIX/releases/...       a virtual environment each, with share/pilotlight: migrations, the demo model, docs

It may be run again at any time: what is complete is kept, what is not is made anew.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
READ_BYTES = 4 * MIB
INSTALL_DEADLINE_S = 600.0
PROBE_DEADLINE_S = 60.0
IMPORT_DEADLINE_S = 300.0
SPARE_BYTES = 64 * MIB
FORMAT = 1
COMPLETE = ".complete"
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Install; the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="install.sh", description="Install Pilotlight without a package index."
    )
    parser.add_argument(
        "prefix",
        nargs="?",
        type=Path,
        default=Path("pilotlight"),
        help="folder to install into (./pilotlight)",
    )
    parser.add_argument(
        "--with-tests", action="store_true", help="the tests too, and the packages that they need"
    )
    parser.add_argument("--torch-from", metavar="PYTHON", help="use the torch of this Python")
    asked = parser.parse_args(arguments)
    try:
        release = install(
            Path(__file__).resolve().parent,
            asked.prefix.absolute(),
            asked.torch_from,
            tests=asked.with_tests,
        )
    except InstallError as error:
        print(f"Not installed: {error}", file=sys.stderr)
        return 1
    print(
        f"Installed: {asked.prefix / 'bin' / 'pilotlight'} -> {release}. What this machine has, and what it lacks:",
        flush=True,
    )
    subprocess.run(
        [release / "bin" / "pilotlight", "doctor"], timeout=PROBE_DEADLINE_S, check=False
    )
    return 0


def install(
    source: Path, prefix: Path, torch_from: str | None = None, *, tests: bool = False
) -> Path:
    """Verify, unpack and install; the release's folder.

    Raises:
        InstallError: the archive or the machine is not as it must be.
    """
    manifest = read_manifest(source)
    check_machine(manifest, "{}.{}".format(*sys.version_info), platform.machine(), glibc())
    names = ["pilotlight", "torch", *(["tests"] if tests else [])]
    archives = [archive for archive in manifest["archives"] if archive["name"] in names]
    if tests and not any(archive["name"] == "tests" for archive in archives):
        raise InstallError("this archive was made without tests")
    digest = hashlib.sha256(
        json.dumps([archive["sha256"] for archive in archives]).encode()
    ).hexdigest()
    release = prefix / "releases" / f"{manifest['version']}-{digest[:10]}"
    if not (release / COMPLETE).is_file():
        print(
            f"Verifying {sum(len(archive['parts']) for archive in archives)} parts ...", flush=True
        )
        for archive in archives:
            verify(source, archive)
        prepare(prefix, archives)
        shutil.rmtree(release, ignore_errors=True)
        print(f"Installing into {release} ...", flush=True)
        fill(source, archives, release)
        (release / COMPLETE).touch()
    if not any(archive["name"] == "torch" for archive in archives):
        borrow_torch(manifest, release, torch_from)
    point(prefix / "current", f"releases/{release.name}")
    (prefix / "bin").mkdir(exist_ok=True)
    point(prefix / "bin" / "pilotlight", "../current/bin/pilotlight")
    for left in sorted((prefix / "releases").iterdir()):
        if left != release:
            print(f"An earlier release is still there; remove it when nothing runs from it: {left}")
    return release


def read_manifest(source: Path) -> dict[str, Any]:
    """What the archive says of itself."""
    try:
        manifest = json.loads((source / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise InstallError(
            f"{source / 'manifest.json'} cannot be read ({error}): copy the whole folder again"
        ) from error
    if manifest.get("format") != FORMAT:
        raise InstallError(
            f"manifest.json has format {manifest.get('format')}, install.py knows {FORMAT}: copy both from one bundle"
        )
    return manifest


def glibc() -> str:
    """Version of the C library; empty where it is another one than glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (OSError, ValueError):
        return ""


def check_machine(manifest: dict[str, Any], python: str, machine: str, libc: str) -> None:
    """Is this the machine that the archive was made for?"""
    if python != manifest["python"]:
        raise InstallError(
            f"the archive is for Python {manifest['python']}, this is {python}: set PYTHON, or make one for {python}"
        )
    here = f"{sys.platform}-{machine}"
    if here != manifest["platform"]:
        raise InstallError(f"the archive is for {manifest['platform']}, this machine is {here}")
    if numbers(libc) < numbers(manifest["glibc"]):
        raise InstallError(
            f"glibc {manifest['glibc']} or newer is needed, and this is {libc or 'another C library'}"
        )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(word) for word in found[0].split(".")) if found else ()


def verify(source: Path, archive: dict[str, Any]) -> None:
    """Are all the parts there, and are they what the manifest says?"""
    parts: list[dict[str, Any]] = archive["parts"]
    if missing := [part["name"] for part in parts if not (source / part["name"]).is_file()]:
        raise InstallError(
            f"{len(missing)} of {len(parts)} parts are missing in {source}: {', '.join(missing)}. Copy them there"
        )
    whole = hashlib.sha256()
    for part in parts:
        own = hashlib.sha256()
        for piece in pieces(source / part["name"]):
            own.update(piece)
            whole.update(piece)
        if own.hexdigest() != part["sha256"]:
            size_bytes = (source / part["name"]).stat().st_size
            raise InstallError(
                f"{part['name']} is damaged ({size_bytes} of {part['size_bytes']} bytes, another SHA-256). Copy it again"
            )
    if whole.hexdigest() != archive["sha256"]:
        raise InstallError(
            f"the parts of {archive['name']} do not make the whole: manifest and parts are of different bundles"
        )


def pieces(path: Path) -> Iterator[bytes]:
    """A file's bytes."""
    with path.open("rb") as content:
        while piece := content.read(READ_BYTES):
            yield piece


def prepare(prefix: Path, archives: Sequence[dict[str, Any]]) -> None:
    """Make the folder and see that there is room: for what is unpacked, and for the same once more
    installed and compiled.
    """
    wanted = 5 * sum(archive["unpacked_bytes"] for archive in archives) // 2 + SPARE_BYTES
    try:
        (prefix / "releases").mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(prefix).free
    except OSError as error:
        raise InstallError(
            f"{prefix} cannot be made: {error.strerror}. Name another folder: ./install.sh FOLDER"
        ) from error
    if not os.access(prefix / "releases", os.W_OK):
        raise InstallError(
            f"{prefix} may not be written to. Name another folder: ./install.sh FOLDER"
        )
    if free < wanted:
        raise InstallError(
            f"{wanted // MIB:,} MiB are needed at {prefix}, and {free // MIB:,} are free: free some, or name another folder"
        )


class Joined(io.RawIOBase):
    """The parts of an archive, read as one file."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self._stream = (piece for part in parts for piece in pieces(part))
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._stream, b"")
        size_bytes = min(len(buffer), len(self._left))
        buffer[:size_bytes] = self._left[:size_bytes]
        self._left = self._left[size_bytes:]
        return size_bytes


def fill(source: Path, archives: Sequence[dict[str, Any]], release: Path) -> None:
    """Make the release: a virtual environment with the wheels, and the shared files."""
    with tempfile.TemporaryDirectory(dir=release.parent.parent, prefix=".unpacked-") as made:
        unpacked = Path(made)
        for archive in archives:
            joined = io.BufferedReader(
                Joined([source / part["name"] for part in archive["parts"]]), READ_BYTES
            )
            try:
                with lzma.open(joined) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
                    if hasattr(tarfile, "data_filter"):  # Debian 12's Python is older than it
                        tar.extraction_filter = tarfile.data_filter
                    tar.extractall(unpacked)
            except OSError as error:
                raise InstallError(
                    f"cannot unpack into {unpacked}: {error.strerror or error}"
                ) from error
        # --without-pip: where Debian's python3-venv is not installed, there is no pip to put in.
        run(
            [sys.executable, "-m", "venv", "--without-pip", str(release)],
            "make a virtual environment",
        )
        pip = next((unpacked / "wheels").glob("pip-*.whl"))
        wheels = sorted(str(path) for path in (unpacked / "wheels").glob("*.whl") if path != pip)
        flags = [
            "--isolated",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-cache-dir",
            "--disable-pip-version-check",
        ]
        run(
            [str(release / "bin" / "python"), str(pip / "pip"), "install", *flags, *wheels],
            "install the packages",
        )
        shared = release / "share" / "pilotlight"
        shutil.copytree(unpacked / "share", shared, dirs_exist_ok=True)
        if (unpacked / "tree").is_dir():
            shutil.copytree(unpacked / "tree", shared / "tree")


def run(command: Sequence[str], what: str) -> str:
    """Run a step in an environment without any configuration of Python or pip; its output."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
    }
    try:
        done = subprocess.run(
            command,
            env=clean,
            capture_output=True,
            text=True,
            timeout=INSTALL_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"cannot {what}: not done after {INSTALL_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        raise InstallError(f"cannot {what}: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done.stdout


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


def point(link: Path, target: str) -> None:
    """Make a symbolic link, in the place of an earlier one, in one step."""
    unfinished = link.with_name(f".{link.name}.new")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(link)


if __name__ == "__main__":
    sys.exit(main())
