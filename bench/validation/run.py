"""Predictions and the simulator against a real cluster: ``make bench-validation``. Needs root.

Three nodes in network namespaces behind links of 12, 25 and 50 Mbit/s (``tc``), a store and the
services in two more. Two parts:

- ``starts``: models of different sizes start, alone and several at once. The time to first token
  that the decision of a start predicts, before it begins, against what the client measures.
- ``trace``: requests for a few models come as in a trace; the simulator runs the same nodes,
  models and requests. The share of requests within the SLO, of both, over some traces.

Prints one JSON document.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "dataplane")]

from cold_start import machine  # noqa: E402
from netns import PREFIX, address, network  # noqa: E402
from netns import Host as Namespace  # noqa: E402
from replayed import validate_traces  # noqa: E402
from starts import validate_starts  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")
RATES = ("12mbit", "25mbit", "50mbit")
"""So slow that a small machine with other work still keeps up with them."""
PARTS = ("starts", "trace")


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All parts, one after the other."""
    prefix = asked.inside
    hosts = [Namespace(f"{prefix}-{at}", address(at)) for at in range(2 + len(RATES))]
    found: dict[str, Any] = {"machine": machine(), "rates": list(RATES), "load_before": _load()}
    for part in asked.parts.split(","):
        with tempfile.TemporaryDirectory(prefix="pilotlight-validation-") as name:
            folder = Path(name)
            # PostgreSQL runs as another user, and passes through.
            await asyncio.to_thread(folder.chmod, 0o711)
            found[part] = await PART_OF[part](folder, hosts, asked)
            found[part]["load_after"] = _load()
    return found


def _load() -> str:
    return "load average " + ", ".join(f"{one:.1f}" for one in os.getloadavg())


async def starts(folder: Path, hosts: list[Namespace], asked: argparse.Namespace) -> dict[str, Any]:
    """Predictions of starts."""
    return await validate_starts(folder, hosts, RATES, asked.starts, asked.log)


async def trace(folder: Path, hosts: list[Namespace], asked: argparse.Namespace) -> dict[str, Any]:
    """The simulator beside the system."""
    return await validate_traces(folder, hosts, RATES, asked.seeds, asked.seconds, asked.log)


PART_OF = {"starts": starts, "trace": trace}


def main() -> None:
    """Make the namespaces, and go on within the first of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--starts", type=int, default=30, help="from the store that count")
    parser.add_argument("--seeds", type=int, default=4, help="traces")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each trace")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the store")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(asyncio.run(measure(asked)), indent=2))
        return
    prefix = f"{PREFIX}{os.getpid()}"
    try:
        with network([None, None, *RATES]) as hosts:
            command = hosts[0].inside(sys.executable, *sys.argv, "--inside", prefix)
            status = subprocess.run(command, check=False).returncode
    finally:
        # Of loaders that were killed with their namespaces.
        for pool in SHARED_MEMORY.glob(f"pilotlight-{prefix}-*.pool"):
            pool.unlink()
    sys.exit(status)


if __name__ == "__main__":
    main()
