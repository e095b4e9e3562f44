"""The import diet: the worker's parent process has neither torch nor transformers."""

import subprocess
import sys

PROGRAM = """
import sys
import pilotlight.worker.app, pilotlight.worker.worker, pilotlight.worker.settings
print([name for name in ("torch", "transformers", "pilotlight.engine") if name in sys.modules])
"""


def test_the_parent_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
