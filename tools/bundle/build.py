"""Makes the offline installation archive: ``dist/pilotlight-VERSION-pyXY-linux-x86_64/``.

It holds up to three archives in parts of at most 28 MiB, ``install.sh`` with the modules that it
runs, and a manifest:

- ``pilotlight``: wheels of the members and of all they need, nats-server and PostgreSQL among them;
  migrations, demo model, docs;
- ``tests``: what tests on another machine need: their packages, and the tests themselves;
- ``torch``, when asked for: torch and numpy. Otherwise the machine's own are used.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bundle.archive import MIB, PART_BYTES, Archive, files_below, store_wheel, write_archive
from bundle.wheels import (
    GLIBC,
    OF_A_NEWER_LIBC,
    OF_THE_MACHINE,
    ROOT,
    BundleError,
    Uv,
    needed,
    version_range,
)
from image_requirements import projects

FORMAT = 1
"""Of the manifest."""
PYTHONS = ("3.11", "3.12")
HERE = Path(__file__).resolve().parent
INSTALLER = ("install.sh", "install.py", "borrowed_torch.py")
SHARED = ("migrations", "models", "docs")
TEST_FILES = ("conftest.py", "pyproject.toml", "tools/bounded_runs.py", "tools/test_gpu.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the bundle; the process's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "{}.{}".format(*sys.version_info)
    parser.add_argument(
        "--python",
        default=default,
        type=lambda text: text.removeprefix("python"),
        metavar="3.11|3.12",
    )
    parser.add_argument(
        "--with-torch", action="store_true", help="put torch in, from where pip finds it"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args(arguments)
    if asked.python not in PYTHONS:
        parser.error(f"PYTHON={asked.python}: Pilotlight runs on {' and '.join(PYTHONS)}")
    try:
        folder, archives = make(asked.python, asked.out, with_torch=asked.with_torch)
    except BundleError as error:
        print(f"No bundle: {error}", file=sys.stderr)
        return 1
    for archive in archives:
        parts = "1 part" if len(archive.parts) == 1 else f"{len(archive.parts)} parts"
        print(
            f"{archive.name:12}{archive.size_bytes / MIB:7.1f} MiB in {parts}, {archive.unpacked_bytes / MIB:.0f} MiB unpacked"
        )
    print(
        f"{folder}: copy all of it to a machine with Python {asked.python}, and run ./install.sh [FOLDER] there"
    )
    return 0


def make(python: str, out: Path, *, with_torch: bool) -> tuple[Path, list[Archive]]:
    """Collect, pack and write; the folder takes its name when it is complete."""
    members = [folder for folder, _ in projects().values()]
    uv = Uv(python, ROOT / "constraints.txt")
    groups = needed(uv, with_torch=with_torch)
    stem = f"pilotlight-{version()}-py{python.replace('.', '')}-linux-x86_64"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as made:
        scratch = Path(made)
        folder = scratch / stem
        folder.mkdir()
        with_wheels = {
            name: wheel_entries(uv, pinned, scratch / name)
            for name, pinned in asdict(groups).items()
            if pinned
        }
        with_wheels["runtime"] |= stored(
            uv.build(members, _new(scratch / "members")), scratch / "members-stored"
        )
        for name in SHARED:
            with_wheels["runtime"] |= files_below(ROOT / name, f"share/{name}")
        with_wheels["tests"] |= test_files()
        names = {"runtime": "pilotlight", "tests": "tests", "torch": "torch"}
        archives = [
            write_archive(
                names[group],
                stem if group == "runtime" else f"{stem}-{names[group]}",
                entries,
                folder,
                PART_BYTES,
            )
            for group, entries in sorted(with_wheels.items())
        ]
        write_manifest(folder / "manifest.json", python, archives)
        for name in INSTALLER:
            shutil.copy(HERE / name, folder / name)
        final = out / stem
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    return final, archives


def wheel_entries(uv: Uv, pinned: Sequence[str], folder: Path) -> dict[str, Path]:
    """Download a group; its wheels by their names in the archive."""
    return stored(uv.download(pinned, _new(folder)), folder.with_name(f"{folder.name}-stored"))


def stored(wheels: Sequence[Path], folder: Path) -> dict[str, Path]:
    """The wheels, without their compression, by their names in the archive."""
    _new(folder)
    return {f"wheels/{wheel.name}": store_wheel(wheel, folder) for wheel in wheels}


def test_files() -> dict[str, Path]:
    """The tests and what configures them, by their names in the archive."""
    found = {f"tree/{name}": ROOT / name for name in TEST_FILES}
    for folder in [
        ROOT / "tests",
        *sorted(ROOT.glob("libs/*/tests")),
        *sorted(ROOT.glob("services/*/tests")),
    ]:
        found |= files_below(folder, f"tree/{folder.relative_to(ROOT).as_posix()}")
    return {name: path for name, path in found.items() if not needs_newer_libc(path)}


def needs_newer_libc(test: Path) -> bool:
    """Whether a test imports what no archive has."""
    if test.suffix != ".py":
        return False
    text = test.read_text()
    return any(f"import {name}" in text for name in OF_A_NEWER_LIBC)


def write_manifest(path: Path, python: str, archives: Sequence[Archive]) -> None:
    """Say what is there, for whom, and what the machine must bring."""
    manifest = {
        "format": FORMAT,
        "version": version(),
        "python": python,
        "platform": "linux-x86_64",
        "glibc": GLIBC,
        "machine": {name: version_range(name) for name in OF_THE_MACHINE},
        "archives": [asdict(archive) for archive in archives],
    }
    path.write_text(json.dumps(manifest, indent=2) + "\n")


def version() -> str:
    """Pilotlight's own."""
    return str(projects()["pilotlight-cli"][1]["version"])


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
