"""The README's commands, as a new user would type them."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0


def blocks() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def shell(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PILOTLIGHT_HOME": str(home)}
    return subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
