"""Programs that record or restore graphs, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Record = Callable[[str, object], None]
GRAPHS = 35 + 8
"""Of decode steps, and of prompts."""
CHILD_S = 300


def last_line_of(program: ModuleType, *arguments: str) -> dict[str, Any]:
    """The last line that a program prints, which is JSON."""
    done = subprocess.run(
        [sys.executable, str(Path(str(program.__file__))), *arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])
