"""Checks of the machine: each says what it found and, when that will not do, what to do about it."""

import importlib.util
import os
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pilotlight.cli.home import Home

MIB = 1024 * 1024
MIN_FILES = 1024
MIN_DISK_BYTES = 2 * 1024 * MIB
MIN_MEMORY_BYTES = 2 * 1024 * MIB
MIN_SHM_BYTES = 1024 * MIB


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
        lambda: check_home(home),
        lambda: check_port(home, host, port),
        lambda: check_shared_memory(Path("/dev/shm")),
        lambda: check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        lambda: check_disk(home),
        lambda: check_memory(Path("/proc/meminfo")),
        check_engine,
        check_compiler,
        check_driver,
    )
    return tuple(check() for check in checks)


def check_home(home: Home) -> Check:
    """May we write to the state folder?"""
    folder = home.root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if os.access(folder, os.W_OK | os.X_OK):
        return Check(name="state folder", verdict=Verdict.OK, found=str(home.root))
    return Check(
        name="state folder",
        verdict=Verdict.FAILED,
        found=f"{home.root} cannot be written",
        what_to_do="set PILOTLIGHT_HOME to a folder that you may write to",
    )


def check_port(home: Home, host: str, port: int) -> Check:
    """Is the gateway's port free, or taken by our own system?"""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            running = home.running()
            if running is not None and running.url.endswith(f":{port}"):
                return Check(name="port", verdict=Verdict.OK, found=f"{port} is in use by process {running.pid}, this system")
            return Check(
                name="port",
                verdict=Verdict.FAILED,
                found=f"{host}:{port}: {error.strerror}",
                what_to_do="stop what uses it, or set PILOTLIGHT_PORT",
            )
    return Check(name="port", verdict=Verdict.OK, found=f"{host}:{port} is free")


def check_shared_memory(folder: Path) -> Check:
    """Is there room for a host pool?"""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            name="shared memory",
            verdict=Verdict.FAILED,
            found=f"{folder}: {error.strerror}",
            what_to_do="mount a tmpfs on /dev/shm",
        )
    verdict = Verdict.OK if free >= MIN_SHM_BYTES else Verdict.WARNING
    advice = "" if verdict is Verdict.OK else "set PILOTLIGHT_POOL_BYTES below it, or enlarge it (in a container: shm_size)"
    return Check(name="shared memory", verdict=verdict, found=f"{free // MIB:,} MiB free in {folder}", what_to_do=advice)


def check_files(limit: int) -> Check:
    """May a process open enough files?"""
    verdict = Verdict.OK if limit >= MIN_FILES or limit == resource.RLIM_INFINITY else Verdict.WARNING
    advice = "" if verdict is Verdict.OK else f"raise it: ulimit -n {MIN_FILES * 16}"
    return Check(name="file limit", verdict=verdict, found=f"{limit} open files a process", what_to_do=advice)


def check_disk(home: Home) -> Check:
    """Is there room for state and logs?"""
    folder = home.root
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    verdict = Verdict.OK if free >= MIN_DISK_BYTES else Verdict.WARNING
    advice = "" if verdict is Verdict.OK else f"free some: {MIN_DISK_BYTES // MIB:,} MiB are a sensible minimum"
    return Check(name="disk", verdict=verdict, found=f"{free // MIB:,} MiB free at {folder}", what_to_do=advice)


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
            advice = "" if verdict is Verdict.OK else f"an engine needs about {MIN_MEMORY_BYTES // MIB:,} MiB beside the model"
            return Check(name="memory", verdict=verdict, found=f"{available // MIB:,} MiB available", what_to_do=advice)
    return Check(name="memory", verdict=Verdict.WARNING, found="unknown", what_to_do="this kernel does not say MemAvailable")


def check_engine() -> Check:
    """Is there a torch for the native engine?"""
    if importlib.util.find_spec("torch") is not None:
        return Check(name="engine", verdict=Verdict.OK, found="torch is installed")
    return Check(
        name="engine",
        verdict=Verdict.FAILED,
        found="torch is not installed",
        what_to_do="install pilotlight-worker[native]; in a checkout `make demo` does it",
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
        what_to_do="apt-get install g++ if this node gets GPUs: graphs are then restored instead of captured",
    )


def check_driver() -> Check:
    """Is there an NVIDIA driver?"""
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        return Check(name="driver", verdict=Verdict.OK, found=version.read_text().splitlines()[0])
    return Check(name="driver", verdict=Verdict.WARNING, found="no NVIDIA driver", what_to_do="nothing, for CPU workers")
