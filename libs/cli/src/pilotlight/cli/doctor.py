"""Checks of the machine: each says what it found and, when that will not do, what to do about
it.
"""

import importlib.util
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from pilotlight.cli.home import SHARED_MEMORY, Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.preflight import looks
from pilotlight.common import fitness
from pilotlight.common.errors import PilotlightError
from pilotlight.common.nvml import DeviceState, NvmlFailed, NvmlUnavailable, device_states
from pilotlight.loader.devices import unopened, unusable
from pilotlight.native.library import library, unavailable
from pilotlight.policy.cluster import HealthState

MIB = 1024 * 1024
MIN_DISK_BYTES = 2 * 1024 * MIB
MIN_MEMORY_BYTES = 2 * 1024 * MIB
MIN_SHM_BYTES = 1024 * MIB
GPU_DEADLINE_S = 10.0


class Verdict(StrEnum):
    """Result of one check. A warning keeps nothing from working."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    verdict: Verdict
    found: str
    what_to_do: str = ""


def examine(home: Home, host: str, port: int) -> tuple[Check, ...]:
    """Run every check."""
    checks: tuple[Callable[[], Check], ...] = (
        *(
            partial(_told, name, look)
            for name, look in looks(home, SystemOptions(host=host, port=port), os.environ).items()
        ),
        lambda: check_port(home, host, port),
        lambda: check_room("disk", home.root, MIN_DISK_BYTES),
        lambda: check_room("shared memory", SHARED_MEMORY, MIN_SHM_BYTES),
        lambda: check_memory(Path("/proc/meminfo")),
        check_bytecode,
        check_compiler,
        check_native_code,
        check_driver,
        check_gpus,
    )
    return tuple(check() for check in checks)


def check_port(home: Home, host: str, port: int) -> Check:
    """Is the gateway's port free, or taken by our own system?"""
    running = home.running()
    if running is not None and running.url.endswith(f":{port}"):
        return Check(
            name="port",
            verdict=Verdict.OK,
            found=f"{port} is in use by process {running.pid}, this system",
        )
    return _told("port", lambda: fitness.check_port(host, port))


def check_room(name: str, folder: Path, sensible_bytes: int) -> Check:
    """Is there as much as is sensible, beyond what is needed to start?"""
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    found = f"{free_bytes // MIB:,} MiB free at {folder}"
    if free_bytes >= sensible_bytes:
        return Check(name=f"{name} to work with", verdict=Verdict.OK, found=found)
    advice = f"{sensible_bytes // MIB:,} MiB are a sensible minimum: free some, or enlarge it"
    return Check(
        name=f"{name} to work with", verdict=Verdict.WARNING, found=found, what_to_do=advice
    )


def _told(name: str, look: Callable[[], str]) -> Check:
    """One of the checks that are made at start-up, in the same words."""
    try:
        return Check(name=name, verdict=Verdict.OK, found=look())
    except PilotlightError as error:
        return Check(
            name=name, verdict=Verdict.FAILED, found=error.message, what_to_do=error.action
        )


def check_memory(meminfo: Path) -> Check:
    """Is there memory for an engine?"""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            verdict = Verdict.OK if available >= MIN_MEMORY_BYTES else Verdict.WARNING
            advice = (
                ""
                if verdict is Verdict.OK
                else f"an engine needs about {MIN_MEMORY_BYTES // MIB:,} MiB beside the model"
            )
            return Check(
                name="memory",
                verdict=verdict,
                found=f"{available // MIB:,} MiB available",
                what_to_do=advice,
            )
    return Check(
        name="memory",
        verdict=Verdict.WARNING,
        found="unknown",
        what_to_do="this kernel does not say MemAvailable",
    )


def check_bytecode(package: str = "torch") -> Check:
    """Is what an engine imports compiled? If not, each process compiles it again, where that is not
    kept.
    """
    found = importlib.util.find_spec(package)
    source = found.origin if found is not None else None
    if source is None:
        return Check(name="bytecode", verdict=Verdict.OK, found=f"there is no {package}")
    compiled = importlib.util.cache_from_source(source)
    if os.path.exists(compiled):
        return Check(name="bytecode", verdict=Verdict.OK, found=f"{package} is compiled")
    folder = os.path.dirname(source)
    return Check(
        name="bytecode",
        verdict=Verdict.WARNING,
        found=f"{package} is not compiled, and each engine that starts takes about three times as long to import it",
        what_to_do=f"{sys.executable} -m compileall -q {folder}, as who may write there; unset PYTHONDONTWRITEBYTECODE, or name a folder "
        "in PYTHONPYCACHEPREFIX",
    )


