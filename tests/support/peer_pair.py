"""Two processes of ``peer_child.py``, each shown one device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("peer_child.py")
DEADLINE_S = 150


def pair(
    roles: tuple[str, str], shown: tuple[str, str], **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs two processes, each shown one device, to their end; what they found."""
    children: list[subprocess.Popen[str]] = []
    try:
        for role, device in zip(roles, shown, strict=True):
            given = json.dumps({**options, "first": not children})
            paths = os.pathsep.join([str(CHILD.parent), *filter(None, sys.path)])
            children.append(
                subprocess.Popen(
                    [sys.executable, str(CHILD), role, given],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": device, "PYTHONPATH": paths},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        ports = [_line(child) for child in children]
        for child, port in zip(children, reversed(ports), strict=True):
            assert child.stdin is not None
            child.stdin.write(port)
            child.stdin.flush()
        found: list[dict[str, Any]] = []
        for child in children:
            said, why = child.communicate(timeout=2 * DEADLINE_S)
            assert child.returncode == 0, why[-4000:]
            found.append(json.loads(said.splitlines()[-1]))
        return found[0], found[1]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise AssertionError(child.communicate()[1][-4000:])
    return line
