"""``python -m pilotlight.worker``: one worker, or with ``--sim N`` N simulated ones."""

import argparse
import sys
from functools import partial

from pilotlight.common.service import run_service
from pilotlight.worker.app import build
from pilotlight.worker.settings import WorkerSettings

parser = argparse.ArgumentParser(
    prog="pilotlight.worker",
    description="Speaks for one device. Settings are PILOTLIGHT_* variables.",
)
parser.add_argument("--sim", type=int, metavar="N", help="run N simulated workers in this process")
sys.exit(run_service("worker", WorkerSettings, partial(build, simulated=parser.parse_args().sim)))
