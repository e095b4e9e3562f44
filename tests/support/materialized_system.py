"""Builds of artifacts in a system that runs, seen from outside."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3
from embedded_system import RunningSystem, copied

DIGEST_CHARS = 64
"""Other names are those of files that are being written."""


def register(system: RunningSystem, name: str, **body: Any) -> None:
    """A copy of the demo model, which is another checkpoint."""
    folder = system.home / "models" / name
    if not folder.exists():
        copied(system.home / "models", name)
    with system.admin() as admin:
        new = {
            "name": name,
            "uri": folder.as_uri(),
            "slo": {"ttft_ms": 5000, "tpot_ms": 200},
            **body,
        }
        reply = admin.post("/models", json=new)
        assert reply.status_code == 201, reply.text


def materials(system: RunningSystem, name: str) -> dict[str, Any]:
    with system.admin() as admin:
        return admin.get(f"/models/{name}/materials").json()


def builds(system: RunningSystem, name: str, state: str) -> list[dict[str, Any]]:
    return [one for one in materials(system, name)["builds"] if one["state"] == state]


def build_children(system: RunningSystem) -> list[int]:
    """Engine processes whose log is that of builds."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text()
            log = os.readlink(entry / "fd" / "1")
        except OSError:
            continue
        if "engine_main" in command and log.startswith(str(system.home)) and "build-" in log:
            found.append(int(entry.name))
    return found


def stored(system: RunningSystem) -> list[int]:
    """Lengths of the artifacts' objects, each of which has the bytes that its name promises: what
    is being written is not there yet.
    """
    found: list[int] = []
    for file in (system.home / "objects" / "artifacts").glob("*"):
        with suppress(FileNotFoundError):  # It may just have been removed.
            data = file.read_bytes()
            if len(file.name) == DIGEST_CHARS:
                assert blake3(data).hexdigest() == file.name
                found.append(len(data))
    return sorted(found)
