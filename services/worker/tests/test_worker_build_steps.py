"""What a build does about graphs, with engines that say what they are told to."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from artifact_listing import HERE
from blake3 import blake3

from pilotlight.common.errors import EngineFailed, PilotlightError
from pilotlight.common.errors import RestoreFailed as RestoreFailedError
from pilotlight.common.messages.artifacts import ClaimedBuild
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.engine import EngineUp
from pilotlight.common.messages.graphs import (
    GraphsRecorded,
    GraphWays,
    KernelsRecorded,
    Precomputed,
    StageGraphs,
    StageKernels,
)
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import (
    COMPILE_CACHE,
    GRAPHS,
    Artifact,
    Blob,
    CompiledFor,
    Fingerprint,
    GraphLayout,
    GraphPlace,
    Trial,
)
from pilotlight.policy.model import Model
from pilotlight.worker.build_session import BuildSession, Outcome
from pilotlight.worker.build_steps import Built, build
from pilotlight.worker.build_tour import tour

pytestmark = pytest.mark.anyio

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

    async def start(self) -> EngineUp:
        return EngineUp(pid=1, device_name="gpu", load_bytes_per_s=1.0, environment=ON_GPU)

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
    ) -> int:
        engines = self.engines
        assert bool(record) == self.record_images
        self.precomputed = precomputed or Precomputed()
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
        parts = ["record"] if record else ["graphs"] if graphs else []
        parts += ["kernels"] if self.precomputed.kernels else []
        engines.loads.append(" ".join(parts) or "plain")
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
        self.open = 0
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
        self.writes = ARCHIVE
        self.recorded = GraphsRecorded(layout=LAYOUT, blob=BLOB)
        self.restored = StageGraphs(instance_id=InstanceId("build"), ready=2, proved=2)
        self.fails: PilotlightError | None = None
        self.proof_fails: PilotlightError | None = None

    def session(
        self, *, record_images: bool = False, note_kernels: bool = False, witness: bool = False
    ) -> BuildSession:
        self.open += 1
        self.witnesses.append(witness)
        return cast("BuildSession", Session(self, record_images, note_kernels))

    async def build(self, model: Model) -> tuple[Built, Artifact]:
        claimed = ClaimedBuild(
            model=model, fingerprint=Fingerprint.of(ON_GPU, model), attempt=1, lease_s=15.0
        )
        steps: list[tuple[str, float]] = []

        async def told(step: str, share: float) -> None:
            steps.append((step, share))

        built = await build(claimed, self.session, told, self.ways if self.graphs else None)
        assert self.open == 0, "every engine was ended"
        return built, decode_json(built.manifest, Artifact)


async def test_graphs_are_recorded_in_one_engine_and_proved_in_another(model: Model) -> None:
    engines = Engines()
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "record", "graphs kernels"]
    assert engines.read == [ARCHIVE]
    assert built.archives == {BLOB.digest: ARCHIVE, KERNELS_BLOB.digest: KERNELS}
    assert (artifact.graphs, artifact.graphs_refused) == (LAYOUT, "")
    assert artifact.blobs == (KERNELS_BLOB, BLOB)


async def test_what_addresses_point_to_is_told_by_two_engines(model: Model) -> None:
    """The first one's arena is elsewhere; the second one reads what it recorded."""
    engines = Engines()
    engines.ways = GraphWays(pointers="indirect", kernels="symbol")
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "record", "record", "graphs kernels"]
    assert engines.witnesses == [False, True, False, False]
    assert engines.read == [ARCHIVE, ARCHIVE]
    usual, first, second, proved = engines.told
    assert usual == GraphWays()
    assert first == proved == engines.ways
    assert second.witness != ""
    assert (artifact.graphs, artifact.graphs_refused) == (LAYOUT, "")
    assert built.archives.keys() == {BLOB.digest, KERNELS_BLOB.digest}, "the witness is nobody's"


