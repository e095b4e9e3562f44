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
from pilotlight.common.messages.graphs import GraphsRecorded, StageGraphs
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import (
    GRAPHS,
    Artifact,
    Blob,
    Fingerprint,
    GraphLayout,
    GraphPlace,
    Trial,
)
from pilotlight.policy.model import Model
from pilotlight.worker.build_session import BuildSession, Outcome
from pilotlight.worker.build_steps import Built, build

pytestmark = pytest.mark.anyio

ON_GPU = replace(HERE, device_kind=DeviceKind.CUDA)
ARCHIVE = b"archive of graphs"
BLOB = Blob(kind=GRAPHS, digest=Digest(blake3(ARCHIVE).hexdigest()), size_bytes=len(ARCHIVE))
LAYOUT = GraphLayout(
    slot=3,
    places=(GraphPlace(name="logits", address=1),),
    pool_bytes=1 << 20,
    trials=(Trial(rows=1, digest="a"), Trial(rows=2, digest="b")),
)


class Session:
    """One engine of a build."""

    def __init__(self, engines: "Engines", record_images: bool) -> None:
        self.engines, self.record_images = engines, record_images
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
    ) -> int:
        engines = self.engines
        assert bool(record) == self.record_images
        if record:
            if engines.fails is not None:
                raise engines.fails
            _write(record, engines.writes)
            self.recorded = engines.recorded
        if graphs:
            engines.read.append(_read(graphs))
            self.graphs = engines.restored
            if engines.proof_fails is not None:
                raise engines.proof_fails
        engines.loads.append("record" if record else "graphs" if graphs else "plain")
        return 4096

    async def run(self, prompts: Any, max_tokens: int) -> Outcome:
        outputs = {str(index): [7] * max_tokens for index in range(len(prompts))}
        return Outcome(outputs, [(len(prompts), 0.01)])


def _write(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


class Engines:
    """What they say."""

    def __init__(self) -> None:
        self.open = 0
        self.graphs = True
        self.loads: list[str] = []
        self.read: list[bytes] = []
        self.writes = ARCHIVE
        self.recorded = GraphsRecorded(layout=LAYOUT, blob=BLOB)
        self.restored = StageGraphs(instance_id=InstanceId("build"), ready=2, proved=2)
        self.fails: PilotlightError | None = None
        self.proof_fails: PilotlightError | None = None

    def session(self, *, record_images: bool = False) -> BuildSession:
        self.open += 1
        return cast("BuildSession", Session(self, record_images))

    async def build(self, model: Model) -> tuple[Built, Artifact]:
        claimed = ClaimedBuild(
            model=model, fingerprint=Fingerprint.of(ON_GPU, model), attempt=1, lease_s=15.0
        )
        steps: list[tuple[str, float]] = []

        async def told(step: str, share: float) -> None:
            steps.append((step, share))

        built = await build(claimed, self.session, told, graphs=self.graphs)
        assert self.open == 0, "every engine was ended"
        return built, decode_json(built.manifest, Artifact)


async def test_graphs_are_recorded_in_one_engine_and_proved_in_another(model: Model) -> None:
    engines = Engines()
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "record", "graphs"]
    assert engines.read == [ARCHIVE]
    assert built.archives == {BLOB.digest: ARCHIVE}
    assert (artifact.graphs, artifact.blobs, artifact.graphs_refused) == (LAYOUT, (BLOB,), "")


async def test_an_artifact_has_no_graphs_unless_they_are_wanted(model: Model) -> None:
    engines = Engines()
    engines.graphs = False
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "plain"]
    assert (built.archives, artifact.graphs, artifact.graphs_refused) == ({}, None, "")


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
    assert engines.loads[-1] == "plain", "it is proved without them"
    assert built.archives == {}
    assert (artifact.graphs, artifact.blobs, artifact.graphs_refused) == (None, (), field)
