"""A worker's process: one worker, or simulated ones.

Its loader starts it before it knows what the worker is to be (``--ahead``). Then it imports what it
needs, has its engine do the same, and reads from standard input what variables its loader has found
for it; where none come, nobody wants it, and it ends.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial

import pilotlight.common.plain_logs  # noqa: F401 # pyright: ignore[reportUnusedImport] - before structlog
from pilotlight.common.service import run_service
from pilotlight.worker.app import build
from pilotlight.worker.engines.child_ahead import ChildAhead
from pilotlight.worker.settings import WorkerSettings

parser = argparse.ArgumentParser(
    prog="pilotlight.worker",
    description="Speaks for one device. Settings are PILOTLIGHT_* variables.",
)
parser.add_argument("--sim", type=int, metavar="N", help="run N simulated workers in this process")
parser.add_argument(
    "--ahead", action="store_true", help="by a loader: wait at standard input for more variables"
)


def run(arguments: Sequence[str], ahead: ChildAhead | None) -> int:
    """Run until it is stopped; the exit status.

    Args:
        arguments: of the command line.
        ahead: the worker's first engine, where it was started before this was imported.
    """
    options = parser.parse_args(arguments)
    if options.ahead and not _is_wanted():
        return 0  # The kernel ends the engine with its parent.
    simulated: int | None = options.sim
    return run_service("worker", WorkerSettings, partial(build, simulated=simulated, ahead=ahead))


def _is_wanted() -> bool:
    """Waits for the loader's word, and has its variables; False when there is none."""
    told = sys.stdin.buffer.read()
    if not told:
        return False
    os.environ.update(json.loads(told))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return True