async def test_without_a_witness_nothing_is_recorded_by_its_name(model: Model) -> None:
    engines = Engines()
    engines.ways = GraphWays(pointers="indirect")
    engines.witnessed = GraphsRecorded(refused="varies", message="other bits")
    _, artifact = await engines.build(model)
    assert engines.loads == ["plain", "record", "kernels"]
    assert (artifact.graphs, artifact.graphs_refused) == (None, "varies")


async def test_an_artifact_has_no_graphs_unless_they_are_wanted(model: Model) -> None:
    engines = Engines()
    engines.graphs = False
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "plain"]
    assert (built.archives, artifact.graphs, artifact.graphs_refused) == ({}, None, "")
    assert (artifact.compiled, artifact.compiled_refused) == (None, "")


WAYS: dict[str, dict[str, Any]] = {
    "nodes": {"recorded": GraphsRecorded(refused="nodes", message="a node of type host")},
    "graphs_digest": {"writes": ARCHIVE[:-1] + b"x"},
    "graphs_size": {"writes": ARCHIVE[:-1]},
    "engine": {"recorded": None},
    "engine_failed": {"fails": EngineFailed("the engine of the build was ended")},
    "unproved": {"restored": StageGraphs(instance_id=InstanceId("build"), ready=2, proved=1)},
    "pool": {"restored": StageGraphs(instance_id=InstanceId("build"), refused="pool")},
    "restore_failed": {"proof_fails": RestoreFailedError("the graph of 2 rows gave")},
}


@pytest.mark.parametrize("field", WAYS)
async def test_an_artifact_goes_without_graphs_that_are_not_proved_and_says_why(
    model: Model, field: str
) -> None:
    engines = Engines()
    for name, value in WAYS[field].items():
        setattr(engines, name, value)
    built, artifact = await engines.build(model)
    assert engines.loads[-1] == "kernels", "it is proved without them"
    assert built.archives == {KERNELS_BLOB.digest: KERNELS}
    assert (artifact.graphs, artifact.graphs_refused) == (None, field)
    assert (artifact.blobs, artifact.compiled) == ((KERNELS_BLOB,), MADE_FOR)


async def test_kernels_are_of_a_tour_and_proved_where_there_are_no_others(model: Model) -> None:
    engines = Engines()
    _, artifact = await engines.build(model)
    assert (artifact.compiled, artifact.compiled_refused) == (MADE_FOR, "")
    assert engines.kernels_read == [KERNELS]
    steps = [(*step.prompts, *step.later) for step in tour(model.spec.max_context_tokens, 4096)]
    assert len(steps) > 10
    count, ran = len(steps), engines.batches
    begun = [at for at in range(len(ran)) if ran[at : at + count] == steps]
    assert len(begun) == 2, "before they are written down, and where there are no others"


KERNEL_WAYS: dict[str, dict[str, Any]] = {
    "cache_manager": {"kernels": KernelsRecorded(refused="cache_manager", message="elsewhere")},
    "compile_cache_digest": {"writes_kernels": KERNELS[:-1] + b"x"},
    "compile_cache_size": {"writes_kernels": KERNELS[:-1]},
    "engine": {"kernels": None},
    "engine_failed": {"tour_fails": EngineFailed("a prompt was refused")},
    "libc": {
        "kernels_restored": StageKernels(instance_id=InstanceId("build"), refused="libc"),
    },
    "restore_failed": {"wrong": 8},
}


@pytest.mark.parametrize("field", KERNEL_WAYS)
async def test_an_artifact_goes_without_kernels_that_are_not_proved_and_says_why(
    model: Model, field: str
) -> None:
    engines = Engines()
    for name, value in KERNEL_WAYS[field].items():
        setattr(engines, name, value)
    built, artifact = await engines.build(model)
    assert (artifact.compiled, artifact.compiled_refused) == (None, field)
    assert KERNELS_BLOB.digest not in built.archives
    assert KERNELS_BLOB not in artifact.blobs
    assert "kernels" not in engines.loads[-1]
