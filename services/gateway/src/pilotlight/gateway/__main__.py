"""``python -m pilotlight.gateway``."""

import sys

from pilotlight.common.service import run_service
from pilotlight.gateway.app import build
from pilotlight.gateway.settings import GatewaySettings

if __name__ == "__main__":
    sys.exit(run_service("gateway", GatewaySettings, build))
