"""Installs Pilotlight from the folder that this file lies in, with ``borrowed_torch.py`` beside it,
Python's standard library and no package index.

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
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from borrowed_torch import PROBE_DEADLINE_S, InstallError, borrow_torch, numbers

MIB = 1024 * 1024
READ_BYTES = 4 * MIB
INSTALL_DEADLINE_S = 600.0
SPARE_BYTES = 64 * MIB
FORMAT = 1
COMPLETE = ".complete"


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


def point(link: Path, target: str) -> None:
    """Make a symbolic link, in the place of an earlier one, in one step."""
    unfinished = link.with_name(f".{link.name}.new")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(link)


if __name__ == "__main__":
    sys.exit(main())