def check_compiler() -> Check:
    """Is there a C++ compiler for native code?"""
    found = shutil.which("g++") or shutil.which("c++")
    if found:
        return Check(name="compiler", verdict=Verdict.OK, found=found)
    return Check(
        name="compiler",
        verdict=Verdict.WARNING,
        found="no g++",
        what_to_do="apt-get install g++ if this node gets GPUs and the native code below is missing",
    )


def check_native_code() -> Check:
    """Is the library there that GPUs need, or can it be made?"""
    if why := unavailable():
        return Check(
            name="native code",
            verdict=Verdict.WARNING,
            found=why,
            what_to_do="nothing, for CPU workers; a GPU worker needs it: install g++, and it is compiled when it is first used",
        )
    return Check(name="native code", verdict=Verdict.OK, found=str(library().path))


def check_driver() -> Check:
    """Is there an NVIDIA driver?"""
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        return Check(name="driver", verdict=Verdict.OK, found=version.read_text().splitlines()[0])
    return Check(
        name="driver",
        verdict=Verdict.WARNING,
        found="no NVIDIA driver",
        what_to_do="nothing, for CPU workers",
    )


def check_gpus(
    read: Callable[[], tuple[DeviceState, ...]] = device_states, deadline_s: float = GPU_DEADLINE_S
) -> Check:
    """Which GPUs there are, how they are by their driver, and whether workers can use them.

    The driver may hang.
    """
    answers: queue.SimpleQueue[tuple[DeviceState, ...] | NvmlUnavailable | NvmlFailed] = (
        queue.SimpleQueue()
    )

    def ask() -> None:
        try:
            answers.put(read())
        except (NvmlUnavailable, NvmlFailed) as error:
            answers.put(error)

    threading.Thread(target=ask, name="gpus", daemon=True).start()
    try:
        found = answers.get(timeout=deadline_s)
    except queue.Empty:
        wedged = f"the driver has not answered for {deadline_s:g} s"
        return Check(
            name="GPUs",
            verdict=Verdict.WARNING,
            found=wedged,
            what_to_do="a device hangs: `dmesg | grep Xid`, reboot",
        )
    if isinstance(found, NvmlFailed):
        advice = "no worker starts: `dmesg | grep -e NVRM -e Xid`, reload the driver or reboot; or set PILOTLIGHT_WORKER_KIND=cpu"
        return Check(name="GPUs", verdict=Verdict.WARNING, found=str(found), what_to_do=advice)
    if isinstance(found, NvmlUnavailable) or not found:
        told = str(found) if found else "the driver has none"
        return Check(
            name="GPUs",
            verdict=Verdict.WARNING,
            found=f"none: {told}",
            what_to_do="nothing, for CPU workers",
        )
    lines = "; ".join(_state(one) for one in found)
    if why := unusable() or unopened([one.gpu for one in found]):
        return Check(
            name="GPUs",
            verdict=Verdict.WARNING,
            found=lines,
            what_to_do=f"workers run on CPU cores: {why}",
        )
    bad = any(one.health.state in (HealthState.FAILED, HealthState.DEGRADED) for one in found)
    advice = (
        "docs/operations/bad-day.md, A GPU fails, says what each reason asks for" if bad else ""
    )
    return Check(
        name="GPUs", verdict=Verdict.WARNING if bad else Verdict.OK, found=lines, what_to_do=advice
    )


def _state(one: DeviceState) -> str:
    known = f"{one.gpu.name}, {one.gpu.memory_bytes // MIB:,} MiB, " if one.gpu.name else ""
    reason = f" ({one.health.reason})" if one.health.reason else ""
    return f"{one.gpu.index}: {known}{one.health.state.value}{reason}"
