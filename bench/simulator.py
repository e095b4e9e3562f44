"""How long the simulator takes for a million requests: ``make bench-simulator``.

The scenario ``sixty-four``, 64 models on 32 devices, under our own policy, in one process: seconds
of processor time for the whole run, and what came of the requests. One JSON document, in the form
of ``bench/results``. Everything but the time is the same on every machine.
"""

import argparse
import json
import os
from pathlib import Path

from scheduler import provenance

from pilotlight.cli.cluster_simulation import record
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import CONTENDERS, read_builtin

SCENARIO, POLICY = "sixty-four", "pilotlight"


def main() -> None:
    """Run it so many times, and print or write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="of the document; else it is printed")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    results = [
        Simulation(read_builtin(SCENARIO), CONTENDERS[POLICY], 1).run() for _ in range(asked.runs)
    ]
    document = {
        "benchmark": "simulator",
        "measurements": [
            {
                "what": f"processor time of the scenario {SCENARIO} under {POLICY}, one process",
                **provenance(),
                "command": "make bench-simulator",
                "load": f"load average {load:.1f} before it",
                "unit": "s",
                "samples": {"cpu_s": [round(one.cpu_s, 1) for one in results]},
                "result": record(results[0]),
            }
        ],
    }
    text = json.dumps(document, indent=2) + "\n"
    if asked.out is None:
        print(text, end="")
    else:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
