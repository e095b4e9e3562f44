"""Nodes of a benchmark: network namespaces, each with a link of its own rate, joined by a bridge.

Needs root, ``ip`` and ``tc``.

::

    node 0 --tbf--+                 what a node sends is shaped at its own end, what it receives at the bridge's:
    node 1 --tbf--+-- bridge        both ways have the whole rate
    store  -------+                 a rate of None: as fast as the machine

The namespaces are removed again however the run ends, with whatever still runs in them; what a
killed run has left, the next one removes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX = "plb"
NETWORK = "10.231.7"
BURST = "256k"
COMMAND_S = 30.0


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    name: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """A command as it is run there."""
        return ["ip", "netns", "exec", self.name, *command]


def address(index: int) -> str:
    """Of the host with this number."""
    return f"{NETWORK}.{index + 1}"


@contextmanager
def network(rates: Sequence[str | None]) -> Generator[list[Host]]:
    """A host for each rate, as ``tc`` takes it.

    Raises:
        SystemExit: who runs it is not root, or a command failed.
    """
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    _sweep()
    prefix = f"{PREFIX}{os.getpid()}"
    bridge = f"{prefix}-br"
    hosts = [Host(f"{prefix}-{index}", address(index)) for index in range(len(rates))]
    before = exit_on_sigterm()
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for index, (host, rate) in enumerate(zip(hosts, rates, strict=True)):
            _join(host, bridge, f"p{index}", rate)
        yield hosts
    finally:
        # A second signal must not stop what the first one began.
        kept = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        for name in (*(host.name for host in hosts), bridge):
            _remove(name)
        signal.signal(signal.SIGINT, kept[signal.SIGINT])
        signal.signal(signal.SIGTERM, before)


def exit_on_sigterm() -> Any:
    """Have this process end in order when it is told to. What it did until now on the signal."""

    def leave(_: int, __: FrameType | None) -> None:
        sys.exit(1)

    return signal.signal(signal.SIGTERM, leave)


def _join(host: Host, bridge: str, port: str, rate: str | None) -> None:
    _run("ip", "netns", "add", host.name)
    _run(
        "ip",
        "link",
        "add",
        "eth0",
        "netns",
        host.name,
        "type",
        "veth",
        "peer",
        "name",
        port,
        "netns",
        bridge,
    )
    _run("ip", "-n", bridge, "link", "set", port, "master", "br0")
    _run("ip", "-n", bridge, "link", "set", port, "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", "-n", host.name, "link", "set", "eth0", "up")
    _run("ip", "-n", host.name, "link", "set", "lo", "up")
    if rate is not None:
        for namespace, device in ((host.name, "eth0"), (bridge, port)):
            shape = ("rate", rate, "burst", BURST, "latency", "50ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def _sweep() -> None:
    """Remove what runs that were killed have left."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(name)


def _remove(name: str) -> None:
    """End what runs in a namespace, and delete it; nothing happens when there is none."""
    found = subprocess.run(
        ["ip", "netns", "pids", name],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    for pid in found.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(
        ["ip", "netns", "del", name], capture_output=True, timeout=COMMAND_S, check=False
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
