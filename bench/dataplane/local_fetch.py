"""A model from a file that the system has in memory into the host pool: GB/s and processor time,
beside what the machine can do.

Needs no network and no privileges. Each contender is a process of its own, round by round, in
alternating order; the first round does not count.

- ``read``: ``preadv`` by as many threads as there are cores, 1 MiB each into a buffer, not hashed
  and put nowhere: a bound.
- ``place``: the same into shared memory that was mapped and backed before.
- ``pilotlight``: a loader's fetch into a new pool, everything but its bus.
- ``pilotlight ahead``: the same into a pool that has taken its memory before
  (``PILOTLIGHT_POOL_AHEAD``).
- ``python 4`` and ``python 16``: without the library, with so many reads to begin with: how it
  was before.
- ``runai``: runai-model-streamer, where it is installed (``--peers-python`` names another
  interpreter that has it), with its defaults.
"""

import argparse
import asyncio
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from bare_loader import (
    LAYER_BYTES,
    MIB,
    SHARED_MEMORY,
    Quiet,
    bytes_of,
    cpu_s,
    fetch_tools,
    floor,
    machine,
    make_model,
    model_of,
    opener,
    sources_for,
)

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.free_memory import MemoryFacts
from pilotlight.checkpoint.manifest import decode, encode
from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.file_reads import native_reads
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_pages import PoolPages
from pilotlight.policy.ids import InstanceId

FILE = "model.safetensors"
OURS = ("pilotlight", "pilotlight ahead", "python 4", "python 16")
BOUNDS = ("read", "place")
FLOOR_GB_PER_S = 8.0
FLOOR_OF_RUNAI = 1.1
FLOOR_CORES = 16
TIMEOUT_S = 600.0


async def fetch(folder: Path, pool_path: Path, way: str) -> dict[str, float]:
    """One fetch by a node that has nothing yet."""
    clock, quiet, native = SystemClock(), Quiet(), way.startswith("pilotlight")
    sources = sources_for(folder.as_uri(), "")
    checkpoint = await asyncio.to_thread(
        lambda: read_checkpoint(sources.pin(folder.as_uri()).source)
    )
    manifest = decode(encode(checkpoint.manifest))
    total_bytes = bytes_of(manifest)
    model = model_of(folder.as_uri(), manifest, checkpoint.source_version)
    pool = HostPool.open(pool_path, total_bytes + 256 * MIB, clock)
    local = None if native else int(way.split()[1])
    tools = fetch_tools(
        pool, manifest, opener(sources), native=native, reads=local or 4, local=local
    )
    library = native_reads()
    if way == "pilotlight ahead" and library is not None:
        pages = PoolPages(
            pool, library, lambda: False, lambda: MemoryFacts(None, unused_bytes=1 << 60)
        )
        await pages.start()
        await asyncio.to_thread(pages.join, TIMEOUT_S)
    copies = HostCopies(tools, quiet, quiet)
    began_s, began_cpu_s = clock.monotonic_s(), cpu_s()
    holder = copies.claim(model, range(len(manifest.parts)), InstanceId("bench"), leased=True)
    async for _ in copies.ready_parts(holder):
        pass
    figures = {
        "seconds": clock.monotonic_s() - began_s,
        "cpu_s": cpu_s() - began_cpu_s,
        "bytes": float(total_bytes),
    }
    await copies.stop()
    pool.close(remove=True)
    return figures


