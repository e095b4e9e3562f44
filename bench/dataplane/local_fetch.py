"""A model from a file that the system has in memory into the host pool: GB/s and processor time,
beside what the machine can do.

Needs no network and no privileges; a NATS server for the rows of a whole loader. Each contender is
a process of its own, round by round, in alternating order. Rounds go on until ``--rounds`` are done
or the next one would end after ``--limit-s``; the first does not count where two came after it.

- ``read``: ``preadv`` by as many threads as there are cores, 1 MiB each into a buffer, not hashed
  and put nowhere: a bound.
- ``place``: the same into shared memory that was mapped and backed before.
- ``pilotlight``: a loader's fetch into a new pool, everything but its bus.
- ``pilotlight ahead``: the same into a pool that has taken its memory before
  (``PILOTLIGHT_POOL_AHEAD``).
- ``python``: the same without the library, four reads to begin with: how it was before, and is
  where the library cannot be had.
- ``loader``, ``loader ahead``: what a worker meets, from the lease to the last part
  (``loader_process.py``).
- ``runai``: runai-model-streamer, where it is installed (``--peers-python`` names another
  interpreter that has it), with its defaults.

Prints one JSON document in the form of ``bench/results``, and writes it to ``--out`` after every
round. The exit status is 1 when a floor was missed; floors of speed are for 16 cores.
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
from contextlib import suppress
from datetime import UTC, datetime
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
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_pages import PoolPages
from pilotlight.native.library import library, unavailable
from pilotlight.policy.ids import InstanceId

HERE = Path(__file__).resolve().parent
FILE = "model.safetensors"
PYTHON_READS = 4
OURS = ("pilotlight", "pilotlight ahead", "python")
LOADERS = {"loader": [], "loader ahead": ["--ahead"]}
BOUNDS = ("read", "place")
FLOOR_GB_PER_S = 8.0
FLOOR_OF_RUNAI = 1.1
FLOOR_CORES = 16
TIMEOUT_S = 300.0
DETAILS = ("granted_ms", "first_byte_ms", "first_part_ms", "after_last_byte_ms")
NOT_RECORDED = "not recorded"

Runs = dict[str, list[dict[str, float]]]


async def fetch(folder: Path, pool_path: Path, way: str) -> dict[str, float]:
    """One fetch by a node that has nothing yet."""
    clock, quiet, native = SystemClock(), Quiet(), way != "python"
    sources = sources_for(folder.as_uri(), "")
    checkpoint = await asyncio.to_thread(
        lambda: read_checkpoint(sources.pin(folder.as_uri()).source)
    )
    manifest = decode(encode(checkpoint.manifest))
    total_bytes = bytes_of(manifest)
    model = model_of(folder.as_uri(), manifest, checkpoint.source_version)
    pool = HostPool.open(pool_path, total_bytes + 256 * MIB, clock)
    local = None if native else PYTHON_READS
    tools = fetch_tools(pool, manifest, opener(sources), native=native, local=local)
    if native and tools.native is None:
        raise SystemExit(unavailable())
    if way == "pilotlight ahead":
        pages = PoolPages(
            pool, library(), lambda: False, lambda: MemoryFacts(None, unused_bytes=1 << 60)
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


def commands_for(folder: Path, peers_python: str) -> dict[str, list[str]]:
    """Each contender's command."""
    own = [sys.executable, __file__, "--folder", str(folder), "--only"]
    loader = [sys.executable, str(HERE / "loader_process.py"), str(folder)]
    peer = [peers_python, str(HERE / "fetch_peers.py"), "runai", str(folder / FILE)]
    return {
        **{way: [*own, way] for way in (*BOUNDS, *OURS)},
        **{way: [*loader, *more] for way, more in LOADERS.items()},
        "runai": peer,
    }


def one_round(commands: dict[str, list[str]], runs: Runs, failed: dict[str, str]) -> None:
    """One run of each that has not failed before, added to ``runs``."""
    for way, command in commands.items():
        if way in failed:
            continue
        run = run_child(command)
        if isinstance(run, str):
            failed[way] = run
            print(f"{way}: failed", file=sys.stderr)
            continue
        speed, cpu = gb_per_s(run), cpu_s_per_gib(run)
        print(f"{way}: {speed} GB/s, {cpu} CPU s per GiB", file=sys.stderr, flush=True)
        runs.setdefault(way, []).append(run)


def gb_per_s(run: dict[str, float]) -> float:
    """How fast a run was."""
    return round(run["bytes"] / run["seconds"] / 1e9, 3)


def cpu_s_per_gib(run: dict[str, float]) -> float:
    """What a run cost."""
    return round(run["cpu_s"] / run["bytes"] * 2**30, 3)


