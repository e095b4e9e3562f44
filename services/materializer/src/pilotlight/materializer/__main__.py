"""``python -m pilotlight.materializer``."""

import sys

from pilotlight.common.service import run_service
from pilotlight.materializer.app import build
from pilotlight.materializer.settings import MaterializerSettings

if __name__ == "__main__":
    sys.exit(run_service("materializer", MaterializerSettings, build))