def bound(file: Path, place: Path | None) -> dict[str, float]:
    """Reads by one thread a core, put into a mapping of ``place`` that was written to before, or
    nowhere.
    """
    clock, size_bytes = SystemClock(), file.stat().st_size
    memory: mmap.mmap | None = None
    if place is not None:
        with place.open("w+b") as pool:
            pool.truncate(size_bytes)
            memory = mmap.mmap(pool.fileno(), size_bytes)
        for start in range(0, size_bytes, mmap.PAGESIZE):
            memory[start] = 1
    descriptor, starts, lock = (
        os.open(file, os.O_RDONLY),
        iter(range(0, size_bytes, MIB)),
        threading.Lock(),
    )

    def read() -> None:
        buffer = memoryview(memory) if memory is not None else memoryview(bytearray(MIB))
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            stop = min(start + MIB, size_bytes)
            os.preadv(
                descriptor,
                [buffer[start:stop] if memory is not None else buffer[: stop - start]],
                start,
            )

    threads = [threading.Thread(target=read) for _ in os.sched_getaffinity(0)]
    began_s, began_cpu_s = clock.monotonic_s(), cpu_s()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "seconds": clock.monotonic_s() - began_s,
        "cpu_s": cpu_s() - began_cpu_s,
        "bytes": float(size_bytes),
    }


def run_alone(way: str, folder: Path) -> dict[str, float]:
    """One contender, in this process."""
    path = SHARED_MEMORY / f"pilotlight-bench-{os.getpid()}.pool"
    try:
        if way in BOUNDS:
            return bound(folder / FILE, path if way == "place" else None)
        return asyncio.run(fetch(folder, path, way))
    finally:
        path.unlink(missing_ok=True)


def run_child(command: list[str]) -> dict[str, float] | str:
    """What a child measured of itself, or the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-500:]


def medians_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of the rounds that count."""
    return {
        "gb_per_s": round(
            statistics.median(run["bytes"] / run["seconds"] / 1e9 for run in runs), 2
        ),
        "cpu_s_per_gib": round(
            statistics.median(run["cpu_s"] / run["bytes"] * 2**30 for run in runs), 3
        ),
    }


def floors_of(medians: dict[str, dict[str, float]], cores: int) -> dict[str, Any]:
    """What the issue asks for, where there are the cores."""
    ours = medians["pilotlight ahead"]
    floors = {
        "CPU seconds per GiB, of the way before": floor(
            ours["cpu_s_per_gib"],
            at_most=min(medians[way]["cpu_s_per_gib"] for way in ("python 4", "python 16")),
        )
    }
    if cores >= FLOOR_CORES:
        floors["GB/s from the page cache"] = floor(ours["gb_per_s"], at_least=FLOOR_GB_PER_S)
    if "runai" in medians:
        floors["GB/s of the Run:ai streamer's"] = floor(
            round(ours["gb_per_s"] / medians["runai"]["gb_per_s"], 2), at_least=FLOOR_OF_RUNAI
        )
    return floors


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib",
        type=int,
        default=4096,
        help="size of the model; three times as much memory is needed",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the model's file is made; the system must be able to keep it in memory",
    )
    parser.add_argument(
        "--peers-python", default=sys.executable, help="an interpreter with runai-model-streamer"
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure everyone."""
    options = parse_options()
    if options.only:
        print(json.dumps(run_alone(options.only, options.folder)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as top:
        folder = Path(top)
        make_model(folder, options.mib, 4 * LAYER_BYTES)
        commands = {
            way: [sys.executable, __file__, "--only", way, "--folder", top]
            for way in (*BOUNDS, *OURS)
        }
        commands["runai"] = [
            options.peers_python,
            str(Path(__file__).with_name("fetch_peers.py")),
            "runai",
            str(folder / FILE),
        ]
        found: dict[str, list[dict[str, float]]] = {way: [] for way in commands}
        failed: dict[str, str] = {}
        for number in range(options.rounds + 1):
            order = list(commands) if number % 2 == 0 else list(reversed(commands))
            for way in order:
                if way in failed:
                    continue
                run = run_child(commands[way])
                if isinstance(run, str):
                    failed[way] = run
                    continue
                print(f"{way}: {run['bytes'] / run['seconds'] / 1e9:.2f} GB/s", file=sys.stderr)
                if number:
                    found[way].append(run)
    medians = {way: medians_of(runs) for way, runs in found.items() if way not in failed and runs}
    cores = len(os.sched_getaffinity(0))
    floors = floors_of(medians, cores)
    print(
        json.dumps(
            {
                "machine": machine(),
                "floors": floors,
                "medians": medians,
                "failed": failed,
                "runs": found,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
