"""Whole systems for end-to-end tests: real processes, started the way a user starts them."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from pilotlight.common.clock import SystemClock

ROOT = Path(__file__).resolve().parents[2]
DEMO_FOLDER = ROOT / "models" / "ember-7m"
DEADLINE_S = 90.0
PORTS = (20_000, 32_000)


@dataclass(frozen=True)
class RunningSystem:
    """A system that ``pilotlight up`` runs."""

    home: Path
    url: str
    process: subprocess.Popen[str]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PILOTLIGHT_HOME": str(self.home)}

    def key(self, name: str) -> str:
        return (self.home / f"{name}.key").read_text().strip()

    def openai(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key("api"), timeout=DEADLINE_S, max_retries=0
        )

    def admin(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=f"{self.url}/admin/v1",
            headers={"Authorization": f"Bearer {self.key('admin')}"},
            timeout=DEADLINE_S,
        )

    def logged(self, process: str, action: str) -> list[dict[str, Any]]:
        """Lines of a process's log that tell of an action."""
        text = (self.home / "logs" / f"{process}.log").read_text()
        lines = [json.loads(line) for line in text.splitlines() if f'"{action}"' in line]
        return [one for one in lines if one.get("action") == action]

    def cli(self, *arguments: str, status: int = 0) -> Any:
        result = subprocess.run(
            [pilotlight(), *arguments, "--json"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert result.returncode == status, result.stdout + result.stderr
        return json.loads(result.stdout.strip().splitlines()[-1])


def pilotlight() -> str:
    return str(Path(sys.executable).parent / "pilotlight")


def eventually(condition: Callable[[], Any], deadline_s: float = 30.0) -> Any:
    """What a condition says once it holds."""
    clock, pause = SystemClock(), threading.Event()
    until_s = clock.monotonic_s() + deadline_s
    while not (found := condition()):
        assert clock.monotonic_s() < until_s, "it did not come to hold"
        pause.wait(0.1)
    return found


def copied(folder: Path, name: str) -> Path:
    """The demo model as another checkpoint: its header has one more entry."""
    shutil.copytree(DEMO_FOLDER, folder / name)
    file = folder / name / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = {**header.get("__metadata__", {}), "copy": name}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return folder / name


def free_port() -> int:
    """A port that nobody listens on, below those that connections are given: none of the system's
    own takes it before its gateway does.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def running(
    home: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[RunningSystem]:
    """Start a system, hand it out, stop it with SIGINT as Ctrl-C does.

    It has one gateway also on machines where two are the default, unless the arguments say more.
    """
    command = [pilotlight(), "up", "--json", "--port", str(port or free_port())]
    command += [*(() if "--gateways" in arguments else ("--gateways", "1")), *arguments]
    variables = {
        **os.environ,
        "PILOTLIGHT_HOME": str(home),
        "PILOTLIGHT_POOL_BYTES": str(256 * 2**20),
        **(environment or {}),
    }
    errors = home.parent / f"{home.name}.stderr"
    with errors.open("w") as sink:
        process = subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"pilotlight up ended: {errors.read_text()}"
        ready = json.loads(line)
        assert ready.get("ready"), ready
        yield RunningSystem(home=home, url=ready["url"], process=process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.stdout and process.stdout.close()
