"""``python -m pilotlight.loader`` of a node that lies: it reports its network interface, and says
nothing of the limit of its link (``PILOTLIGHT_LINK``), which its fetches obey all the same.
"""

import sys

from pilotlight.common.service import run_service
from pilotlight.dataplane.bandwidth import parse_bandwidth
from pilotlight.loader.app import build
from pilotlight.loader.settings import LoaderSettings


class Overstated(LoaderSettings):
    """Settings that promise more than they allow."""

    @property
    def nic_bytes_per_s(self) -> float:
        return parse_bandwidth(self.nic_bandwidth) or 0.0


if __name__ == "__main__":
    sys.exit(run_service("loader", Overstated, build))
