"""What this machine, or the container that it is to us, has; and where processes that we start
write to.
"""

import os
from collections.abc import Sequence
from pathlib import Path

STANDARD_ERROR = Path("/dev/stderr")
"""Stands for our own standard error: a writer takes the descriptor, for a socket cannot be opened
by this name."""
STANDARD_ERROR_DESCRIPTOR = 2
INHERITED = Path("-")
"""As a folder for logs: none; a child writes where the process that starts it does."""
END_WITH_PARENT = "PILOTLIGHT_END_WITH_PARENT"
"""Environment variable with the supervisor's pid: a service stops in order when that process dies.
"""
DEVICES = Path("/dev")
DRIVER_VERSION = Path("/sys/module/nvidia/version")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_bytes() -> int:
    """The host's memory, or the container's where it has less."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in _CGROUP_LIMITS if path.exists()]
    return min([host_bytes, *(int(limit) for limit in limits if limit.isdecimal())])


def log_file(folder: Path, name: str) -> Path:
    """Where a process that we start writes its output: a file of that name, or our own standard
    error.
    """
    return STANDARD_ERROR if folder == INHERITED else folder / name


def shown_gpus(cuda_devices: Sequence[str]) -> dict[str, str]:
    """Variables that show a process these GPUs alone."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(cuda_devices),
        # Indexes count as nvidia-smi does, and not the fastest first.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def driver_version() -> str:
    """Of NVIDIA's driver; "unknown" where the system does not say."""
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:
        return "unknown"


def gpus_shown(shown: str | None, devices: Path = DEVICES) -> int:
    """How many GPUs a process will probably see: as many as there are files of, and as it is shown.
    Asks no driver.

    Args:
        shown: its ``CUDA_VISIBLE_DEVICES``.
        devices: the folder with a file for each device of the machine.
    """
    there = sum(
        path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia[0-9]*")
    )
    return there if shown is None else min(there, sum(map(bool, shown.split(","))))
