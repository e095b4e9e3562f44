"""How an engine child records and restores graphs, by what its worker says: no device is needed to
plan it.
"""

from pathlib import Path
from typing import Any

import pytest
from artifact_listing import an_artifact

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.engine import LoadStage
from pilotlight.common.messages.graphs import GraphWays, Precomputed
from pilotlight.engine.cuda import restored, triggering
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice
from pilotlight.engine.cuda.indirect import Anywhere
from pilotlight.engine.cuda.recording import GraphRecorder
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.engine.cuda.tracing import TracingRecorder
from pilotlight.engine.cuda.triggering import TriggeredGraphs
from pilotlight.native.handles import SymbolKernels
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import GRAPHS, Blob, GraphLayout, GraphPlace, Trial
from pilotlight.policy.model import Model, Stage
from pilotlight.worker.engine_child.graphs import GraphPlans
from pilotlight.worker.engines.options import graph_ways
from pilotlight.worker.settings import WorkerSettings

INSTANCE = InstanceId("inst-1")

LAYOUT = GraphLayout(
    slot=3,
    places=(GraphPlace(name="logits", address=1),),
    pool_bytes=1 << 20,
    trials=(Trial(rows=1, digest="a"),),
)


def a_load(model: Model, ways: GraphWays, stage: Stage | None = None, **changes: Any) -> LoadStage:
    return LoadStage(
        instance_id=INSTANCE,
        model=model,
        stage=stage or model.spec.whole,
        device_bytes=1 << 20,
        pool_path="/nowhere",
        precomputed=Precomputed(ways=ways),
        **changes,
    )


def plan_by(plans: GraphPlans, model: Model, ways: GraphWays, stage: Stage | None = None) -> Any:
    blob = Blob(kind=GRAPHS, digest=Digest("0" * 64), size_bytes=1)
    artifact = encode_json(an_artifact(model, blobs=(blob,), graphs=LAYOUT))
    return plans.plan_of(a_load(model, ways, stage, artifact=artifact, graphs="/x"))


def test_a_workers_settings_are_the_usual_ways_unless_told() -> None:
    assert graph_ways(WorkerSettings(node_id="node-1")) == GraphWays()
    other = WorkerSettings(node_id="node-1", graph_pointers="indirect", graph_kernels="trigger")
    assert graph_ways(other) == GraphWays(pointers="indirect", kernels="trigger")


def test_graphs_are_recorded_in_the_way_that_is_asked_for(model: Model, tmp_path: Path) -> None:
    (tmp_path / "witness").write_bytes(b"archive")

    def recorder(ways: GraphWays) -> Any:
        return GraphPlans().plan_of(a_load(model, ways, record=str(tmp_path / "x")))

    assert type(recorder(GraphWays())) is GraphRecorder
    witness = recorder(GraphWays(pointers="indirect"))
    assert isinstance(witness, TracingRecorder)
    assert witness._witness is None
    path = str(tmp_path / "witness")
    assert recorder(GraphWays(pointers="indirect", witness=path))._witness == b"archive"
    with pytest.raises(FileNotFoundError):
        recorder(GraphWays(pointers="indirect", witness=str(tmp_path / "gone")))


def test_graphs_are_restored_in_the_way_that_is_asked_for(model: Model) -> None:
    usual = plan_by(GraphPlans(), model, GraphWays())
    assert type(usual) is RestoredGraphs
    assert (usual._open, usual._fit) == (ArchiveOnDevice, restored.fitted)
    symbol = plan_by(GraphPlans(), model, GraphWays(kernels="symbol"))
    assert symbol._open.keywords == {"kernels": SymbolKernels}
    assert symbol._fit is restored.fitted
    for kernels, wanted in (("images", None), ("symbol", SymbolKernels)):
        ways = GraphWays(pointers="indirect", kernels=kernels)
        way = plan_by(GraphPlans(), model, ways)._open.__self__
        assert isinstance(way, Anywhere)
        assert way.kernels is wanted


@pytest.mark.parametrize("pointers", ["addresses", "indirect"])
def test_the_first_layer_triggers_kernels_when_it_is_there(
    model: Model, monkeypatch: pytest.MonkeyPatch, pointers: Any
) -> None:
    triggered: list[bool] = []
    monkeypatch.setattr(TriggeredGraphs, "trigger", lambda plan: triggered.append(True))
    plans, ways = GraphPlans(), GraphWays(pointers=pointers, kernels="trigger")
    plan = plan_by(plans, model, ways)
    assert isinstance(plan, TriggeredGraphs)
    assert isinstance(getattr(plan._open, "__self__", None), Anywhere) == (pointers == "indirect")
    for part, so_far in ((1, 0), (5, 0), (0, 1), (1, 1), (2, 1)):
        plans.placed(INSTANCE, part)
        assert len(triggered) == so_far
    plans.placed(InstanceId("another"), 0)
    assert Stage(0, 1) == triggering.FIRST


def test_a_stage_that_is_to_grow_has_its_kernels_from_images(model: Model) -> None:
    plans, ways = GraphPlans(), GraphWays(pointers="indirect", kernels="trigger")
    plan = plan_by(plans, model, ways, Stage(0, 1))
    assert type(plan) is RestoredGraphs
    assert plan._open.__self__.kernels is None
    plans.placed(INSTANCE, 0)
    plans.placed(INSTANCE, 1)


@pytest.mark.parametrize("way", [{"graph_pointers": "indirect"}, {"graph_kernels": "symbol"}])
def test_launch_lists_are_refused_beside_ways_that_have_none(way: Any) -> None:
    WorkerSettings(launch_lists=True)
    WorkerSettings(**way)
    with pytest.raises(SettingsInvalid, match="leave one of them out"):
        WorkerSettings(launch_lists=True, **way)
