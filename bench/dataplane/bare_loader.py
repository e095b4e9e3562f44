"""What a fetch needs of a loader, without its bus: for the benchmarks beside this file."""

import asyncio
import json
import math
import os
import platform
import resource
from collections.abc import Coroutine
from importlib import metadata
from pathlib import Path
from typing import Any

from pilotlight.checkpoint.checkpoint import read_checkpoint, read_chunk
from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.checkpoint.manifest import Manifest, decode, encode
from pilotlight.checkpoint.reader import FolderSource, Source
from pilotlight.checkpoint.safetensors import SINGLE_FILE
from pilotlight.checkpoint.strict_json import CONFIG_FILE
from pilotlight.checkpoint.testing import frame_header, tiny_config, tiny_tensors
from pilotlight.common.clock import SystemClock
from pilotlight.common.faults import Faults
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.phases import PhaseRecorder
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.dataplane.bandwidth import SourceLimits
from pilotlight.dataplane.chunk_fetch import Distrusted
from pilotlight.dataplane.fetch_tools import FetchTools
from pilotlight.dataplane.file_reads import native_reads
from pilotlight.dataplane.lanes import LaneLimits, Lanes
from pilotlight.dataplane.origin import Nearby
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.readers import Readers
from pilotlight.dataplane.source_origin import ModelSource, OpenSource, SourceOrigin
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.model import Dtype, Model, ScalingBounds, Slo

MIB = 1 << 20
READS = 4
"""PILOTLIGHT_FETCH_READS, as it is by default; so are the two below."""
THREADS = 16
STALL_TIMEOUT_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
MANIFEST = "manifest.json"
LAYER_BYTES = 32 * MIB
NOISE_BYTES = 16 * MIB + 8
"""Of one piece of a file of parameters."""
HIDDEN_SIZES = {LAYER_BYTES: 1024, 4 * LAYER_BYTES: 2048}
"""Of a layer of so many bytes: four square projections, and three to or from four times as much."""


def machine() -> dict[str, Any]:
    """What the figures were taken on, and with what."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next(
            (line.split(":")[1].strip() for line in lines if "model name" in line), "unknown"
        ),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("blake3", "obstore")},
        "load_average": round(os.getloadavg()[0], 2),
    }


def floor(
    measured: float, *, at_most: float | None = None, at_least: float | None = None
) -> dict[str, Any]:
    """One floor, and whether it is reached; ``at_most`` or ``at_least``."""
    if at_most is not None:
        return {"measured": measured, "at_most": at_most, "met": measured <= at_most}
    assert at_least is not None
    return {"measured": measured, "at_least": at_least, "met": measured >= at_least}


def make_model(folder: Path, mib: int, layer_bytes: int = LAYER_BYTES) -> None:
    """A checkpoint whose layers are so large in all; embedding and head are small.

    Its file is written tensor by tensor: a model may be larger than half of the memory.
    """
    hidden_size = HIDDEN_SIZES[layer_bytes]
    config = tiny_config(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=max(1, mib * MIB // layer_bytes),
        vocab_size=512,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    shapes = tiny_tensors(config)
    header: dict[str, Any] = {}
    total_bytes = 0
    for name, shape in shapes.items():
        stop = total_bytes + math.prod(shape) * Dtype.BFLOAT16.size_bytes
        offsets = [total_bytes, stop]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        total_bytes = stop
    noise = os.urandom(NOISE_BYTES)
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(frame_header(json.dumps(header).encode()))
        for at in range(0, total_bytes, len(noise)):
            # No two pieces are the same.
            file.write((at.to_bytes(8, "little") + noise[8:])[: total_bytes - at])


def record_manifest(folder: Path, source: Source | None = None) -> int:
    """Write a model's manifest beside it, with every digest recorded, as of another source that
    holds the same.

    The bytes of all parts.
    """
    files = FolderSource(folder)
    local = read_checkpoint(files).manifest
    manifest = read_checkpoint(source).manifest if source is not None else local
    digests = {
        (p, c): chunk_digest(read_chunk(files, local, chunk))
        for p, part in enumerate(local.parts)
        for c, chunk in enumerate(part.chunks)
    }
    (folder / MANIFEST).write_bytes(encode(manifest.with_digests(digests)))
    return bytes_of(manifest)


def recorded_manifest(folder: Path) -> Manifest:
    """What ``record_manifest`` wrote."""
    return decode((folder / MANIFEST).read_bytes())


def bytes_of(manifest: Manifest) -> int:
    """All parts, as they lie in the pool."""
    return sum(part.image_bytes for part in manifest.parts)


def model_of(uri: str, manifest: Manifest, source_version: str = "") -> Model:
    """A model as it is registered."""
    return Model(
        name=ModelName("bench"),
        uri=uri,
        revision=None,
        source_version=source_version,
        digest=manifest.digest(),
        text_digest=Digest("0" * 64),
        dtype=manifest.spec.dtype,
        spec=manifest.spec,
        slo=Slo(ttft_ms=1000, tpot_ms=100),
        scaling=ScalingBounds(),
    )


def sources_for(uri: str, endpoint: str) -> Sources:
    """What a loader opens models with; ``endpoint`` is the S3 server's, empty for none."""
    return Sources(settings_for(uri, endpoint), Patience())


def settings_for(uri: str, endpoint: str) -> ModelRootsSettings:
    """What a loader would be told."""
    return ModelRootsSettings(model_roots=uri, s3_endpoint=endpoint, s3_allow_http=True)


def opener(sources: Sources) -> OpenSource:
    """Opens a model's own source."""

    def open_source(model: Model, manifest: Manifest) -> ModelSource:
        return SourceOrigin(sources.open(model.uri), manifest, model.uri)

    return open_source


def fetch_tools(
    pool: HostPool,
    manifest: Manifest,
    open_source: OpenSource,
    *,
    nearby: tuple[Nearby, ...] = (),
    reads: int = READS,
    threads: int = THREADS,
    native: bool = True,
    local: int | None = None,
) -> FetchTools:
    """What every fetch of a loader works with."""
    clock = SystemClock()
    return FetchTools(
        pool=pool,
        readers=Readers(threads, STALL_TIMEOUT_S),
        manifests=Bare(manifest),
        open_source=open_source,
        lanes=Lanes(
            LaneLimits(least=reads, most=threads, local=local or len(os.sched_getaffinity(0))),
            SourceLimits(None, clock),
            clock,
        ),
        distrusted=Distrusted(clock),
        faults=Faults.parse(""),
        clock=clock,
        phases=PhaseRecorder(clock, "bench"),
        native=native_reads() if native else None,
        nearby=nearby,
    )


class Bare:
    """``Manifests`` with nothing learned."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    async def get(self, model: Model) -> Manifest:
        return self.manifest

    async def latest(self, model: Model) -> Manifest:
        return self.manifest

    def learned(
        self, model: Model, part: int, digests: tuple[Digest, ...], disputed: object
    ) -> None: ...


class Quiet:
    """An observer and owner that has nothing to say."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def on_copies_changed(self) -> None: ...
    def on_fetch_ended(self, seconds: float, size_bytes: int, code: str) -> None: ...
    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None: ...
    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None: ...


def cpu_s() -> float:
    """Processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
