"""Engines of a build that say what they are told to."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from artifact_listing import HERE
from blake3 import blake3

from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.artifacts import ClaimedBuild
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.engine import EngineUp
from pilotlight.common.messages.graphs import (
    GraphsRecorded,
    GraphWays,
    KernelsRecorded,
    Precomputed,
    RangeRecorded,
    StageGraphs,
    StageKernels,
)
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coverage import LoadSeconds
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import (
    COMPILE_CACHE,
    GRAPHS,
    Artifact,
    Blob,
    CompiledFor,
    Environment,
    Fingerprint,
    GraphLayout,
    GraphPlace,
    Trial,
    range_kind,
)
from pilotlight.policy.model import Model, Stage
from pilotlight.worker.build_session import BuildSession, Outcome
from pilotlight.worker.build_steps import Built, build

ON_GPU = replace(HERE, device_kind=DeviceKind.CUDA)
ARCHIVE = b"archive of graphs"
BLOB = Blob(kind=GRAPHS, digest=Digest(blake3(ARCHIVE).hexdigest()), size_bytes=len(ARCHIVE))
KERNELS = b"archive of kernels"
KERNELS_BLOB = Blob(
    kind=COMPILE_CACHE, digest=Digest(blake3(KERNELS).hexdigest()), size_bytes=len(KERNELS)
)
MADE_FOR = CompiledFor(compiler="triton 3.6.0", processor="sm_90", python=".so", libc="2.39")
LAYOUT = GraphLayout(
    slot=3,
    places=(GraphPlace(name="logits", address=1),),
    pool_bytes=1 << 20,
    trials=(Trial(rows=1, digest="a"),),
    prompts=(Trial(rows=16, digest="b"),),
)


class Session:
    """One engine of a build."""

    def __init__(self, engines: "Engines", record_images: bool, note_kernels: bool) -> None:
        self.engines, self.record_images = engines, record_images
        self.note_kernels = note_kernels
        self.kernels: StageKernels | None = None
        self.precomputed = Precomputed()
        self.recorded: GraphsRecorded | None = None
        self.graphs: StageGraphs | None = None
        self.took = LoadSeconds()

    async def start(self) -> EngineUp:
        engines = self.engines
        engines.starts += 1
        return EngineUp(
            pid=1, device_name="gpu", load_bytes_per_s=1.0, environment=engines.environment
        )

    async def close(self) -> None:
        self.engines.open -= 1

    async def load(
        self,
        model: Model,
        device_bytes: int,
        artifact: bytes = b"",
        graphs: str = "",
        record: str = "",
        precomputed: Precomputed | None = None,
        layers: Stage | None = None,
    ) -> int:
        engines = self.engines
        assert bool(record) == self.record_images
        self.precomputed = precomputed or Precomputed()
        if layers is not None:
            return await self.prove(layers, decode_json(artifact, Artifact))
        if record:
            for file in self.precomputed.ranges:
                _write(file.path, engines.writes_range(file.layers))
        engines.told.append(self.precomputed.ways)
        assert bool(self.precomputed.record_kernels) == self.note_kernels
        if self.precomputed.record_kernels:
            _write(self.precomputed.record_kernels, engines.writes_kernels)
        if self.precomputed.kernels:
            assert self.precomputed.only
            engines.kernels_read.append(_read(self.precomputed.kernels))
            self.kernels = engines.kernels_restored
        if record:
            if engines.fails is not None:
                raise engines.fails
            _write(record, engines.writes)
            seen = (
                self.precomputed.ways.pointers == "indirect" and not self.precomputed.ways.witness
            )
            self.recorded = (engines.witnessed if seen else None) or engines.recorded
            if path := self.precomputed.ways.witness:
                engines.read.append(_read(path))
        if graphs:
            engines.read.append(_read(graphs))
            self.graphs = engines.restored
            if engines.proof_fails is not None:
                raise engines.proof_fails
        self.took = engines.restores_in if artifact else engines.loads_in
        parts = ["record"] if record else ["graphs"] if graphs else []
        parts += ["kernels"] if self.precomputed.kernels else []
        engines.loads.append(" ".join(parts) or "plain")
        return 4096

    async def prove(self, layers: Stage, artifact: Artifact) -> int:
        """Of a range alone."""
        engines, (file,) = self.engines, self.precomputed.ranges
        assert file.layers == layers
        found = artifact.graphs_of(layers)
        assert found is not None
        assert _read(file.path) == engines.writes_range(layers)
        engines.loads.append(f"{layers.start}-{layers.stop}")
        outcome = engines.ranges_restored.get(layers, engines.restored)
        if isinstance(outcome, PilotlightError):
            raise outcome
        self.graphs = outcome
        return 4096

    async def run(self, prompts: Any, max_tokens: int, later: Any = ()) -> Outcome:
        engines, count = self.engines, len(prompts) + len(later)
        engines.batches.append(tuple(len(prompt) for prompt in (*prompts, *later)))
        if engines.tour_fails is not None and count > 100:
            raise engines.tour_fails
        token = engines.wrong if self.precomputed.kernels and engines.wrong else 7
        outputs = {str(index): [token] * max_tokens for index in range(count)}
        return Outcome(outputs, [(count, 0.01)])

    async def unload(self) -> KernelsRecorded | None:
        return self.engines.kernels if self.note_kernels else KernelsRecorded(compiled=("_gemv",))


def _write(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


class Engines:
    """What they say."""

    def __init__(self) -> None:
        self.open = self.starts = 0
        self.on_gpu = True
        self.graphs = True
        self.ways = GraphWays()
        self.witnesses: list[bool] = []
        """Of each engine, whether its arena is elsewhere."""
        self.told: list[GraphWays] = []
        """What each was told of ways."""
        self.witnessed: GraphsRecorded | None = None
        """What the first recording comes to, where it is another than the second."""
        self.batches: list[tuple[int, ...]] = []
        self.kernels_read: list[bytes] = []
        self.writes_kernels = KERNELS
        self.kernels: KernelsRecorded | None = KernelsRecorded(made_for=MADE_FOR, blob=KERNELS_BLOB)
        self.kernels_restored = StageKernels(instance_id=InstanceId("build"), restored=3)
        self.tour_fails: PilotlightError | None = None
        self.wrong = 0
        """The token that restored kernels give."""
        self.loads: list[str] = []
        self.read: list[bytes] = []
        self.loads_in = LoadSeconds(load_s=2.0, init_s=6.0)
        self.restores_in = LoadSeconds(load_s=1.0, restore_s=0.25)
        """What loads take without an artifact and with one."""
        self.writes = ARCHIVE
        self.recorded = GraphsRecorded(layout=LAYOUT, blob=BLOB)
        self.restored = StageGraphs(instance_id=InstanceId("build"), ready=2, proved=2)
        self.fails: PilotlightError | None = None
        self.proof_fails: PilotlightError | None = None
        self.ranges = False
        self.ranges_restored: dict[Stage, StageGraphs | PilotlightError] = {}
        """What becomes of those of a range, where it is another thing than of the whole model's."""

    @property
    def environment(self) -> Environment:
        return ON_GPU if self.on_gpu else HERE

    def writes_range(self, layers: Stage) -> bytes:
        return b"archive of graphs of %d-%d" % (layers.start, layers.stop)

    def records(self, layers: Stage) -> RangeRecorded:
        data = self.writes_range(layers)
        digest = Digest(blake3(data).hexdigest())
        blob = Blob(kind=range_kind(layers), digest=digest, size_bytes=len(data))
        return RangeRecorded(layers=layers, layout=LAYOUT, blob=blob)

    def session(
        self, *, record_images: bool = False, note_kernels: bool = False, witness: bool = False
    ) -> BuildSession:
        self.open += 1
        self.witnesses.append(witness)
        return cast("BuildSession", Session(self, record_images, note_kernels))

    async def build(self, model: Model) -> tuple[Built, Artifact]:
        claimed = ClaimedBuild(
            model=model,
            fingerprint=Fingerprint.of(self.environment, model),
            attempt=1,
            lease_s=15.0,
        )
        steps: list[tuple[str, float]] = []

        async def told(step: str, share: float) -> None:
            steps.append((step, share))

        built = await build(
            claimed, self.session, told, self.ways if self.graphs else None, ranges=self.ranges
        )
        assert self.open == 0, "every engine was ended"
        return built, decode_json(built.manifest, Artifact)
