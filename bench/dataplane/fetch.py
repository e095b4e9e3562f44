"""A fetch into the host pool beside what others need for the same bytes: part of ``make bench-dataplane``.

A model of ``--mib`` MiB from three places: S3 (``--s3``, by default Ceph's server, started here), a file that the system has in memory
(``warm``), and the same file from the disk (``cold``: the system was told to forget it). Everyone brings it into memory: we into a
host pool on tmpfs, hashed; runai-model-streamer and boto3 into buffers; ``aws s3 cp`` and ``cp`` into tmpfs. One after the other, in
alternating order, several rounds; each in a process of its own, whose start is not counted but for the two commands.

Prints one JSON document: the machine, medians, what we reach of the best, and every single figure.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import obstore

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import Manifest, decode, encode
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.bucket import ensure_bucket
from pilotlight.common.clock import SystemClock
from pilotlight.common.faults import Faults
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.s3 import s3_store
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.dataplane.chunk_fetch import Distrusted
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.lanes import LaneLimits, Lanes
from pilotlight.dataplane.links import Links
from pilotlight.dataplane.model_fetch import FetchTools
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.readers import Readers
from pilotlight.dataplane.source_origin import SourceOrigin
from pilotlight.policy.types import Digest, InstanceId, Model, ModelName, OriginKind, Phase, ScalingBounds, Slo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MIB = 1 << 20
FILE = "model.safetensors"
BUCKET = "bench"
PEERS = {"s3": ("boto3", "aws", "runai"), "warm": ("runai", "cp"), "cold": ("runai", "cp")}
REFERENCES = ("cp",)
"""Read no models: what the machine can do."""
TIMEOUT_S = 300.0


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def make_model(folder: Path, mib: int) -> None:
    """A checkpoint of about this size."""
    layers = max(1, mib // 128)
    config = tiny_config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, vocab_size=512, num_attention_heads=16
    )
    for name, data in tiny_files(config).items():
        (folder / name).write_bytes(data)


class Bare:
    """``Manifests`` with nothing learned."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    async def get(self, model: Model) -> Manifest:
        return self.manifest

    async def latest(self, model: Model) -> Manifest:
        return self.manifest

    def learned(self, model: Model, part: int, digests: tuple[Digest, ...], disputed: object) -> None: ...


class Quiet:
    """An observer and owner that has nothing to say."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def on_copies_changed(self) -> None: ...
    def on_fetched(self, instance_id: InstanceId, phases: tuple[Phase, ...]) -> None: ...
    def on_fetch_ended(self, seconds: float, size_bytes: int, code: str) -> None: ...
    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None: ...
    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None: ...


def settings_for(uri: str) -> ModelRootsSettings:
    """What a loader would be told."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return ModelRootsSettings(model_roots=uri, s3_endpoint=endpoint, s3_allow_http=True)


async def fetch(uri: str, pool_path: Path, reads: int, threads: int) -> dict[str, float]:
    """One fetch by a node that has nothing yet, everything of a loader but its bus."""
    clock, quiet = SystemClock(), Quiet()
    sources = Sources(settings_for(uri), Patience())
    checkpoint = await asyncio.to_thread(lambda: read_checkpoint(sources.pin(uri).source))
    # As it comes from the object store.
    manifest = decode(encode(checkpoint.manifest))
    total_bytes = sum(part.image_bytes for part in manifest.parts)
    model = Model(
        name=ModelName("bench"),
        uri=uri,
        revision=None,
        source_version=checkpoint.source_version,
        digest=manifest.digest(),
        text_digest=Digest("0" * 64),
        dtype=checkpoint.run_dtype,
        spec=checkpoint.spec,
        slo=Slo(ttft_ms=1000, tpot_ms=100),
        scaling=ScalingBounds(),
    )
    pool = HostPool.open(pool_path, total_bytes + 256 * MIB, clock)
    tools = FetchTools(
        pool=pool,
        readers=Readers(threads, 10.0),
        manifests=Bare(manifest),
        open_source=lambda model, manifest: SourceOrigin(sources.open(model.uri), manifest, model.uri),
        lanes=Lanes(LaneLimits(least=reads, most=threads), Links(None, clock), clock),
        distrusted=Distrusted(clock),
        faults=Faults.parse(""),
        clock=clock,
        process="bench",
    )
    copies = HostCopies(tools, quiet, quiet)
    began_s, began_cpu_s = clock.monotonic_s(), cpu_s()
    holder = copies.hold(model, range(len(manifest.parts)), InstanceId("bench"), leased=True)
    async for _ in copies.ready_parts(holder):
        pass
    figures = {"seconds": clock.monotonic_s() - began_s, "cpu_s": cpu_s() - began_cpu_s, "bytes": float(total_bytes)}
    await copies.stop()
    pool.close(remove=True)
    return figures


