"""Commands in a mount namespace of their own: small disks and read-only folders that no other
process sees and that end with them.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_MOUNT = """
set -e
while [ "$1" != -- ]; do
    case "$1" in
        ro) mount --bind "$2" "$2"; mount -o remount,ro,bind "$2" ;;
        *) mount -t tmpfs -o "size=$1" tmpfs "$2" ;;
    esac
    shift 2
done
shift
exec "$@"
"""


def _unshare() -> list[str]:
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@functools.cache
def may_mount() -> bool:
    """Plain containers do not let even root do it."""
    return (
        subprocess.run(
            [*_unshare(), "true"], capture_output=True, timeout=10.0, check=False
        ).returncode
        == 0
    )


def confined(command: Sequence[str | Path], places: Mapping[Path, str]) -> list[str]:
    """The command in a namespace where each place is a tmpfs of that size (``4m``), or is ``ro``.

    Skips the test where there can be none.
    """
    if not may_mount():
        pytest.skip(
            "mounting needs a namespace of one's own: CAP_SYS_ADMIN, or user namespaces that are not closed"
        )
    mounts = [part for place, how in places.items() for part in (how, str(place))]
    return [*_unshare(), "sh", "-c", _MOUNT, "confined", *mounts, "--", *map(str, command)]


def inside(pid: int, place: Path) -> Path:
    """A place as a process of such a namespace sees it."""
    return Path(f"/proc/{pid}/root") / place.relative_to("/")


def fill(folder: Path) -> list[Path]:
    """Take every byte of a disk; what to remove to give them back."""
    fillers = [folder / "filler-large", folder / "filler-small"]
    for filler, size_bytes in zip(fillers, (1 << 20, 1 << 12), strict=True):
        descriptor = os.open(filler, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            while os.write(descriptor, bytes(size_bytes)) == size_bytes:
                pass
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return fillers


def run_python(program: str, places: Mapping[Path, str]) -> "subprocess.CompletedProcess[str]":
    """Run a program of Python in a namespace."""
    return subprocess.run(
        confined([sys.executable, "-c", program], places),
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