def floors_of(speeds: dict[str, float], cpu: dict[str, float], cores: int) -> dict[str, Any]:
    """What is asked for; speeds where there are the cores."""
    floors: dict[str, Any] = {}
    for way in OURS[:2]:
        if way in cpu and "python" in cpu:
            floors[f"{way}: CPU s per GiB, of Python's"] = floor(cpu[way], at_most=cpu["python"])
    for way in ("pilotlight ahead", "loader ahead"):
        if cores >= FLOOR_CORES and way in speeds:
            floors[f"{way}: GB/s"] = floor(speeds[way], at_least=FLOOR_GB_PER_S)
        if way in speeds and "runai" in speeds:
            of_runai = round(speeds[way] / speeds["runai"], 2)
            floors[f"{way}: of Run:ai's GB/s"] = floor(of_runai, at_least=FLOOR_OF_RUNAI)
    return floors


def document_of(
    all_runs: Runs, failed: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    """All that was measured, in the form of ``bench/results``."""
    counted = {way: runs[1:] if len(runs) > 2 else runs for way, runs in all_runs.items()}
    about, (commit, _, commit_date) = machine(), options.commit.partition(" ")
    memory = f"{about['memory_gib']} GiB, Linux {about['kernel']}, Python {about['python']}"
    facts = {
        "command": f"make bench-local-fetch MIB={options.mib}",
        "machine": f"{about['cores']} cores ({about['cpu']}), {memory}",
        "load": f"load average {about['load_average']} at its end",
        "commit": commit or NOT_RECORDED,
        "commit_date": commit_date or NOT_RECORDED,
        "date": datetime.now(UTC).date().isoformat(),
    }

    def measured(what: str, unit: str, samples: dict[str, list[float]]) -> dict[str, Any]:
        medians = {name: round(statistics.median(found), 3) for name, found in samples.items()}
        return {"what": what, **facts, "unit": unit, "samples": samples, "medians": medians}

    size = f"{options.mib} MiB in the page cache"
    speed = {way: [gb_per_s(run) for run in runs] for way, runs in counted.items()}
    cpu = {way: [cpu_s_per_gib(run) for run in runs] for way, runs in counted.items()}
    measurements = [
        measured(f"{size}, into memory", "GB/s", speed),
        measured(f"{size}, into memory, processor time", "CPU s per GiB", cpu),
    ]
    for way in LOADERS:
        if found := counted.get(way):
            samples = {name: [round(run[name], 2) for run in found] for name in DETAILS}
            measurements.append(measured(f"{size}, {way}: from the lease", "ms", samples))
    medians = [
        {way: statistics.median(samples) for way, samples in found.items()}
        for found in (speed, cpu)
    ]
    return {
        "benchmark": "local_fetch",
        "floors": floors_of(medians[0], medians[1], about["cores"]),
        "failed": failed,
        "library": unavailable() or library().path.name,
        "measurements": measurements,
    }


def commit() -> str:
    """Hash and date of this checkout; empty where it is none."""
    command = ["git", "-C", str(HERE), "log", "-1", "--format=%h %cs", "--abbrev=7"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=140.0, help="begin no round past it")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the model's file is made; the system must be able to keep it in memory",
    )
    parser.add_argument(
        "--peers-python", default=sys.executable, help="an interpreter with runai-model-streamer"
    )
    parser.add_argument("--out", type=Path, help="a file for the document")
    parser.add_argument(
        "--commit",
        default=commit(),
        help="hash and date, where this is no checkout: 'abc1234 2026-01-31'",
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure everyone."""
    options = parse_options()
    if options.only:
        print(json.dumps(run_alone(options.only, options.folder)))
        return
    clock, runs, failed = SystemClock(), Runs(), dict[str, str]()
    began_s, document = clock.monotonic_s(), dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=options.folder) as top:
        make_model(Path(top), options.mib, 4 * LAYER_BYTES)
        commands = commands_for(Path(top), options.peers_python)
        for number in range(options.rounds):
            round_s = clock.monotonic_s()
            order = list(commands) if number % 2 == 0 else list(reversed(commands))
            one_round({way: commands[way] for way in order}, runs, failed)
            document = document_of(runs, failed, options)
            if options.out is not None:
                options.out.write_text(json.dumps(document, indent=2) + "\n")
            now_s = clock.monotonic_s()
            if now_s + (now_s - round_s) > began_s + options.limit_s:
                break
    print(json.dumps(document, indent=2))
    for name, found in document["floors"].items():
        met = "reached" if found["met"] else "MISSED"
        print(f"{met}  {name}: {found['measured']}", file=sys.stderr)
    if failed or not all(found["met"] for found in document["floors"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
