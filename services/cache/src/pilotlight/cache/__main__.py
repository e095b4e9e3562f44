"""``python -m pilotlight.cache``."""

import sys

from pilotlight.cache.app import build
from pilotlight.cache.settings import CacheSettings
from pilotlight.common.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("cache", CacheSettings, build))