def cpu_s() -> float:
    """Processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def s3_server(url: str | None, folder: Path, mib: int) -> Generator[str]:
    """The one that was given, or Ceph's, started here."""
    if url is not None:
        yield url
        return
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import ceph_server

    os.environ.update(AWS_ACCESS_KEY_ID=ceph_server.ACCESS_KEY, AWS_SECRET_ACCESS_KEY=ceph_server.SECRET_KEY)
    with ceph_server.running_ceph(folder, store_bytes=(2 * mib + 1024) * MIB) as server:
        yield server.url


def upload(folder: Path) -> None:
    """Put the model into a bucket."""
    settings = settings_for(f"s3://{BUCKET}")
    asyncio.run(ensure_bucket(f"s3://{BUCKET}", settings))
    bucket = s3_store(settings, BUCKET, read_timeout_s=120)
    for file in sorted(folder.iterdir()):
        obstore.put(bucket, f"model/{file.name}", file)


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


def commands_for(scenario: str, folder: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Each contender's command."""
    uri = f"s3://{BUCKET}/model" if scenario == "s3" else folder.as_uri()
    place = f"s3://{BUCKET}/model/{FILE}" if scenario == "s3" else str(folder / FILE)
    ours = [sys.executable, __file__, "--ours", uri, "--reads", str(options.reads), "--threads", str(options.threads)]
    commands = {"pilotlight": ours}
    if options.peers_python:
        peer = [options.peers_python, str(HERE / "fetch_peers.py")]
        commands |= {name: [*peer, name, place] for name in PEERS[scenario]}
    return commands


def measure(scenario: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of everyone, in alternating order."""
    commands = commands_for(scenario, folder, options)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(options.rounds):
        order = list(commands) if number % 2 == 0 else list(reversed(commands))
        for name in order:
            if scenario == "cold":
                forget(folder / FILE)
            found[name].append(run_child(commands[name]))
            print(f"{scenario} {name}: {found[name][-1]['bytes'] / found[name][-1]['seconds'] / 1e6:.0f} MB/s", file=sys.stderr)
    medians = {
        name: {
            "mb_per_s": round(statistics.median(run["bytes"] / run["seconds"] / 1e6 for run in runs), 1),
            "cpu_s_per_gib": round(statistics.median(run["cpu_s"] / run["bytes"] * 2**30 for run in runs), 3),
        }
        for name, runs in found.items()
    }
    others = {name: median["mb_per_s"] for name, median in medians.items() if name not in ("pilotlight", *REFERENCES)}
    best = max(others, key=lambda name: others[name], default=None)
    reached = round(medians["pilotlight"]["mb_per_s"] / others[best], 3) if best else None
    return {"medians": medians, "best_other": best, "of_the_best": reached, "runs": found}


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scenarios", default="s3,warm,cold")
    parser.add_argument("--s3", help="endpoint of an S3 server; credentials from the environment. By default one is started")
    parser.add_argument("--peers-python", help="an interpreter with boto3, awscli and runai-model-streamer[s3]")
    parser.add_argument("--reads", type=int, default=4, help="PILOTLIGHT_FETCH_READS")
    parser.add_argument("--threads", type=int, default=16, help="PILOTLIGHT_FETCH_THREADS")
    parser.add_argument("--folder", type=Path, help="where the model's file is made: on the disk to be measured")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure every scenario."""
    options = parse_options()
    if options.ours:
        pool_path = Path(f"/dev/shm/pilotlight-bench-{os.getpid()}.pool")
        try:
            print(json.dumps(asyncio.run(fetch(options.ours, pool_path, options.reads, options.threads))))
        finally:
            pool_path.unlink(missing_ok=True)
        return
    scenarios = options.scenarios.split(",")
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        folder = top / "model"
        folder.mkdir()
        make_model(folder, options.mib)
        if "s3" in scenarios:
            # Not on the disk, which is busy with the model's file.
            ceph = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            os.environ["AWS_ENDPOINT_URL"] = stack.enter_context(s3_server(options.s3, ceph, options.mib))
            os.environ.setdefault("AWS_REGION", "us-east-1")
            os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
            upload(folder)
        document = {"machine": machine(), "scenarios": {name: measure(name, folder, options) for name in scenarios}}
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
