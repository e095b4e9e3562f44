"""``python -m pilotlight.scheduler``."""

import sys

from pilotlight.common.service import run_service
from pilotlight.scheduler.app import build
from pilotlight.scheduler.settings import SchedulerSettings

if __name__ == "__main__":
    sys.exit(run_service("scheduler", SchedulerSettings, build))
