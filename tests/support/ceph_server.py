"""Ceph's S3 server (radosgw) with one monitor and one OSD in memory: a real S3 server to hold our
reading of the protocol against.

From Debian: ``apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common``.
Nothing of it is configured for real use.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY = "AKIACONFORMANCE"
SECRET_KEY = "conformance-secret"
START_DEADLINE_S = 60.0
COMMAND_DEADLINE_S = 30.0
TRIES = 4
"""A monitor that has just started now and then refuses a command, or never answers it; and so does
what asks it for its maps: a client that has not had the monitors' map yet sends its first command
without the cluster's id, and is refused for it ("wrong fsid"). An OSD ends then, and a gateway
without an OSD waits for ever."""

CONFIG = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd objectstore = memstore
memstore device bytes = {store_bytes}
mon allow pool size one = true
mon warn on pool no redundancy = false
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
mon data = {folder}/mon.$id
osd data = {folder}/osd.$id
[client.rgw]
rgw frontends = beast endpoint={host}:{rgw_port}
rgw data = {folder}/rgw
"""


@dataclass(frozen=True)
class CephServer:
    """Where it listens."""

    url: str


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_ceph(
    folder: Path, store_bytes: int = 1 << 30, host: str = "127.0.0.1"
) -> Iterator[CephServer]:
    """Start all three, make the user, hand the server out, stop all three.

    ``store_bytes`` of memory are what objects may take; ``host`` is the address that S3 is served
    at.
    """
    config, rgw_port = folder / "ceph.conf", free_port()
    mon_port = free_port()
    fsid = str(uuid.uuid4())
    values = {
        "fsid": fsid,
        "mon_port": mon_port,
        "rgw_port": rgw_port,
        "folder": folder,
        "store_bytes": store_bytes,
        "host": host,
    }
    config.write_text(CONFIG.format(**values))
    for name in ("mon.a", "osd.0", "rgw"):
        (folder / name).mkdir()
    monmap = folder / "monmap"
    with ExitStack() as stack:
        _run(
            "monmaptool",
            "--create",
            "--clobber",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v1:127.0.0.1:{mon_port}]",
            str(monmap),
        )
        _run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap), "-c", str(config))
        _start(stack, folder, "ceph-mon", "-i", "a", "-c", str(config), "-f")
        osd = str(uuid.uuid4())
        _run_again("ceph", "-c", str(config), "osd", "new", osd, "0")
        _run("ceph-osd", "-i", "0", "-c", str(config), "--mkfs", "--osd-uuid", osd)
        _run_again(
            "ceph",
            "-c",
            str(config),
            "osd",
            "crush",
            "add",
            "osd.0",
            "1.0",
            "root=default",
            "host=h",
        )
        _start_until(
            stack,
            folder,
            lambda: _osd_is_up(config),
            "ceph-osd",
            "-i",
            "0",
            "-c",
            str(config),
            "-f",
        )
        url = f"http://{host}:{rgw_port}"
        _start_until(
            stack,
            folder,
            lambda: _answers(url),
            "radosgw",
            "-n",
            "client.rgw",
            "-c",
            str(config),
            "-f",
        )
        user = (
            "--uid=t",
            "--display-name=t",
            f"--access-key={ACCESS_KEY}",
            f"--secret-key={SECRET_KEY}",
        )
        made = _run("radosgw-admin", "-n", "client.rgw", "-c", str(config), "user", "create", *user)
        assert json.loads(made)["user_id"] == "t"
        yield CephServer(url)


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout


def _run_again(*command: str) -> str:
    """As ``_run``, of what may be said twice."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            return _run(*command)
    return _run(*command)


def _start(stack: ExitStack, folder: Path, *command: str) -> subprocess.Popen[bytes]:
    with (folder / f"{command[0]}.out").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
    stack.callback(_stop, process)
    return process


def _start_until(
    stack: ExitStack, folder: Path, is_ready: Callable[[], bool], *command: str
) -> None:
    """Starts a server, and again where it ends or is not ready in time."""
    for _ in range(TRIES):
        process = _start(stack, folder, *command)
        until_s = time.monotonic() + START_DEADLINE_S
        while process.poll() is None and time.monotonic() < until_s:
            if is_ready():
                return
            time.sleep(0.1)
        _stop(process)
    said = (folder / f"{command[0]}.out").read_text(errors="replace")[-2000:]
    raise AssertionError(f"{command[0]} was not ready after {TRIES} starts: {said}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it outlives the test: there is nothing to end in order."""
    process.kill()
    process.wait(COMMAND_DEADLINE_S)


def _osd_is_up(config: Path) -> bool:
    """Whether the monitor says that the only OSD is up."""
    told = _run_again("ceph", "-c", str(config), "osd", "stat", "--format", "json")
    return json.loads(told)["num_up_osds"] == 1


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
