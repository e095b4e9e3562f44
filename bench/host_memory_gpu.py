"""What it takes an engine to register the host pool, by the kind of its memory: ``make
bench-host-memory-gpu``, a line of JSON for each measurement.

Each kind has a process of its own (``host_memory_job.py``), and says what the system allowed:

* ``tmpfs``: a file of ordinary pages, mapped shared, as the host pool is;
* ``tmpfs-huge`` and ``memfd-huge``: the same with transparent huge pages, asked for by
  ``MADV_HUGEPAGE`` before pages come and by ``MADV_COLLAPSE`` afterwards;
* ``hugetlb``: a memfd of reserved huge pages, where this process may reserve them;
* ``driver``: made by the driver on the host's node, an allocation a slab, and shared by descriptor:
  imported in this process, in one with a context of the device, and in one without any, whose
  cores write to it; whether it maps without the driver;
* ``pageable``: not registered at all, through the copier's ring.

Of each: milliseconds a slab of 16, 64 and 256 MiB and seconds a GiB of 1 GiB that are faulted in
(``attach``) and back (``detach``), the rate of copies of ``--gib`` to the device, and the longest
time of a small kernel's launch and wait (``attach_longest_ms``; ``alone_longest_ms``: with nothing
beside it) while another thread of that process, or another process that has not touched the
memory, takes 1 GiB. A measurement that fails says why, and the others go on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from host_memory_job import KINDS, SLABS
from host_memory_kinds import GIB, HUGE_BYTES
from served_gpu import commit, machine

from pilotlight.native.device import LIBCUDA

JOB = Path(__file__).resolve().with_name("host_memory_job.py")
SHARED_MEMORY = "/dev/shm"
SECONDS, GRACE_S, SHARE = 110.0, 5.0, 1.5
"""All together; for a step that has begun; how many even shares of what is left a kind may take."""
TOLD_CHARACTERS = 400


def bytes_of(gib: float) -> int:
    """Whole slabs of all sizes, or where it is less than one of the longest, whole huge pages."""
    asked = int(gib * GIB)
    unit = max(SLABS) if asked >= max(SLABS) else HUGE_BYTES
    return max(1, asked // unit) * unit


def job(kind: str, seconds: float, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a kind's process says."""
    given = kind, asked.folder, bytes_of(asked.gib), asked.rounds, seconds, asked.driver
    command = [sys.executable, str(JOB), *map(str, given)]
    ended = ""
    # Files, and no pipes: what a process started may hold these open when it is gone.
    with TemporaryFile("w+") as said, TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=said, stderr=errors) as process:
            try:
                if status := process.wait(seconds + GRACE_S):
                    ended = f"exit status {status}"
            except subprocess.TimeoutExpired:
                process.kill()
                ended = "it took too long"
        said.seek(0)
        errors.seek(0)
        lines, why = said.read().splitlines(), errors.read()[-TOLD_CHARACTERS:]
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)
    if ended:
        yield {"what": f"{kind}: its process", "failed": f"{ended}: {why}"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, kind by kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--gib", type=float, default=4.0, help="of each kind, for copies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="until nothing else begins")
    parser.add_argument("--folder", default=SHARED_MEMORY, help="of the tmpfs's files")
    parser.add_argument("--commit", default=commit(), help="hash and date, where it is no checkout")
    parser.add_argument("--driver", default=LIBCUDA, help="its library")
    asked = parser.parse_args(arguments)
    changed, _, changed_date = asked.commit.partition(" ")
    about = {
        "command": "make bench-host-memory-gpu",
        "machine": machine(),
        "load": f"load average {os.getloadavg()[0]:.1f} before it",
        "commit": changed,
        "commit_date": changed_date,
        "date": datetime.now(UTC).date().isoformat(),
        "unit": "by the names: ms, seconds (s), s per GiB, GB/s",
    }
    until_s = time.perf_counter() + asked.seconds
    for number, kind in enumerate(asked.kinds):
        left_s = max(0.0, until_s - time.perf_counter() - GRACE_S)
        share_s = min(left_s, SHARE * left_s / (len(asked.kinds) - number))
        for line in job(kind, share_s, asked):
            print(json.dumps({**line, **about}), flush=True)


if __name__ == "__main__":
    main()
