"""A client of the bus comes back, whatever ended its connection."""

import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "support" / "resetting_server.py"
CLIENTS = 9
ROUNDS = 200
"""Of each client."""


def test_resets_right_after_the_greeting(nats_url: str) -> None:
    """Under uvloop, as services run: a write to a connection that was just reset is a RuntimeError
    there.
    """
    port = urlsplit(nats_url).port
    command = [sys.executable, str(PROGRAM), str(port), str(CLIENTS), str(CLIENTS * ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
