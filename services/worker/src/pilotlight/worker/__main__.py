"""``python -m pilotlight.worker``: one worker, or with ``--sim N`` N simulated ones."""

import argparse
import sys
from functools import partial
from typing import TypeVar

import pilotlight.common.plain_logs  # noqa: F401 # pyright: ignore[reportUnusedImport]
from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.settings import ServiceSettings
from pilotlight.worker.engines.child_process import ChildAhead
from pilotlight.worker.engines.options import engine_ahead
from pilotlight.worker.settings import WorkerSettings

Settings = TypeVar("Settings", bound=ServiceSettings)
parser = argparse.ArgumentParser(
    prog="pilotlight.worker",
    description="Speaks for one device. Settings are PILOTLIGHT_* variables.",
)
parser.add_argument("--sim", type=int, metavar="N", help="run N simulated workers in this process")


def _read(kind: type[Settings]) -> Settings:
    return kind()


def _ahead() -> ChildAhead | None:
    try:
        return engine_ahead(_read(WorkerSettings))
    except SettingsInvalid:
        return None  # The service says what is wrong with them.


def _main() -> int:
    simulated: int | None = parser.parse_args().sim
    # Before the rest is imported, which takes as long as a part of the engine's imports.
    ahead = _ahead() if simulated is None else None
    from pilotlight.common.service import run_service
    from pilotlight.worker.app import build

    return run_service("worker", WorkerSettings, partial(build, simulated=simulated, ahead=ahead))


sys.exit(_main())
