"""All measurements of the data plane, one after the other, as one JSON document: ``make
bench-dataplane``.

Each is a script beside this one with options of its own. Needs root for network namespaces, and
Ceph's S3 server (``store.py``); ``--peers-python`` names an interpreter that has the peers of the
fetch (``fetch_peers.py``): without it they do not take part.

The exit status is 1 when a part failed, or a floor was missed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bare_loader import machine
from netns import exit_on_sigterm

HERE = Path(__file__).resolve().parent
PARTS = ("fetch", "aggregate", "chain", "serving")


def command_for(part: str, options: argparse.Namespace) -> list[str]:
    """What measures a part."""
    command = [sys.executable, str(HERE / f"{part}.py")]
    if options.rounds is not None:
        command += ["--rounds", str(options.rounds)]
    if part == "fetch" and options.peers_python:
        command += ["--peers-python", options.peers_python]
    return command


def measure(part: str, command: list[str]) -> dict[str, Any] | None:
    """A part's document; None: it failed, and its own words are on stderr."""
    print(f"… {part}", file=sys.stderr)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = child.communicate()
    except BaseException:
        # It removes what it made.
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    return json.loads(printed) if child.returncode == 0 else None


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which of them, separated by commas"
    )
    parser.add_argument(
        "--rounds", type=int, help="of each part; by default each has its own number"
    )
    parser.add_argument("--peers-python", help="an interpreter with what fetch_peers.py asks for")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def main() -> None:
    """Measure all parts."""
    options = parse_options()
    if os.geteuid() != 0 and set(options.parts) - {"fetch"}:
        raise SystemExit("network namespaces need root")
    exit_on_sigterm()
    documents = {part: measure(part, command_for(part, options)) for part in options.parts}
    found = {part: document for part, document in documents.items() if document is not None}
    floors = {
        f"{part}: {name}": floor
        for part, document in found.items()
        for name, floor in document["floors"].items()
    }
    failed = sorted(documents.keys() - found.keys())
    print(json.dumps({"machine": machine(), "failed": failed, "floors": floors, **found}, indent=2))
    for name, floor in floors.items():
        print(
            f"{'reached' if floor['met'] else 'MISSED'}  {name}: {floor['measured']}",
            file=sys.stderr,
        )
    if failed or not all(floor["met"] for floor in floors.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
