"""``python -m pilotlight.loader``."""

import sys

import pilotlight.common.plain_logs  # noqa: F401 # pyright: ignore[reportUnusedImport]
from pilotlight.common.service import run_service
from pilotlight.loader.app import build
from pilotlight.loader.settings import LoaderSettings

if __name__ == "__main__":
    sys.exit(run_service("loader", LoaderSettings, build))
