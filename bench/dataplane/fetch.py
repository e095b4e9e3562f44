"""A fetch into the host pool beside what others need for the same bytes: part of ``make
bench-dataplane``.

A model of ``--mib`` MiB from three places: S3 (``--s3``, by default Ceph's server, started here), a
file that the system has in memory (``warm``), and the same file from the disk (``cold``: the system
was told to forget it). Everyone brings it into memory: we into a host pool on tmpfs, hashed;
runai-model-streamer and boto3 into buffers; ``aws s3 cp`` and ``cp`` into tmpfs. One after the
other, in alternating order, several rounds; each in a process of its own, whose start is not
counted but for the two commands.

Prints one JSON document: the machine, medians, what we reach of the best, and every single figure.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
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
from netns import exit_on_sigterm
from store import MODEL_URI, ceph, upload

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import decode, encode
from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.ids import InstanceId

HERE = Path(__file__).resolve().parent
FILE = "model.safetensors"
PEERS = {"s3": ("boto3", "aws", "runai"), "warm": ("runai", "cp"), "cold": ("runai", "cp")}
REFERENCES = ("cp",)
"""Read no models: what the machine can do."""
FLOOR_OF_BEST = 0.9
TIMEOUT_S = 300.0


async def fetch(uri: str, pool_path: Path) -> dict[str, float]:
    """One fetch by a node that has nothing yet, everything of a loader but its bus."""
    clock, quiet = SystemClock(), Quiet()
    sources = sources_for(uri, os.environ.get("AWS_ENDPOINT_URL", ""))
    checkpoint = await asyncio.to_thread(lambda: read_checkpoint(sources.pin(uri).source))
    # As it comes from the object store.
    manifest = decode(encode(checkpoint.manifest))
    total_bytes = bytes_of(manifest)
    model = model_of(uri, manifest, checkpoint.source_version)
    pool = HostPool.open(pool_path, total_bytes + 256 * MIB, clock)
    tools = fetch_tools(pool, manifest, opener(sources))
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


@contextmanager
def s3_server(url: str | None, folder: Path, mib: int) -> Generator[str]:
    """The one that was given, or Ceph's, started here."""
    if url is not None:
        yield url
        return
    with ceph(folder, "127.0.0.1", (2 * mib + 1024) * MIB) as started:
        yield started


def forget(path: Path) -> None:
    """Have the system read a file from the disk again."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_child(command: list[str]) -> dict[str, float]:
    """What a child measured of itself."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions(python: str | None) -> dict[str, str]:
    """Of the peers, as their interpreter says."""
    if python is None:
        return {}
    done = subprocess.run(
        [python, str(HERE / "fetch_peers.py"), "versions"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def commands_for(scenario: str, folder: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Each contender's command."""
    uri = MODEL_URI if scenario == "s3" else folder.as_uri()
    place = f"{MODEL_URI}/{FILE}" if scenario == "s3" else str(folder / FILE)
    commands = {"pilotlight": [sys.executable, __file__, "--ours", uri]}
    if options.peers_python:
        peer = [options.peers_python, str(HERE / "fetch_peers.py")]
        commands |= {name: [*peer, name, place] for name in PEERS[scenario]}
    return commands


def measure(scenario: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of every program, in alternating order."""
    commands = commands_for(scenario, folder, options)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(options.rounds):
        order = list(commands) if number % 2 == 0 else list(reversed(commands))
        for name in order:
            if scenario == "cold":
                forget(folder / FILE)
            found[name].append(run_child(commands[name]))
            found[name][-1]["load_average"] = round(os.getloadavg()[0], 2)
            print(
                f"{scenario} {name}: {found[name][-1]['bytes'] / found[name][-1]['seconds'] / 1e6:.0f} MB/s",
                file=sys.stderr,
            )
    medians = {
        name: {
            "mb_per_s": round(
                statistics.median(run["bytes"] / run["seconds"] / 1e6 for run in runs), 1
            ),
            "cpu_s_per_gib": round(
                statistics.median(run["cpu_s"] / run["bytes"] * 2**30 for run in runs), 3
            ),
        }
        for name, runs in found.items()
    }
    others = {
        name: median["mb_per_s"]
        for name, median in medians.items()
        if name not in ("pilotlight", *REFERENCES)
    }
    best = max(others, key=lambda name: others[name], default=None)
    reached = round(medians["pilotlight"]["mb_per_s"] / others[best], 3) if best else None
    return {"medians": medians, "best_other": best, "of_the_best": reached, "runs": found}


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scenarios", default="s3,warm,cold")
    parser.add_argument(
        "--s3",
        help="endpoint of an S3 server; credentials from the environment. By default one is started",
    )
    parser.add_argument("--peers-python", help="an interpreter with what fetch_peers.py asks for")
    parser.add_argument(
        "--folder", type=Path, help="where the model's file is made: on the disk to be measured"
    )
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure every scenario."""
    options = parse_options()
    if options.ours:
        pool_path = SHARED_MEMORY / f"pilotlight-bench-{os.getpid()}.pool"
        try:
            print(json.dumps(asyncio.run(fetch(options.ours, pool_path))))
        finally:
            pool_path.unlink(missing_ok=True)
        return
    exit_on_sigterm()
    scenarios = options.scenarios.split(",")
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        folder = top / "model"
        folder.mkdir()
        make_model(folder, options.mib, 4 * LAYER_BYTES)
        if "s3" in scenarios:
            # Not on the disk, which is busy with the model's file.
            ceph = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
            os.environ["AWS_ENDPOINT_URL"] = stack.enter_context(
                s3_server(options.s3, ceph, options.mib)
            )
            os.environ.setdefault("AWS_REGION", "us-east-1")
            os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
            upload(folder, os.environ["AWS_ENDPOINT_URL"])
        measured = {name: measure(name, folder, options) for name in scenarios}
    floors = {
        f"{name}: MB/s of the best": floor(found["of_the_best"], at_least=FLOOR_OF_BEST)
        for name, found in measured.items()
        if found["of_the_best"] is not None
    }
    document = {
        "machine": machine(),
        "peers": versions(options.peers_python),
        "floors": floors,
        "scenarios": measured,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
